"""Compute each phase's minimum bytes, which bound its time at batch 1, and its predicted times."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from .chips import Chip
from .cost import ALL, KERNELS, LANES, PassShape, of_drafts, of_model, seconds
from .ops import OVERLAPS, AttentionOp, ExpertsOp, LatentOp, LinearOp, ModelOps, Op, StateOp

ROWS = range(2, 9)
PLAIN, DRAFT, VERIFY, CYCLE = PHASES = "plain step", "draft", "verify", "cycle"
STOCK, OURS = "stock MLX", "ours"
SHOWN_OVERLAP = "published"  # the overlap that tables show if they show only one


# (bits of a code, weights per 32 bits of scales, whether only our kernels read it)
FORMATS = {
    "affine 4-bit g64": (4, 64, False),
    "iq4_xs": (4, 102.4, True),
    "iq4_nl": (4, 64, True),
    "affine 6-bit g64": (6, 64, False),
    "q6_k": (6, 512 / 9, True),
}


class Bytes(NamedTuple):
    """Bytes of weights that every pass reads, of distinct experts, LM heads, KV caches, and recurrent states."""

    shared: float = 0
    experts: float = 0
    head: float = 0
    cache: float = 0
    state: float = 0

    @property
    def total(self) -> float:
        return sum(self)


def floor_of(op: Op, rows: int, context: int, overlap: str, count: int = 1) -> Bytes:
    """Return the minimum bytes that `count` such operations read over `rows` rows; a state is also written.

    context: number of cached positions. overlap: of the rows' experts, one of OVERLAPS.
    """
    match op:
        case LinearOp(name="lm_head"):
            return Bytes(head=count * op.nbytes)
        case LinearOp():
            return Bytes(shared=count * op.nbytes)
        case ExpertsOp():
            return Bytes(experts=count * op.visited(rows, overlap))
        case AttentionOp() | LatentOp():
            return Bytes(cache=count * op.cached(context))
        case StateOp():
            return Bytes(state=count * (2 * op.nbytes))


def pass_floor(model: ModelOps, rows: int, context: int, overlap: str) -> Bytes:
    """Return the floor of a pass of the target: a plain step for one row, else a verify."""
    return _sum(floor_of(op, rows, context, overlap, count) for count, op in model.ops())


def draft_floor(model: ModelOps, k: int, context: int, overlap: str) -> Bytes:
    """Return the floor of k drafts after a verify of k + 1 rows; each draft reads its weights again."""
    passes = [(op, rows) for head, rows in model.draft_passes(k) for op in (head.lm_head, *head.block.ops)]
    return _sum(floor_of(op, rows, context, overlap) for op, rows in passes)


def cycle_floor(model: ModelOps, k: int, context: int, overlap: str) -> Bytes:
    """Return the floor of k drafts and a verify of k + 1 rows."""
    return _sum((draft_floor(model, k, context, overlap), pass_floor(model, k + 1, context, overlap)))


def _sum(parts: Iterable[Bytes]) -> Bytes:
    return Bytes(*map(sum, zip(*parts, strict=True)))


def phases_with(model: ModelOps, rows: Iterable[int]) -> list[tuple[str, int]]:
    """Return the (phase, rows M of the verify) to report: a plain step and, for each M in `rows`, a verify.

    Drafts and cycles are added for each M - 1 drafts that the heads can make.
    """
    verifies = [(phase, m) for m in rows for phase in (VERIFY, DRAFT, CYCLE)]
    return [(PLAIN, 1), *((phase, m) for phase, m in verifies if phase == VERIFY or m - 1 <= model.max_drafts)]


def floors(model: ModelOps, context: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """Return the floor of every phase: phase, rows M of the verify, drafts k, overlap, and bytes by kind.

    A phase without routed experts has the same bytes at every overlap.
    """
    found = []
    for overlap, (phase, m) in product(OVERLAPS, phases_with(model, rows)):
        drafting = {DRAFT: draft_floor, CYCLE: cycle_floor}.get(phase)
        nbytes = drafting(model, m - 1, context, overlap) if drafting else pass_floor(model, m, context, overlap)
        parts = nbytes._asdict() | {"total": nbytes.total}
        found.append({"phase": phase, "rows": m, "drafts": m - 1, "overlap": overlap, "bytes": parts})
    return found


def predicted(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """Predict every phase: phase, rows M of the verify, drafts k, side, overlap, seconds, launches.

    Stock MLX reads an expert for each token that visits it, so its times are equal at every overlap.
    """
    sides, found = {STOCK: frozenset[str](), OURS: ALL}, []
    for overlap, side, (phase, m) in product(OVERLAPS, sides, phases_with(model, rows)):
        at = PassShape(m, sides[side], context, overlap)
        costs = [of_model(model, at, chip)] if phase != DRAFT else []
        costs += [of_drafts(model, m - 1, at, chip)] if phase in (DRAFT, CYCLE) else []
        times = {"seconds": sum(seconds(c, chip) for c in costs), "launches": sum(c.launches for c in costs)}
        found.append({"phase": phase, "rows": m, "drafts": m - 1, "side": side, "overlap": overlap, **times})
    return found


def formats(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = (1, 2, 4, 8)) -> list[dict[str, Any]]:
    """Predict passes with our kernels if all weights had one format: a line per format of FORMATS and number of rows.

    A line has format, rows, bytes of all weights, and seconds of a pass.
    """
    found = []
    for (name, (bits, group, packed)), m in product(FORMATS.items(), rows):
        stored = model.with_fields(bits=bits, group=group, packed=packed)
        times = seconds(of_model(stored, PassShape(m, ALL, context, SHOWN_OVERLAP), chip), chip)
        found.append({"format": name, "rows": m, "bytes": stored.total_bytes, "seconds": times})
    return found


def lanes(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = (1, 2, 4, 8, 16)) -> list[dict[str, Any]]:
    """Predict passes with our kernels in both lanes of products: a line has lane, rows, and seconds of a pass."""
    found = []
    for lane, m in product(LANES, rows):
        at = PassShape(m, ALL, context, SHOWN_OVERLAP, lane=lane)
        found.append({"lane": lane, "rows": m, "seconds": seconds(of_model(model, at, chip), chip)})
    return found


def shown_times(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], float]:
    """Return seconds, of predicted or measured lines, by (side, phase, rows M); of equal keys the first line counts.

    Of lines with an overlap, those with SHOWN_OVERLAP.
    """
    shown = [line for line in lines if line.get("overlap", SHOWN_OVERLAP) == SHOWN_OVERLAP]
    return {(line["side"], line["phase"], line["rows"]): line["seconds"] for line in reversed(shown)}


def kernels(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = (1, 2, 4, 8)) -> list[dict[str, Any]]:
    """Predict the savings of each kind of kernels, and of all, in a pass of stock MLX with published routing.

    A line has kernels, ops, rows, stock's seconds, and the seconds saved.
    """
    found = []
    for m in rows:
        at = PassShape(m, context=context, overlap=SHOWN_OVERLAP)
        stock = seconds(of_model(model, at, chip), chip)
        for kind, ops in (KERNELS | {"all": ()}).items():
            on = frozenset((kind,)) if ops else ALL
            ours = seconds(of_model(model, replace(at, on=on), chip), chip)
            found.append({"kernels": kind, "ops": list(ops), "rows": m, "stock": stock, "seconds": stock - ours})
    return found
