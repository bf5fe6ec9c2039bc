"""Check kernels on a Mac's GPU; skipped elsewhere."""

import mlx.core as mx
import pytest
import tiny
from quantized_models import save_checkpoints

import mlx_mtp
from mlx_mtp.bench.compile_jobs import lacking, type_name


@pytest.mark.metal
@pytest.mark.parametrize("seed", range(3))
def test_text_on_the_gpu_is_the_cpus(tiny_models, seed):
    model, plain = tiny_models(seed, vocab_size=5)
    prompt = [1, 2, 3, 0, 4, 2, 1, 3, 0, 1, 2, 2]
    with mx.stream(mx.cpu):
        expected = tiny.greedy(plain, prompt, 40)
    assert mx.default_device() == mx.Device(mx.gpu)
    for k in range(4):
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=40, num_draft_tokens=k, adaptive=False)
        assert [token for token, _, _ in steps] == expected


@pytest.mark.metal
@pytest.mark.parametrize("k", [0, 3])
def test_cycles_are_in_place_on_the_gpu(tiny_models, k):
    """The caches of a long generation are written in place: memory does not change between cycles."""
    model, _ = tiny_models(0, hidden_size=64, head_dim=64)
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step(
        [1] * 2000, model, prompt_cache=cache, max_tokens=200, num_draft_tokens=k, adaptive=False
    )
    for _ in range(20):
        next(steps)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in steps:
        pass
    assert mx.get_peak_memory() - before < cache.layers[0].nbytes


@pytest.mark.metal
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=type_name)
@pytest.mark.parametrize("name", ["step", "hybrid"])
def test_every_kernel_is_right_on_the_gpu(tmp_path, name, dtype):
    """Each has the promised bits, by the load's own check, and the text does not depend on drafts."""
    if why := lacking().get(type_name(dtype)):
        pytest.skip(f"this GPU has no {type_name(dtype)}: {why}")
    model = mlx_mtp.load_model(save_checkpoints(tmp_path, dtype)[name], kernels="exact")
    assert all("off" not in line for line in model.report.kernels)
    assert model.report.not_exact == ()
    steps = [
        mlx_mtp.generate_step([1, 2, 3, 4, 1], model, max_tokens=60, num_draft_tokens=k, adaptive=False)
        for k in range(4)
    ]
    texts = [[token for token, _, _ in step] for step in steps]
    assert texts == texts[:1] * 4
