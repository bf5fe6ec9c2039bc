"""Check that caches are written in place, and that a large one does not slow a cycle down."""

import time

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten
from sweep import sampled, sweep

import mlx_mtp

# Weights of about 1 MB and 8 KB of keys and values per token: a context of 4,000 is 32 MB.
SHAPE = {
    "hidden_size": 64,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_attention_groups": 8,
    "attention_other_setting": {"num_attention_heads": 12, "num_attention_groups": 4},
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"] * 3,
    "vocab_size": 64,
}


PROMPT = [i * 7 % 64 for i in range(1500)]


@sweep
@pytest.mark.parametrize(("bits", "k"), sampled([(None, 0)], [(None, 0), (8, 3)]))
def test_peak_memory_is_weights_and_kv(tiny_models, k, bits):
    """After the first new token the peak stays near the size of the weights and of all tokens' keys and values."""
    model, _ = tiny_models(0, **SHAPE)
    weights = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    mx.clear_cache()
    others = mx.get_active_memory() - weights  # other tests' models
    cache = mlx_mtp.make_prompt_cache(model, kv_bits=bits, mtp_kv_bits=bits)
    steps = mlx_mtp.generate_step(
        PROMPT, model, prompt_cache=cache, max_tokens=100, num_draft_tokens=k, adaptive=False, prefill_step_size=256
    )
    for i, _ in enumerate(steps):
        if i == 0:
            mx.reset_peak_memory()
    held = 2 * 2 * 8 * 64 * 4 * cache.offset * (1 if bits is None else (bits + 1) / 32)
    rings = sum(c.nbytes for c in cache.layers + cache.heads if hasattr(c, "ring"))
    assert cache.offset == len(PROMPT) + 99
    if bits is not None and not mx.metal.is_available():
        held *= 1.5  # MLX's CPU backend copies a layer's quantized rows to multiply them; there are two layers
    assert mx.get_peak_memory() - others < 1.2 * (weights + held + rings)


@pytest.mark.parametrize("k", sampled([3], [0, 3]))
def test_growing_copies_one_layer_at_a_time(tiny_models, k):
    model, _ = tiny_models(0, **SHAPE)
    cache = mlx_mtp.make_prompt_cache(model)
    for _ in mlx_mtp.generate_step(PROMPT[:250], model, prompt_cache=cache, max_tokens=0):
        pass
    for c in cache.layers:
        c.reserve = lambda rows: None
    mx.clear_cache()
    before, layer = mx.get_active_memory(), cache.layers[0].nbytes
    mx.reset_peak_memory()
    for _ in mlx_mtp.generate_step([1], model, prompt_cache=cache, max_tokens=14, num_draft_tokens=k, adaptive=False):
        pass
    assert cache.layers[0].nbytes == 2 * layer
    assert mx.get_peak_memory() - before < 2 * layer + 1.5 * 2 * layer


@pytest.mark.timing
@pytest.mark.parametrize("k", [0, 3])
def test_time_per_cycle_does_not_grow_with_capacity(tiny_models, k):
    model, _ = tiny_models(0, **SHAPE)
    caches = {}
    for capacity in (1024, 32768):
        caches[capacity] = mlx_mtp.make_prompt_cache(model)
        caches[capacity].reserve(capacity)
        for c in caches[capacity].layers:
            c.reserve = lambda rows: None  # keep the test's capacity
        prompt = [i % 64 for i in range(300)]
        list(mlx_mtp.generate_step(prompt, model, prompt_cache=caches[capacity], max_tokens=0))
    assert caches[32768].nbytes > 20 * caches[1024].nbytes
    best = dict.fromkeys(caches, float("inf"))
    for _ in range(10):  # the fastest of many short runs, because other programs may run
        for capacity, cache in caches.items():
            tic = time.perf_counter()
            for _ in mlx_mtp.generate_step(
                [1], model, prompt_cache=cache, max_tokens=8, num_draft_tokens=k, adaptive=False
            ):
                pass
            best[capacity] = min(best[capacity], time.perf_counter() - tic)
    assert best[32768] < 1.5 * best[1024]


def test_loading_holds_the_checkpoint_once(tmp_path):
    config = {**tiny.CONFIG, "hidden_size": 256, "vocab_size": 4096}
    path = tiny.save(tmp_path, config, tiny.random_weights(config))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = mlx_mtp.load_model(path)
    size = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    assert mx.get_peak_memory() - before < 1.2 * size
