"""What only a Mac's GPU can show; skipped elsewhere."""

import mlx.core as mx
import pytest
import tiny

import mlx_mtp


@pytest.mark.metal
@pytest.mark.parametrize("seed", range(3))
def test_text_on_the_gpu_is_the_cpus(tiny_models, seed):
    model, plain = tiny_models(seed, vocab_size=5)
    prompt = [1, 2, 3, 0, 4, 2, 1, 3, 0, 1, 2, 2]
    with mx.stream(mx.cpu):
        expected = tiny.greedy(plain, prompt, 40)
    assert mx.default_device() == mx.Device(mx.gpu)
    for k in range(4):
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=40, num_draft_tokens=k)
        assert [token for token, _, _ in steps] == expected


@pytest.mark.metal
@pytest.mark.parametrize("k", [0, 3])
def test_cycles_are_in_place_on_the_gpu(tiny_models, k):
    """The caches of one long generation are written where they are: memory does not move between cycles."""
    model, _ = tiny_models(0, hidden_size=64, head_dim=64)
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step([1] * 2000, model, prompt_cache=cache, max_tokens=200, num_draft_tokens=k)
    for _ in range(20):
        next(steps)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in steps:
        pass
    assert mx.get_peak_memory() - before < cache.layers[0].nbytes
