"""Check that attention on a pool's slots is one kernel launch, and gives each sequence the bits it has alone."""

import mlx.core as mx
import numpy as np
import pytest
import tiny
from metal_cases import linux_only
from quantized_models import STEP

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.kinds import make_cache
from mlx_mtp.cache.ring import Ring
from mlx_mtp.cache.slots import Span, pooled
from mlx_mtp.tuning import kernel_switch

pytestmark = linux_only
CONFIG = {**tiny.CONFIG, **tiny.SHORTER, **STEP, "swiglu_limits_shared": [0, 0, 0.5]}
LENGTHS, SLOTS, ROWS = (5, 41, 12), (4, 0, 2), 3


@pytest.fixture(scope="module")
def attentions(tmp_path_factory):
    """Return two attentions: one with full attention, one with a window of 8."""
    path = tiny.save(tmp_path_factory.mktemp("step"), CONFIG, tiny.random_weights(CONFIG))
    model = mlx_mtp.load_model(path, kernels="off")
    kernel_switch.place(model)
    return [layer.self_attn for layer in model.layers[:2]]


def cache_of(module, length: int, start: int):
    cache = module.attention.make_cache()
    mx.random.seed(length)
    cache.update_and_fetch(*mx.random.normal((2, 1, module.attention.form.kv_heads, length, 32)))
    cache.start = start
    return cache


def pool_of(module):
    caches = [cache_of(module, length, start) for length, start in zip(LENGTHS, (0, 7, 2), strict=True)]
    pool = pooled(caches[0], getattr(caches[0], "ring", None))
    by_slot = sorted(zip(SLOTS, range(3), strict=True))
    newcomers = list(zip(SLOTS, caches, LENGTHS, strict=True))
    pool.regroup(Span(SLOTS, 5), [text for _, text in by_slot], newcomers)
    pool.offset, pool.limit = mx.array([LENGTHS[text] for _, text in by_slot]), max(LENGTHS)
    return pool, [caches[text] for _, text in by_slot]


@pytest.mark.parametrize("layer", [0, 1])
def test_sequences_of_a_pool_share_a_launch(attentions, layer):
    module = attentions[layer]
    assert module.attention.form.head_dim == 32
    pool, caches = pool_of(module)
    x = mx.random.normal((3, ROWS, CONFIG["hidden_size"]), key=mx.random.key(3))
    module.attention.rows = module.placing.rows = frozenset({ROWS})
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        y = module(x, None, pool)
        assert [launch.kernel for launch in launches] == ["norm_rope", "verify_attention", "attention_merge"]
        alone = [module(x[i : i + 1], None, cache) for i, cache in enumerate(caches)]
    module.placing.rows = frozenset()
    assert np.allclose(y, mx.concatenate(alone), atol=1e-5)
    assert pool.offset.tolist() == [LENGTHS[1] + ROWS, LENGTHS[2] + ROWS, LENGTHS[0] + ROWS]


def test_a_pool_uses_the_kernel_only_if_each_sequence_would(attentions):
    """A pool has sequences of any length, so the kernel must be on for all; else MLX attends, with equal bits."""
    module = attentions[0]
    x = mx.random.normal((3, ROWS, CONFIG["hidden_size"]), key=mx.random.key(3))
    found = []
    for rows, of_context in (({ROWS}, {0: {ROWS}, 16384: set()}), ({1}, {}), ({ROWS}, {0: {ROWS}})):
        pool, _ = pool_of(module)
        module.attention.rows, module.attention.rows_of_context = frozenset(rows), of_context
        mask = pool.make_mask(ROWS)
        with emulator.emulated(emulator.Options(traffic=False)) as launches:
            found.append(module(x, mask, pool))
        assert len(launches) == (2 if len(found) == 3 else 0)
    assert np.allclose(found[0], found[2], atol=1e-5)
    assert np.array_equal(found[0], found[1])


def test_a_pool_that_keeps_first_rows_is_read_by_mlx(attentions):
    """With `max_kv_size`: the kernel would read each position from another slot."""
    module, ring = attentions[0], Ring(8, keep=3)
    caches = [make_cache(ring) for _ in LENGTHS]
    pool, form = pooled(caches[0], ring), module.attention.form
    for cache, length in zip(caches, LENGTHS, strict=True):
        cache.update_and_fetch(*mx.random.normal((2, 1, form.kv_heads, length, 32), key=mx.random.key(length)))
    pool.regroup(Span(range(3), 3), range(3), list(zip(range(3), caches, LENGTHS, strict=True)))
    pool.offset, pool.limit = mx.array(LENGTHS), max(LENGTHS)
    x = mx.random.normal((3, 1, CONFIG["hidden_size"]), key=mx.random.key(3))
    module.attention.rows = frozenset({1})
    together = module(x, pool.make_mask(1), pool)
    alone = [module(x[i : i + 1], cache.make_mask(1), cache) for i, cache in enumerate(caches)]
    assert np.allclose(together, mx.concatenate(alone), atol=1e-5)
