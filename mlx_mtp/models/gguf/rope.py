"""Find config.json's rope_scaling in a GGUF file's metadata, or from the factors that are stored for Llama 3."""

import math
from typing import Any

import numpy as np

from .meta import Meta

KINDS = ("linear", "yarn")
CLOSE = 1e-5


def scaling(meta: Meta, **more: Any) -> dict[str, Any] | None:
    """Return config.json's `rope_scaling` from the metadata; None for no type, "none", or a factor of 0 or 1.

    ValueError for an unknown type. more: entries that the family adds to YaRN's; ignored for other types.
    """
    kind = meta.text("rope.scaling.type", None)
    factor = meta.number("rope.scaling.factor", 0.0)
    if kind not in (None, "none", *KINDS):
        raise ValueError(f"{meta.file}: rope.scaling.type is {kind}; supported are {', '.join(KINDS)}")
    if kind in (None, "none") or factor in (0.0, 1.0):
        return None
    found: dict[str, Any] = {"rope_type": kind, "type": kind, "factor": factor}
    if kind == "yarn":
        found["original_max_position_embeddings"] = meta.size("rope.scaling.original_context_length")
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "attn_factor"}
        for name, key in names.items():
            if (value := meta.number(f"rope.scaling.{key}", None)) is not None:
                found[name] = value
        found |= more
    return found


def from_factors(meta: Meta, factors: np.ndarray, base: float) -> dict[str, Any]:
    """Return the `rope_scaling` of Llama 3's kind that gives these factors, one for each rotated pair of features.

    That scaling keeps frequencies of short wavelengths, and divides those of long wavelengths by its `factor`. In
    between the kept share is a straight line in the inverse wavelength, which at least two factors there must fix.
    base: rope_theta. ValueError if there are fewer than two in between, or no scaling gives the factors.
    """
    factor, pairs = float(factors.max()), len(factors)
    turns = max(base, 1e-9) ** (-np.arange(pairs) / pairs) / (2 * math.pi)  # per position
    between = (factors > 1 + CLOSE) & (factors < factor * (1 - CLOSE))
    refused = ValueError(f"{meta.file}: rope_freqs.weight is no scaling of Llama 3's; give --config-from REPO")
    if base <= 0 or between.sum() < 2 or factor <= 1 or not np.isfinite(factors).all():
        raise refused
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, shift = np.polyfit(turns[between], smooth, 1)
    low, high = 1.0, 1.0 - 1.0 / shift
    length = round(slope * (high - low))
    high = round(high, 3)
    found = {"factor": float(f"{factor:.6g}"), "low_freq_factor": low, "high_freq_factor": high}
    share = np.clip((length * turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - share) / factor + share), factors, rtol=1e-4):
        raise refused
    return {"rope_type": "llama3", **found, "original_max_position_embeddings": length}
