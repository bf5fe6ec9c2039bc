"""Check in what form a model's keys and values can be kept."""

from typing import Any

from .layer_cache import CachedModel
from .mlx_lm_caches import MlxLmCaches

GROUP_SIZES = (32, 64, 128)  # that MLX quantizes by


def check_layout(
    model: CachedModel, kv_bits: int | None, mtp_kv_bits: int | None, kv_group_size: int, max_kv_size: int | None
) -> None:
    """Raise ValueError for arguments of `make_prompt_cache` that the model's caches cannot have."""
    if kv_group_size not in GROUP_SIZES:
        raise ValueError(f"kv_group_size={kv_group_size}: allowed are 32, 64 and 128")
    for name, bits in (("kv_bits", kv_bits), ("mtp_kv_bits", mtp_kv_bits)):
        if bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"{name}={bits}: allowed are 2, 3, 4, 5, 6, 8 and None")
        part = _drafting(model) if name == "mtp_kv_bits" else model
        if bits is not None and (why := getattr(part, "NO_KV_BITS", model.NO_KV_BITS)):
            raise ValueError(f"{name}={bits}: not with {why}; allowed is None")
        head_dim = 0 if bits is None else getattr(part, "head_dim", None) or model.args.head_dim
        if head_dim % kv_group_size:
            raise ValueError(f"kv_group_size={kv_group_size}: allowed are divisors of the head size {head_dim}")
    if max_kv_size is not None and max_kv_size < 1:
        raise ValueError(f"max_kv_size={max_kv_size}: allowed is 1 or more")
    if max_kv_size is not None and MlxLmCaches in model.windows():
        raise ValueError(f"max_kv_size={max_kv_size}: not with {model.NO_KV_BITS}; allowed is None")


def _drafting(model: Any) -> Any:
    """Return the module whose keys and values a drafter's caches hold; the model itself if it has none."""
    net = getattr(getattr(model, "drafter", None), "net", None)
    return net if net is not None else model.mtp[0] if model.mtp else model


def group_size_for(model: CachedModel) -> int:
    """Find the largest usual group size that quantized keys and values of `model` can have, else 64."""
    head_dim = getattr(getattr(model, "args", None), "head_dim", None) or 64  # latent attention quantizes nothing
    return next((size for size in (64, 32) if head_dim % size == 0), 64)
