"""Define the interface between the decode loop and a drafter, and the inputs of a step."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ...cache.layer_cache import CacheKind
from ...cache.prompt_cache import PromptCache
from ...cache.step_cache import StepCache
from ...layers.target import Target
from ...tuning.plan import Plan, Role
from ..members import Members
from ..run import Drafts, Run


class Frame(NamedTuple):
    """The inputs of a step besides the arrays that steps pass on.

    cache:   contains the arrays during the step. plan: the drafter's name and the number of drafts.
    drafter: the drafter that reads the previous run's rows in this step, and drafts if the plan names it; or None.
    members: the sequences, by row.
    base:    position of the first row of the previous run, or an upper bound of it.
    allowed: masks of drafts by grammars, int32 [k, n, words] (`CycleMasks`); None if any token may be drafted.
    """

    model: Target
    cache: StepCache
    plan: Plan
    drafter: "Drafter | None"
    members: Members
    base: int
    allowed: mx.array | None = None

    @property
    def asked(self) -> int:
        """Number of drafts that `drafter` must make; 0 if it only reads."""
        return self.plan.k if self.drafter and self.plan.source in (self.drafter.source, *self.drafter.others) else 0


class Drafter(Protocol):
    """Proposes drafts after the rows of a run. These defaults suit a drafter without caches or weights.

    source:  its name in plans. most, usual: maximum drafts per cycle, and by default, 0 for the heads' default.
    role:    what its drafts depend on, as the control and the statistics count them; a model's drafter has MODEL.
    others:  other names in plans, of a drafter with several ways to draft: the maximum of an adaptive cycle of each.
    spare:   number of its first caches that it does not need in cycles of one sequence, by name in plans.
    in_step: `propose` depends on arrays only, and is recorded with the step. Otherwise it runs before the step.
    windows: one entry per cache, in the order of `frame.cache.heads`: a window, None for all positions, or a class.
    chained: number of first caches that start one position after the one before, with a row of `kept` for each pair.
    no_kept: `frame.cache.kept` before the first row, without chained caches.
    reads_hidden: False for a drafter that reads only tokens, all of them.
    absorbs: it also reads prompts and pending rows while it does not draft, and skips none.
    trees:   `propose` returns a tree of k nodes for plans with `tree`.
    row_counts: by name in plans, "" for other names, ascending numbers: recorded steps pad a run's rows to the next.
    reads:   numbers of target layers. A hidden row is the residual stream before the final norm (`Target.normed`
             applies that) and, along the same axis, the stream after each of these numbers of layers.
    """

    source: str = "heads"
    role: Role = Role.MODEL
    most: int
    others: Mapping[str, int] = {}
    spare: Mapping[str, int] = {}
    usual: int = 0
    in_step: bool = True
    windows: Sequence[CacheKind] = ()
    chained: int = 0
    no_kept: tuple[mx.array, ...] = ()
    reads_hidden: bool = True
    absorbs: bool = False
    trees: bool = False
    row_counts: Mapping[str, tuple[int, ...]] = {}
    reads: tuple[int, ...] = ()

    def limit(self, sequence: Any) -> int:
        """Return the maximum number of drafts that a sequence (`Sequence`) accepts from this drafter in a cycle."""
        return sequence.k

    def pending(self, hidden: mx.array) -> mx.array:
        """Return what the backlog stores of hidden rows [1, r, H] until the drafter reads them: r rows."""
        return hidden

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        """Return k drafts after each sequence's newest token, `run.newest()`; for k = 0 read only, return NO_DRAFTS.

        Rows 0..`run.last` of a sequence are accepted, the others rejected. The drafter's caches are at the first row
        of the run, the target's after `run.last`. Read all rows, so that shapes do not depend on the accepted count.
        End with `frame.cache.heads_follow()`, which moves the drafter's caches to the target's position: the next
        call then overwrites the entries of rejected rows and of drafts.
        """
        ...

    def behind(self, cache: PromptCache) -> int:
        """Return the number of rows to read before the drafter drafts again; 0 while it follows the target."""
        return 0 if cache.live or not cache.heads else cache.pending_rows

    def read(self, model: Target, cache: PromptCache, tokens: Any, first: int, end: int, *, step: int) -> None:
        """Read positions first..end-1 from the cache's backlog of hidden rows, `step` rows at a time, unevaluated.

        The rows leave the backlog, which starts at `first`, or with windows ends at end-1. tokens: [end + 1] or more.
        """
        if not cache.heads or first >= end:
            return
        rows = mx.concatenate(cache.backlog, axis=1)
        if cache.reach is not None:
            rows = rows[:, first - end :]
        if first != cache.primed:
            self.skip_to(cache, first, end - first)
        for lo in range(first, end, step):
            hi = min(lo + step, end)
            self.read_rows(model, cache, rows[:, lo - first : hi - first], tokens[lo + 1 : hi + 1], lo)
            cache.primed, cache.backlog = hi, [rows[:, hi - first :]]
        cache.place_rows()

    def skip_to(self, cache: StepCache, first: int, rows: int) -> None:
        """Empty the drafter's caches: they start at position `first`, from which `rows` rows are read next."""
        for kv in cache.heads:
            kv.start = first

    def read_rows(self, model: Target, cache: StepCache, hidden: mx.array, tokens: Any, first: int) -> None:
        """Read hidden rows [1, n, H] from position `first` on, with the n tokens after them, into the caches.

        Positions are host integers: seek each cache to its next row, and leave it after the last one.
        """
