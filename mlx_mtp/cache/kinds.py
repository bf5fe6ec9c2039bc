"""Make the caches of layers, of any kind: a new kind is added to this one list."""

from collections.abc import Sequence
from typing import Any

from .growing import LinearKVCache, QuantizedLinearKVCache
from .layer_cache import CacheKind, LayerCache, OncePerPass
from .mlx_lm_caches import MlxLmCaches
from .recurrent import RecurrentCache
from .ring import QuantizedSlidingKVCache, Ring, SlidingKVCache

# Kinds that are no attention's, by the name that their `config` has in files.
BY_NAME: dict[str, type[Any]] = {kind.name: kind for kind in (RecurrentCache, MlxLmCaches)}


def make_cache(
    window: CacheKind | Ring, *, start: int = 0, keep: int = 0, bits: int | None = None, group_size: int = 64
) -> Any:
    """Make the empty cache of one layer, quantized with `bits` where it holds keys and values.

    window: a number of last positions, or a Ring that layers share; None for all positions; or a cache's class.
    keep: first positions that a new ring holds for ever.
    """
    if isinstance(window, type):
        return window()
    if window is None:
        return LinearKVCache(start) if bits is None else QuantizedLinearKVCache(group_size, bits, start)
    ring = window if isinstance(window, Ring) else Ring(window, keep)
    if bits is None:
        return SlidingKVCache(ring, start)
    return QuantizedSlidingKVCache(group_size, bits, ring, start)


def make_caches(windows: Sequence[CacheKind | Ring], *, starts: list[int], **quantization: Any) -> list[Any]:
    """Make one cache per layer; layers of the same window share one Ring."""
    pairs = zip(windows, starts, strict=True)
    return from_configs([{"window": window, "start": start, **quantization} for window, start in pairs])


def from_configs(configs: list[dict[str, Any]]) -> list[LayerCache]:
    """Make caches of these `config`s, without their arrays; those of the same window share one Ring."""
    rings: dict[tuple[int, int], Ring] = {}
    caches = []
    for config in configs:
        window, keep = config["window"], config.get("keep", 0)
        if isinstance(window, str):
            own = {name: value for name, value in config.items() if name not in ("window", "start")}
            caches.append(BY_NAME[window](**own))
            continue
        if isinstance(window, int):
            window = rings.setdefault((window, keep), Ring(window, keep))
        caches.append(make_cache(**{**config, "window": window}))
    return sharing(caches)


def sharing(caches: list[Any]) -> list[Any]:
    """Let the caches of one text's layers, which stand at one position, compute what follows from it once."""
    once = OncePerPass()
    for cache in caches:
        cache.once = once
    return caches
