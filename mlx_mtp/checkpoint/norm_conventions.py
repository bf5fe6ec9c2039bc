"""Decide whether a checkpoint's norms are stored zero-centred (weight minus one, as on the hub) or shifted by +1.

The trunk and the heads are decided as wholes: a single fusion norm may be near zero in either convention, but the
mean of all layers' norms is not (omlx PRs 1507 and 3750, MTPLX issue 306).
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .files import Header, read_tensors
from .weight_names import TRUNK_FILES

LAYER_NORMS = re.compile(r"(layernorm|_norm)\.weight$")
SHIFTED = 0.75  # zero-centred norms have a lower mean
Origin = Callable[[str], tuple[str, str]]  # from a parameter to its tensor's file and name
USUAL = 0.5, 1.75  # mean of correctly loaded layer norms


def conventions(
    zero_centred: tuple[str, str] | None, trunk: Header, heads: Header, *, alone: bool = False
) -> tuple[bool, bool]:
    """Return whether the trunk's norms are stored zero-centred, and whether the heads' are.

    zero_centred: the family's patterns of names in the raw and the converted layout; None if its norms never are.
    Files of `mlx-mtp convert` never are. Another trunk is decided by its layout (names, and shapes of convolutions),
    else by the writer in the metadata ("pt" is raw), else by the mean of its layer norms. Heads in a raw trunk's
    shards are raw unless their layout contradicts; for others the mean of their layer norms decides or, if it fits
    both, the layout, else the trunk and the writer. Without heads, both values are the trunk's. alone: the trunk may
    be incomplete.
    """
    if zero_centred is None:
        return False, False
    raw = False if trunk and all(t.converted for t in trunk.values()) else _by_layout(zero_centred, trunk)
    if raw is None:
        raw = any(t.format == "pt" for t in (trunk or heads).values()) or mean(trunk) < USUAL[0]
    if not heads:
        return raw, raw
    if all(t.converted for t in heads.values()):
        return raw, False
    by_name = _by_layout(zero_centred, heads)
    shards = {t.file for t in trunk.values()}
    if raw and all(t.file in shards or (alone and t.file.match(TRUNK_FILES)) for t in heads.values()):
        return True, by_name is not False
    heads_mean = mean(heads)
    if USUAL[0] <= heads_mean <= SHIFTED:
        return raw, by_name if by_name is not None else raw or any(t.format == "pt" for t in heads.values())
    return raw, heads_mean < USUAL[0]


def _by_layout(zero_centred: tuple[str, str], header: Header) -> bool | None:
    convolutions = [t.shape for name, t in header.items() if name.endswith("conv1d.weight")]
    if convolutions:  # conversion transposes them, which mlx-lm also tests
        return any(shape[-1] != 1 for shape in convolutions)
    for pattern, raw in zip(zero_centred, (True, False), strict=True):
        if any(re.search(pattern, name) for name in header):
            return raw
    return None


def mean(header: Header) -> float:
    """Return the mean over layer norms of each one's mean, as stored; 1 if there are none."""
    return _mean_of(read_tensors({n: t for n, t in header.items() if LAYER_NORMS.search(n)}))


def _mean_of(weights: dict[str, Any]) -> float:
    means: list[Any] = [w.astype(mx.float32).mean().item() for w in weights.values()]
    return sum(means) / len(means) if means else 1.0


def warn_of_unusual(parameters: dict[str, Any], raw: tuple[bool, bool], origin: Origin) -> None:
    """Warn about norms that look unshifted, shifted twice or damaged, by part: the trunk and each MTP depth.

    Also about a depth whose last norm has another convention than those of its layer.

    parameters: by path, after loading. raw: whether the trunk's and the heads' norms were shifted by +1. origin:
    returns a parameter's file and tensor name.
    """
    norms = {path: w for path, w in parameters.items() if LAYER_NORMS.search(path)}
    parts: dict[int | None, Any] = {None: {p: w for p, w in norms.items() if not p.startswith("mtp.")}}
    for depth in sorted({int(path.split(".")[1]) for path in parameters if path.startswith("mtp.")}):
        parts[depth] = {p: w for p, w in norms.items() if p.startswith(f"mtp.{depth}.block.")}
    done = "all were shifted by +1" if raw[1] else "none was shifted"
    for depth, weights in parts.items():
        mean = _mean_of(weights)
        if not USUAL[0] <= mean <= USUAL[1]:
            part = "the trunk" if depth is None else f"MTP depth {depth}"
            file, name = origin(next(iter(weights)))
            state = "stored zero-centred and not shifted" if mean < USUAL[0] else "shifted twice"
            state = state if math.isfinite(mean) else "damaged"
            norms_of = f"{len(weights)} norms of {part} ({name} ...)"
            found = f"{norms_of} have mean {mean:.2f} once loaded, expected near 1; they look {state}"
            warnings.warn(f"{file}: {found}", stacklevel=7)
        elif depth is not None:
            path = f"mtp.{depth}.norm.weight"
            last = _mean_of({path: parameters[path]})
            twice = raw == (False, True) and last - 1 > SHIFTED  # in a raw trunk's shards training may cause it
            if twice or (not raw[1] and last < 1 - SHIFTED):
                file, name = origin(path)
                means = f"has mean {last - raw[1]:.2f}, the norms of its layer {mean - raw[1]:.2f}"
                found = f"tensor {name} of MTP depth {depth} {means}: two conventions in one head; {done}"
                warnings.warn(f"{file}: {found}", stacklevel=7)
