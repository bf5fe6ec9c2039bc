"""Count the bytes that each phase of a cycle has to read, whatever the kernels: at batch 1 they bound its time."""

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from .ops import OVERLAPS, AttentionOp, ExpertsOp, LatentOp, LinearOp, ModelOps, Op, StateOp

ROWS = range(2, 9)
PLAIN, DRAFT, VERIFY, CYCLE = PHASES = "plain step", "draft", "verify", "cycle"


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
