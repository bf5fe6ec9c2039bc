"""Replace a list of mlx-lm's empty caches by a PromptCache."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache, _BaseCache

from .arrays import StateCache
from .layer_cache import CachedModel, CacheKind
from .mlx_lm_caches import MlxLmCaches
from .prompt_cache import PromptCache, make_prompt_cache


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
    windows = model.windows()
    plain = windows == [MlxLmCaches]
    if not plain and len(given) != len(windows):
        raise ValueError(
            "prompt_cache: made for another model (its number of layers differs); use make_prompt_cache(model)"
        )
    pairs = zip(given, windows, strict=False)
    sizes = [c.max_size for c, window in pairs if window is None and isinstance(c, RotatingKVCache)]
    cache = make_prompt_cache(model, max_kv_size=min(sizes, default=None))
    if plain:
        cache.layers[0].caches = list(given)
    given[:] = [cache]
    return cache


def kind_of(cache: Any) -> CacheKind | str:
    """Return the kind of our cache in place of one of mlx-lm's, or why there is none."""
    kind = type(cache)
    if kind in (KVCache, ConcatenateKVCache):
        return None
    if kind is RotatingKVCache and not cache.keep:
        return cache.max_size
    if kind is ArraysCache:
        return partial(StateCache, len(cache.cache))
    return f"{kind.__name__}: not supported"


def flat(caches: list[Any]) -> list[Any]:
    """Return mlx-lm's caches of a model with those in a CacheList in its place: each is a layer of ours."""
    return [one for cache in caches for one in (cache.caches if isinstance(cache, CacheList) else (cache,))]


@contextmanager
def passing(layers: list[Any], like: list[Any], shape: tuple[int, int]) -> Iterator[list[Any]]:
    """Context in which a model of mlx-lm's reads tokens of a shape, with the caches that are its value.

    layers: ours, in the order of `flat`. like: mlx-lm's caches of the model, which are nested alike.
    """
    rest = iter(layers)
    for c in layers:
        c.fetched = ()
    yield [[next(rest) for _ in c.caches] if isinstance(c, CacheList) else next(rest) for c in like]
    for c in layers:
        c.passed(*shape)
