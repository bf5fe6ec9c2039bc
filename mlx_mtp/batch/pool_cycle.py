"""Build, or replay, the step of a pool's next cycle, and read the drafter's confidence where the plan asks for it."""

import time
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from ..cache.pool import Pool, PoolMark
from ..decoding.drafters import Drafter
from ..decoding.drafters.drafter import Frame
from ..decoding.prefill import evaluated
from ..decoding.replay import Compiled, rounded
from ..decoding.run import NO_DRAFTS, Drafts, Run
from ..decoding.stats import Stats
from ..decoding.step import propose, step, verify
from ..layers.target import Target
from ..tuning.plan import Plan
from .control import Control
from .rows import with_missed
from .sequence import Sequence

Rows = list[Sequence | None]  # whose each row of a pass is; None where a slot is free


@dataclass
class PoolCycle:
    """A cycle from when it is built.

    rows: whose each is. matched: last tokens of a text that have occurred before, the most of any.
    caught_up: rows that the drafter had to read first. late: begun when the one before had been read.
    built: seconds that it took to build, or to replay where it is replayed.
    after: the pool as it leaves it, until the next begins.
    frame, given, drafts: of one that was built up to its drafts, whose confidence is to be read.
    """

    rows: Rows
    control: Control
    plan: Plan
    matched: int
    caught_up: int
    late: bool
    built: float = 0.0
    replayed: bool = False
    run: Run = field(init=False)
    after: PoolMark | None = None
    frame: Frame = field(init=False)
    given: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS

    def most(self, k: int) -> mx.array:
        """List the drafts of k that each may accept, int32 [n]; -1 in a row that is no text's."""
        return mx.array([min(s.most(self.plan.source), k) if s else -1 for s in self.rows])

    def limited(self, k: int) -> bool:
        """Tell whether any row may accept fewer than k."""
        return any(s is None or s.most(self.plan.source) < k for s in self.rows)


@dataclass
class Steps:
    """What builds the steps of a pool.

    drafter: of the model. drafters: who may draft, by the name in plans. p_min: as `generate_step`'s draft_p_min.
    compiled: replays steps that were recorded, None: all are built. stats: counts what is recorded.
    """

    model: Target
    pool: Pool
    drafters: dict[str, Drafter]
    p_min: float
    compiled: Compiled | None
    stats: Stats

    @property
    def drafter(self) -> Drafter | None:
        return next((drafter for drafter in self.drafters.values() if drafter.in_step), None)

    def build(self, new: PoolCycle, run: Run, base: int) -> None:
        """Build the step behind the rows of `run`, the first of which is at `base` at most, or replay it.

        A drafter that is not asked reads no plain cycle's rows until it is. With p_min only the drafts are built.
        """
        plan, pool = new.plan, self.pool
        source = self.drafters[plan.source] if plan.k else None
        in_step = source is not None and source.in_step
        pool.live = pool.has_heads and (in_step or run.size > 1)
        given, base = (with_missed(pool, run), base - len(pool.missed)) if pool.live else (run, base)
        if pool.has_heads and not pool.live:
            pool.missed.append((run.hidden, run.tokens))
        frame = Frame(self.model, pool, plan, self.drafter if pool.live else None, new.rows, base)
        guesses = NO_DRAFTS if source is None or in_step else source.propose(frame, run, plan.k)
        take = None
        if self.compiled:
            frame = rounded(frame, given.size)
            take = self.compiled.find(frame, given.size, self.stats)
        if plan.p_min:
            new.frame, new.given = frame, given
            new.drafts = propose(frame, given, pool.unload(), guesses)
            return
        limits = new.most(plan.k) if take or new.limited(plan.k) else None
        new.run, arrays = (take or partial(step, frame))(given.given, pool.unload(), guesses, limits)
        limit = frame.base + given.size
        pool.load(arrays, limit + plan.k + 1, limit)
        new.replayed, new.after = take is not None, pool.mark()

    def verify_sure(self, new: PoolCycle) -> None:
        """Evaluate a cycle's drafts, which writes the drafter's caches; build the verify of the sure ones."""
        tic = time.perf_counter()
        drafts = new.drafts.first(evaluated(new.drafts.sure, self.p_min))
        waited = time.perf_counter() - tic
        for text in new.rows:
            if text and not text.over:
                text.stats.spends(0.0, waited)
        limits = new.most(drafts.k) if new.limited(drafts.k) else None
        new.run = verify(new.frame, new.given, drafts, limits)
        new.drafts, new.after = NO_DRAFTS, self.pool.mark()
