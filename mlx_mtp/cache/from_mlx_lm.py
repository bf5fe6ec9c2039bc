"""Replace mlx-lm's caches by this package's: a layer's by its kind, and a list of empty ones by a PromptCache."""

from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache, _BaseCache

from .layer_cache import CachedModel, CacheKind
from .mlx_lm_caches import MlxLmCaches
from .prompt_cache import PromptCache, make_prompt_cache
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


def kind_of(cache: Any) -> CacheKind | Ring:
    """Return the kind, as `make_cache` takes it, of the cache that stores what a layer's cache of mlx-lm does.

    ValueError for a class without a counterpart, a subclass included, because it may store something else.
    """
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache:
        return Ring(cache.max_size, cache.keep) if cache.keep else cache.max_size
    raise ValueError(f"its layers need a {type(cache).__name__}, whose rows cannot be taken back")
