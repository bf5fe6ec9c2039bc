"""Take mlx-lm's lists of caches for a PromptCache, where they hold nothing yet."""

from typing import Any

from mlx_lm.models.cache import RotatingKVCache, _BaseCache

from .layer_cache import CachedModel
from .mlx_lm_caches import MlxLmCaches
from .prompt_cache import PromptCache, make_prompt_cache


def from_mlx_lm(model: CachedModel, given: Any) -> Any:
    """Return the PromptCache that a list of mlx-lm's empty caches is replaced by, or that it has been replaced by.

    The list itself comes to hold it, so that it goes on from there when it is given again. What is no such list is
    returned as it is. Raises ValueError for caches that hold something: no MTP head has read it.
    """
    if not isinstance(given, list) or not given:
        return given
    if isinstance(given[0], PromptCache):
        return given[0]
    if not all(isinstance(c, _BaseCache) for c in given):
        return given
    if not all(c.empty() for c in given):
        raise ValueError("prompt_cache: mlx_lm's caches hold tokens, which mlx_mtp must read itself; give empty ones")
    windows = model.windows()
    if windows == [MlxLmCaches]:
        cache = make_prompt_cache(model)
        cache.layers[0].caches = list(given)
    else:
        pairs = zip(given, windows, strict=False)
        sizes = [c.max_size for c, window in pairs if window is None and isinstance(c, RotatingKVCache)]
        if len(given) != len(windows) or len({*sizes}) > 1:
            raise ValueError("prompt_cache: made for another model (its layers do not match)")
        cache = make_prompt_cache(model, max_kv_size=sizes[0] if sizes else None)
    given[:] = [cache]
    return cache
