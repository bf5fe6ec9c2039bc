"""Create the caches of layers, of every kind, and check their format against the model."""

from collections.abc import Sequence
from typing import Any

from ..machine.ranges import Allowed, IntegerChoice, Range
from .arrays import StateCache
from .convolution import ConvolutionCache
from .drafting import drafting_parts
from .growing import LinearKVCache, QuantizedLinearKVCache
from .layer_cache import CachedModel, CacheKind, LayerCache, OncePerPass
from .mlx_lm_caches import MlxLmCaches
from .recurrent import RecurrentCache
from .ring import QuantizedSlidingKVCache, Ring, SlidingKVCache

# Kinds without keys and values, by the name that their `config` has in files.
BY_NAME: dict[str, type[Any]] = {
    kind.name: kind for kind in (RecurrentCache, ConvolutionCache, StateCache, MlxLmCaches)
}
GROUP_SIZES = (32, 64, 128)  # supported by MLX's quantization
MOST_POSITIONS = 2**30  # of a cache: MLX's shapes and positions are int32, and buffers are rounded up
BITS = (2, 3, 4, 5, 6, 8)
LAYOUT: dict[str, Allowed] = {
    "num_draft_tokens": Range("0 to the drafter's maximum, or None", 0, float("inf"), optional=True),
    **dict.fromkeys(("kv_bits", "mtp_kv_bits"), IntegerChoice(f"{', '.join(map(str, BITS))} or None", BITS)),
    "kv_group_size": IntegerChoice("32, 64, 128 or None", GROUP_SIZES),
    "quantized_kv_start": Range(f"0 to {MOST_POSITIONS}, as an integer", 0, MOST_POSITIONS),
    "max_kv_size": Range(f"1 to {MOST_POSITIONS}, as an integer, or None", 1, MOST_POSITIONS, optional=True),
}


def make_cache(
    window: CacheKind | Ring, *, start: int = 0, keep: int = 0, bits: int | None = None, group_size: int = 64
) -> Any:
    """Return the empty cache of one layer; with `bits`, keys and values are quantized in groups of `group_size`.

    window: the number of positions kept, or a Ring that layers share; None for all; or a function or class that
    returns another cache, without the other arguments. start: the first position with contents. keep: the number
    of the window's positions that are the sequence's first ones; a given Ring has its own.
    """
    if callable(window):
        return window()
    if window is None:
        return LinearKVCache(start) if bits is None else QuantizedLinearKVCache(group_size, bits, start)
    ring = window if isinstance(window, Ring) else Ring(window, keep)
    if bits is None:
        return SlidingKVCache(ring, start)
    return QuantizedSlidingKVCache(group_size, bits, ring, start)


def make_caches(windows: Sequence[CacheKind | Ring], *, starts: list[int], **quantization: Any) -> list[Any]:
    """Return an empty cache per layer of a sequence; layers with the same window share one Ring.

    windows: argument `window` of `make_cache` for each layer. starts: each layer's first position with contents,
    above 0 for later MTP heads of a chain. quantization: `bits` and `group_size` of `make_cache`.
    """
    pairs = zip(windows, starts, strict=True)
    return from_configs([{"window": window, "start": start, **quantization} for window, start in pairs])


def from_configs(configs: list[dict[str, Any]]) -> list[LayerCache]:
    """Return the caches of one sequence, without arrays, from one `config` per layer.

    Caches with the same window and `keep` share one Ring; all share one `once`.
    """
    rings: dict[tuple[int, int], Ring] = {}
    caches: list[Any] = []
    for config in configs:
        window, keep = config["window"], config.get("keep", 0)
        if isinstance(window, str):
            own = {name: value for name, value in config.items() if name not in ("window", "start")}
            caches.append(BY_NAME[window](**own))
            continue
        if isinstance(window, int):
            window = rings.setdefault((window, keep), Ring(window, keep))
        caches.append(make_cache(**{**config, "window": window}))
    once = OncePerPass()  # the layers of a sequence have the same position
    for cache in caches:
        cache.once = once
    return caches


def check_layout(
    model: CachedModel, kv_bits: int | None, mtp_kv_bits: int | None, kv_group_size: int, max_kv_size: int | None
) -> None:
    """Raise ValueError for the first argument, a value of LAYOUT, that the model's caches do not support."""
    for name, bits in (("kv_bits", kv_bits), ("mtp_kv_bits", mtp_kv_bits)):
        for part in () if bits is None else drafting_parts(model) if name == "mtp_kv_bits" else [model]:
            if why := getattr(part, "NO_KV_BITS", model.NO_KV_BITS):
                raise ValueError(f"{name}={bits}: not with {why}; allowed is None")
            head_dim = head_dim_of(part) or head_dim_of(model) or 0
            if head_dim % kv_group_size:
                fitting = [str(size) for size in GROUP_SIZES if head_dim % size == 0]
                fits = ", ".join(fitting) or f"none; leave out {name}"
                raise ValueError(f"kv_group_size={kv_group_size}: allowed for the head size {head_dim} are {fits}")
    if max_kv_size is not None and MlxLmCaches in model.windows():
        raise ValueError(f"max_kv_size={max_kv_size}: not with {model.NO_KV_BITS}; allowed is None")


def head_dim_of(model: Any) -> int | None:
    """Return the head size of a model's, or of a drafter's, keys and values; None if it states none."""
    return getattr(model, "head_dim", None) or getattr(getattr(model, "args", None), "head_dim", None)


def group_size_for(model: CachedModel) -> int:
    """Return the default kv_group_size: 64, or 32 if the model's head size is a multiple of 32 but not of 64.

    Also 64 for a head size that neither divides; `check_layout` then refuses to quantize.
    """
    head_dim = head_dim_of(model) or 64  # latent attention is not quantized
    return next((size for size in (64, 32) if head_dim % size == 0), 64)


def layout_of(cache: Any) -> dict[str, int | None]:
    """Return a prompt cache's kv_bits, mtp_kv_bits, kv_group_size and max_kv_size, each None if it has none.

    If a quantization is still due, kv_bits and kv_group_size are those that it will use.
    """
    due = cache.quantizing
    target, draft = ([c.config for c in caches if "bits" in c.config] for caches in (cache.layers, cache.heads))
    pairs = zip(cache.model.windows(), cache.layers, strict=True)
    rings = [c.window for window, c in pairs if window is None and c.window]
    return {
        "kv_bits": due.bits if due else target[0]["bits"] if target else None,
        "mtp_kv_bits": draft[0]["bits"] if draft else None,
        "kv_group_size": due.group_size if due else next((c["group_size"] for c in (*target, *draft)), None),
        "max_kv_size": next(iter(rings), None),
    }
