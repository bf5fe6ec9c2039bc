"""The bytes that each phase of a cycle has to read, whatever the kernels: at batch 1 they bound its time."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any

from .ops import OVERLAPS, Attention, Experts, Latent, Linear, Model, Op, State

ROWS = range(2, 9)
PLAIN, DRAFT, VERIFY, CYCLE = PHASES = "plain step", "draft", "verify", "cycle"


@dataclass(frozen=True)
class Bytes:
    """Of weights that every pass reads, of distinct experts, of LM heads, of KV caches, and of recurrent states."""

    shared: float = 0
    experts: float = 0
    head: float = 0
    cache: float = 0
    state: float = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        return sum(astuple(self))


def floor_of(op: Op, rows: int, context: int, overlap: str) -> Bytes:
    """What an operation over so many rows reads at least; a state is written as well."""
    match op:
        case Linear(name="lm_head"):
            return Bytes(head=op.nbytes)
        case Linear():
            return Bytes(shared=op.nbytes)
        case Experts():
            return Bytes(experts=op.visited(rows, overlap))
        case Attention() | Latent():
            return Bytes(cache=op.cached(context))
        case State():
            return Bytes(state=2 * op.nbytes)


def _sum(ops: Iterable[tuple[int, Op]], rows: int, context: int, overlap: str) -> Bytes:
    total = Bytes()
    for count, op in ops:
        one = floor_of(op, rows, context, overlap)
        total += Bytes(*(count * x for x in astuple(one)))
    return total


def pass_floor(model: Model, rows: int, context: int, overlap: str) -> Bytes:
    """Of a pass of the target: a plain step for one row, else a verify."""
    ops = [(layer.count, op) for layer in model.layers for op in layer.ops]
    return _sum([(1, model.head), *ops], rows, context, overlap)


def draft_floor(model: Model, k: int, context: int, overlap: str) -> Bytes:
    """Of k drafts behind a verify of k + 1 rows, each read anew, for its kernels run one after another."""
    total = Bytes()
    for head, rows in model.draft_passes(k):
        total += _sum([(1, head.lm_head), *((1, op) for op in head.block.ops)], rows, context, overlap)
    return total


def cycle_floor(model: Model, k: int, context: int, overlap: str) -> Bytes:
    """Of k drafts and the verify of k + 1 rows."""
    return draft_floor(model, k, context, overlap) + pass_floor(model, k + 1, context, overlap)


def floors(model: Model, context: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """The floor of every phase: phase, rows M of the verify, drafts k, overlap, bytes by what they are of.

    A phase that has no routed experts has the same bytes at every overlap.
    """
    found = []
    for overlap in OVERLAPS:
        phases = [(PLAIN, 1, pass_floor(model, 1, context, overlap))]
        for m in rows:
            phases.append((VERIFY, m, pass_floor(model, m, context, overlap)))
            if m - 1 <= model.max_drafts:
                phases.append((DRAFT, m, draft_floor(model, m - 1, context, overlap)))
                phases.append((CYCLE, m, cycle_floor(model, m - 1, context, overlap)))
        for phase, m, nbytes in phases:
            parts = asdict(nbytes) | {"total": nbytes.total}
            found.append({"phase": phase, "rows": m, "drafts": m - 1, "overlap": overlap, "bytes": parts})
    return found
