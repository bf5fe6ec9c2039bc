"""Check that each kind of cache has a pool for several sequences, or is refused by name."""

import inspect
from functools import partial

import pytest

from mlx_mtp.cache import arrays, convolution, growing, kinds, layer_cache, mlx_lm_caches, recurrent, ring, slots


class Sparse(growing.LinearKVCache):
    """A cache with rows that no pool can hold."""


def kinds_of_cache():
    """Return every class of mlx_mtp/cache/ that a layer can have as its cache."""
    found = [
        c for module in (arrays, convolution, growing, mlx_lm_caches, recurrent, ring) for c in vars(module).values()
    ]
    classes = {c for c in found if inspect.isclass(c) and issubclass(c, layer_cache.LayerCache)}
    return classes - {layer_cache.LayerCache}


def test_each_kind_is_pooled_or_refused():
    assert kinds_of_cache() == slots.POOLS.keys() | {mlx_lm_caches.MlxLmCaches}


@pytest.mark.parametrize(
    ("window", "bits", "pool"),
    [
        (None, None, slots.PooledKV),
        (None, 8, slots.QuantizedPooledKV),
        (7, None, slots.PooledKV),
        (7, 4, slots.QuantizedPooledKV),
        (recurrent.RecurrentCache, None, slots.PooledState),
        (convolution.ConvolutionCache, None, slots.PooledConvolution),
        (partial(arrays.StateCache, 3), None, slots.PooledArrays),
    ],
)
def test_the_pool_of_a_kind(window, bits, pool):
    cache = kinds.make_cache(window, bits=bits)
    found = slots.pooled(cache, getattr(cache, "ring", None))
    assert type(found) is pool
    assert getattr(found, "bits", None) == bits
    assert found.window == (window if isinstance(window, int) else None)


@pytest.mark.parametrize("cache", [Sparse(), mlx_lm_caches.MlxLmCaches(), layer_cache.LayerCache()])
def test_an_unknown_kind_is_refused_by_name(cache):
    supported = ", ".join(kind.__name__ for kind in slots.POOLS)
    with pytest.raises(ValueError, match=rf"^{type(cache).__name__}: no pool .* supported are {supported}$"):
        slots.pooled(cache, None)
