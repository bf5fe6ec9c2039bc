"""Give each phase of a cycle the bytes that it has to read, which bound its time at batch 1, and predicted times."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from .chips import Chip
from .cost import ALL, KERNELS, PassShape, of_drafts, of_model, seconds
from .ops import OVERLAPS, AttentionOp, ExpertsOp, LatentOp, LinearOp, ModelOps, Op, StateOp

ROWS = range(2, 9)
PLAIN, DRAFT, VERIFY, CYCLE = PHASES = "plain step", "draft", "verify", "cycle"
STOCK, OURS = "stock MLX", "ours"
SHOWN_OVERLAP = "published"  # the one that tables show where they show one


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
    """Count what `count` such operations over so many rows read at least; a state is written as well."""
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
    """Count those of a pass of the target: a plain step for one row, else a verify."""
    return _sum(floor_of(op, rows, context, overlap, count) for count, op in model.ops())


def draft_floor(model: ModelOps, k: int, context: int, overlap: str) -> Bytes:
    """Count those of k drafts behind a verify of k + 1 rows, each read anew: kernels run one after another."""
    passes = [(op, rows) for head, rows in model.draft_passes(k) for op in (head.lm_head, *head.block.ops)]
    return _sum(floor_of(op, rows, context, overlap) for op, rows in passes)


def cycle_floor(model: ModelOps, k: int, context: int, overlap: str) -> Bytes:
    """Count those of k drafts and the verify of k + 1 rows."""
    return _sum((draft_floor(model, k, context, overlap), pass_floor(model, k + 1, context, overlap)))


def _sum(parts: Iterable[Bytes]) -> Bytes:
    return Bytes(*map(sum, zip(*parts, strict=True)))


def phases_with(model: ModelOps, rows: Iterable[int]) -> list[tuple[str, int]]:
    """List (phase, rows M of the verify): a plain step, each verify, and what drafts for it as far as heads can."""
    verifies = [(phase, m) for m in rows for phase in (VERIFY, DRAFT, CYCLE)]
    return [(PLAIN, 1), *((phase, m) for phase, m in verifies if phase == VERIFY or m - 1 <= model.max_drafts)]


def floors(model: ModelOps, context: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """Give the floor of every phase: phase, rows M of the verify, drafts k, overlap, bytes by what they are of.

    A phase that has no routed experts has the same bytes at every overlap.
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

    Stock MLX reads an expert for each token that visits it, so that its times are the same at every overlap.
    """
    sides, found = {STOCK: frozenset[str](), OURS: ALL}, []
    for overlap, side, (phase, m) in product(OVERLAPS, sides, phases_with(model, rows)):
        at = PassShape(m, sides[side], context, overlap)
        costs = [of_model(model, at, chip)] if phase != DRAFT else []
        costs += [of_drafts(model, m - 1, at, chip)] if phase in (DRAFT, CYCLE) else []
        times = {"seconds": sum(seconds(c, chip) for c in costs), "launches": sum(c.launches for c in costs)}
        found.append({"phase": phase, "rows": m, "drafts": m - 1, "side": side, "overlap": overlap, **times})
    return found


def shown_times(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], float]:
    """Index seconds, predicted or measured, by side, phase and rows M, of one overlap; the first counts."""
    shown = [line for line in lines if line.get("overlap", SHOWN_OVERLAP) == SHOWN_OVERLAP]
    return {(line["side"], line["phase"], line["rows"]): line["seconds"] for line in reversed(shown)}


def kernels(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = (1, 2, 4, 8)) -> list[dict[str, Any]]:
    """Predict what kernels of each kind, and all together, take off a pass of stock MLX, experts routed as published.

    A line: kernels, ops, rows, stock's seconds, and those that come off.
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
