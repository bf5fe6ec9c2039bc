"""Replace a list of mlx-lm's empty caches by a PromptCache."""

from typing import Any

from mlx_lm.models.cache import RotatingKVCache, _BaseCache

from .layer_cache import CachedModel
from .mlx_lm_caches import MlxLmCaches
from .prompt_cache import PromptCache, make_prompt_cache


def from_mlx_lm(model: CachedModel, given: Any) -> Any:
    """Return a new PromptCache for a list of mlx-lm's empty caches; the list then contains it instead of them.

    Anything else is returned unchanged. Raises ValueError for caches with tokens, which no MTP head has read.
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
        raise ValueError("prompt_cache: made for another model (its layers do not match)")
    pairs = zip(given, windows, strict=False)
    sizes = [c.max_size for c, window in pairs if window is None and isinstance(c, RotatingKVCache)]
    cache = make_prompt_cache(model, max_kv_size=min(sizes, default=None))
    if plain:
        cache.layers[0].caches = list(given)
    given[:] = [cache]
    return cache
