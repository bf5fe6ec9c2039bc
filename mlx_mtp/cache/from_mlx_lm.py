"""Replace mlx-lm's caches by this package's: a layer's by its kind, and a list of empty ones by a PromptCache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, _BaseCache

from .arrays import StateCache
from .layer_cache import CachedModel, LayerCache
from .make_cache import make_prompt_cache
from .mlx_lm_caches import MlxLmCaches
from .prompt_cache import PromptCache
from .ring import Ring


def from_mlx_lm(model: CachedModel, given: Any) -> Any:
    """Return a PromptCache for `given`, the prompt_cache argument of mlx-lm's functions, or `given` itself.

    A list of mlx-lm's empty caches: a new one, which replaces the list's members; rotating caches of layers without
    a window set max_kv_size. A list that starts with a PromptCache: that one. Anything else: itself. ValueError for
    caches that hold tokens, which no MTP head has read, or, if the model has a port, for another number of them.
    """
    if isinstance(given, list) and given and isinstance(given[0], PromptCache):
        return given[0]
    if not (isinstance(given, list) and given and all(isinstance(c, _BaseCache) for c in given)):
        return given
    if not all(c.empty() for c in given):
        raise ValueError("prompt_cache: mlx_lm's caches hold tokens, which mlx_mtp must read itself; give empty ones")
    windows, each = model.windows(), flat([list(c.caches) if isinstance(c, CacheList) else c for c in given])
    plain = windows == [MlxLmCaches]
    if not plain and len(each) != len(windows):
        raise ValueError(
            "prompt_cache: made for another model (its number of layers differs); use make_prompt_cache(model)"
        )
    pairs = zip(each, windows, strict=False)
    sizes = [c.max_size for c, window in pairs if window is None and isinstance(c, RotatingKVCache)]
    cache = make_prompt_cache(model, max_kv_size=min(sizes, default=None))
    if plain:
        cache.layers[0].caches = list(given)
    given[:] = [cache]
    return cache


def kind_of(cache: Any) -> Any:
    """Return the kind, as `make_cache` takes it, of the cache that stores what a layer's cache of mlx-lm does.

    For a CacheList it is a list of kinds. ValueError for a class without a counterpart, a subclass included, because
    it may store something else.
    """
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache:
        return Ring(cache.max_size, cache.keep) if cache.keep else cache.max_size
    if type(cache) is ArraysCache:
        return partial(StateCache, len(cache.cache))
    if type(cache) is CacheList:
        return [kind_of(each) for each in cache.caches]
    raise ValueError(f"its layers need a {type(cache).__name__}, whose rows cannot be taken back")


def flat(kinds: Sequence[Any]) -> list[Any]:
    """Return a list of all members of a list and, where a member is a list, of that list's members."""
    return [kind for each in kinds for kind in (each if isinstance(each, list) else (each,))]


@contextmanager
def passing(layers: Sequence[Any], kinds: Sequence[Any], shape: Sequence[int]) -> Iterator[list[Any]]:
    """Context that yields the caches for one forward of a model of mlx-lm's over tokens of a shape, (n, L).

    layers: this package's, one per kind in `flat(kinds)`, or mlx-lm's own. kinds: of mlx-lm's caches, by `kind_of`;
    the yielded caches are in lists where these are.
    """
    ours, rest = [c for c in layers if isinstance(c, LayerCache)], iter(layers)
    for c in ours:
        c.fetched = ()
    nested = [[next(rest) for _ in kind] if isinstance(kind, list) else next(rest) for kind in kinds if ours]
    yield nested or list(layers)
    for c in ours:
        c.passed(*shape)
