"""Hold one cycle of one or several sequences, from its plan until its tokens are read."""

from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..tuning.plan import Accepted, Node, Plan
from .accept import Passed
from .cycle_masks import CycleMasks
from .drafters.drafter import Drafter, Frame
from .run import NO_DRAFTS, Drafts, Run
from .sequence import Sequence

SequenceRows = list[Sequence | None]  # the sequence of each row of a pass; None for a free slot


@dataclass
class Flight:
    """A cycle from its plan until its tokens are read. Each function sets the fields of its own phase.

    plan:    control, plan. matched: length of the match for prompt lookup. late: built after the previous cycle was
             read. forced: if the plan is of a grammar's drafts, their number for each row; else [].
    arrange: rows: the sequence of each row. before: mark of the step cache before the step, for another plan; None
             if the cycle has other sequences, or other caches of the drafter, than the one before. prefilled: rows
             that a paused drafter read for it, or reads in its step.
    build:   drafter: that of the plan; None for a plain step. frame, given: the step's, and its input. drafts: with
             p_min only these are built, because their confidence is read first. masks: with a grammar. passed: with
             a grammar, the rows that the run chooses from, which are submitted first. most: as `limits` returns it,
             for a run that is built after the masks are written. run: the step's result. replayed: a recorded step
             was used. built: the host's seconds.
    submit:  base: position of the first row of a lone sequence. after: mark of the step cache after it, in a pool
             from `build` on. failed: MLX could not evaluate it.
    read:    was_read. context: position of the longest sequence's first row. kept: of each unfinished sequence.
             nodes: of a tree, for each of these that may accept drafts. seconds: None if not measured. why_late: why
             the next cycle is built late; None if not; "": the first.
    """

    rows: SequenceRows
    plan: Plan
    control: Any = None
    before: Any = None
    matched: int = 0
    prefilled: int = 0
    late: bool = False
    forced: list[int] = field(default_factory=list)
    drafter: Drafter | None = field(init=False)
    frame: Frame = field(init=False)
    given: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS
    masks: CycleMasks | None = None
    passed: Passed | None = None
    most: mx.array | None = None
    run: Run = field(init=False)
    replayed: bool = field(init=False)
    built: float = field(init=False)
    base: int = field(init=False)
    after: Any = None
    failed: bool = False
    was_read: bool = False
    context: int = field(init=False)
    kept: list[Accepted] = field(default_factory=list)
    nodes: list[PySequence[Node]] = field(default_factory=list)
    seconds: float | None = None
    why_late: str | None = None

    @property
    def active(self) -> list[Sequence]:
        """The sequences that are not finished."""
        return [sequence for sequence in self.rows if sequence and not sequence.finished]

    def accepts(self, row: int, verified: int) -> int:
        """Return the number of drafts that the sequence of a row may accept of those verified; -1 for a free slot.

        A sequence whose drafts are off accepts none; of a tree any path of its `Sequence.tree` rows may be accepted.
        """
        if (sequence := self.rows[row]) is None:
            return -1
        most = self.forced[row] if self.forced else self.drafter.limit(sequence) if self.drafter else 0
        return min(max(most, sequence.tree - 1) if self.plan.tree and most else most, verified)

    def counts(self, row: int, accepted: int, verified: int) -> Accepted:
        """Return the counts of a row's drafts, of which `verified` were verified and `accepted` were accepted."""
        most = self.accepts(row, verified)
        return Accepted(accepted, most, min(self.masks.forced[row], most) if self.masks else 0)

    def limits(self, k: int, *, always: bool) -> mx.array | None:
        """Return each row's maximum of accepted drafts, at most k, int32 [n]; -1 in a free slot.

        None, unless `always`, if every row may accept k; a free slot may not.
        """
        each = [self.accepts(row, k) for row in range(len(self.rows))]
        return mx.array(each) if always or min(each) < k else None
