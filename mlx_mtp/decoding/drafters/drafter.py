"""State what a drafter offers, and what it is given: all that the decode loop asks of whatever proposes drafts."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ...cache.layer_cache import CacheKind
from ...cache.prompt_cache import PromptCache
from ...cache.step_cache import StepCache
from ...layers.target import Target
from ...tuning.plan import Plan
from ..members import Members
from ..run import Drafts, Run


class Frame(NamedTuple):
    """All of a step that is no array, but for the keys of its sequences' draws.

    cache:   holds the arrays for the time of the step. plan: who drafts, and how many.
    drafter: who has a part in the step: it reads the rows before, and drafts if the plan asks it to; None for nobody.
    members: the sequences, by row.
    base:    the first position of the rows before, or a bound of it.
    """

    model: Target
    cache: StepCache
    plan: Plan
    drafter: "Drafter | None"
    members: Members
    base: int

    @property
    def asked(self) -> int:
        """How many drafts the drafter is to make."""
        return self.plan.k if self.drafter and self.plan.source == self.drafter.source else 0


class Drafter(Protocol):
    """Proposes drafts behind the rows of a run. These defaults suit a drafter without caches or weights.

    source:  its name in plans. most: drafts of a cycle.
    in_step: `propose` is a function of arrays alone: a part of the step, recorded with it. Otherwise it is called
             before the step, which gets its drafts as an input: for what depends on text that the host has read.
    windows: what each of its caches needs: a window, None for all positions, or a class of cache. The caches are
             `frame.cache.heads`.
    chained: each of its caches begins one position behind the one before, and `frame.cache.kept` has a row for each
             but the last: those of MTP heads that read each other's outputs.
    absorbs: it reads pending rows while it does not draft, too: `read_rows` needs no tokens, and no row is skipped.
    reads:   numbers of layers of the target. A hidden row is the residual stream before the final norm, which
             `Target.normed` applies; behind it, along the same axis, comes the stream after so many layers each.
             Keys and values of the target's layers are in `frame.cache.layers`.
    """

    source: str = "heads"
    most: int
    in_step: bool = True
    windows: Sequence[CacheKind] = ()
    chained: bool = False
    absorbs: bool = False
    reads: tuple[int, ...] = ()

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        """Draft k tokens behind each sequence's newest one, `run.newest()`; NO_DRAFTS for k = 0.

        Rows 0..`run.last` of a sequence are right, the others were rejected. The drafter's caches stand at the first
        row of the run, the target's behind `run.last`. Reading all rows keeps shapes free of what was accepted; those
        written for rejected rows and for drafts are overwritten by the next call, if the caches are left where the
        target's are (`frame.cache.heads_follow()`). k = 0 only reads.
        """
        ...

    def behind(self, cache: PromptCache) -> int:
        """Count the rows that it has to read before it drafts again: what it costs to resume after a pause."""
        return 0 if cache.live or not cache.heads else cache.behind

    def read(self, model: Target, cache: PromptCache, tokens: Any, first: int, end: int, *, step: int) -> None:
        """Read positions first..end-1, `step` at a time, from the hidden rows that wait in the backlog.

        These begin at `first`, but of caches with windows, which may skip rows, they end at end-1. `tokens` [end + 1]
        are known; nothing is evaluated.
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

    def skip_to(self, cache: PromptCache, first: int, rows: int) -> None:
        """Empty the caches, which then read `rows` rows from position `first` on."""
        for kv in cache.heads:
            kv.start = first

    def read_rows(self, model: Target, cache: PromptCache, hidden: mx.array, tokens: Any, first: int) -> None:
        """Read hidden rows [1, n, H] from position `first` on, and the n tokens behind them, into the caches.

        Positions are host integers: seek each cache to where its next row goes, and leave it behind the last one.
        """
