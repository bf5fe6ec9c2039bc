"""Build or replay the step of a pool's next cycle; read the drafter's confidence if the plan requires it."""

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

Rows = list[Sequence | None]  # the sequence of each row of a pass; None for a free slot


@dataclass
class PoolCycle:
    """A cycle of a pool. `Steps` sets the fields after `built`.

    rows: the sequence of each row, None for a free slot. matched: the longest repeated suffix of any sequence with
    prompt lookup, in tokens. prefilled: rows that the drafter had to read first. late: begun after the previous
    cycle was read. built: seconds spent on planning and on building or replaying the step.
    after: a mark of the pool after this cycle, held until the next one begins.
    frame, given, drafts: set if only the drafts are built, because their confidence is read first.
    """

    rows: Rows
    control: Control
    plan: Plan
    matched: int
    prefilled: int
    late: bool
    built: float = 0.0
    replayed: bool = False
    run: Run = field(init=False)
    after: PoolMark | None = None
    frame: Frame = field(init=False)
    given: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS

    def limits(self, k: int, *, always: bool = False) -> mx.array | None:
        """Return each row's maximum of accepted drafts, at most k, int32 [n]; -1 in a free slot.

        None, unless `always`, if every row may accept k; a free slot may not.
        """
        each = [min(s.max_drafts(self.plan.source), k) if s else -1 for s in self.rows]
        return mx.array(each) if always or min(each) < k else None


@dataclass
class Steps:
    """Builder of a pool's steps.

    drafters: all drafters, by their names in plans. p_min: probability below which a draft is not verified.
    compiled: the recorded steps; None to build each. stats: counts new recordings.
    """

    model: Target
    pool: Pool
    drafters: dict[str, Drafter]
    p_min: float
    compiled: Compiled | None
    stats: Stats

    def build(self, new: PoolCycle, run: Run, base: int) -> None:
        """Build or replay, unevaluated, the step of the cycle `new` after the rows of `run`; set the cycle's fields.

        base: upper bound of the position of the first row of `run`. Rows of plain cycles are kept for the drafter
        until it drafts again. With p_min only the drafts are built; `verify_sure` builds the rest.
        """
        plan, pool = new.plan, self.pool
        source = self.drafters[plan.source] if plan.k else None
        in_step = source is not None and source.in_step
        pool.live = pool.has_heads and (in_step or run.size > 1)
        given, base = (with_missed(pool, run), base - len(pool.missed)) if pool.live else (run, base)
        if pool.has_heads and not pool.live:
            pool.missed.append((run.hidden, run.tokens))
        reader = next((d for d in self.drafters.values() if d.in_step), None) if pool.live else None
        frame = Frame(self.model, pool, plan, reader, new.rows, base)
        drafts = NO_DRAFTS if source is None or in_step else source.propose(frame, run, plan.k)
        replay = None
        if self.compiled:
            frame = rounded(frame, given.size)
            replay = self.compiled.find(frame, given.size, self.stats)
        if plan.p_min:
            new.frame, new.given = frame, given
            new.drafts = propose(frame, given, pool.unload(), drafts)
            return
        limits = new.limits(plan.k, always=replay is not None)
        new.run, arrays = (replay or partial(step, frame))(given.given, pool.unload(), drafts, limits)
        limit = frame.base + given.size
        pool.load(arrays, limit + plan.k + 1, limit)
        new.replayed, new.after = replay is not None, pool.mark()

    def verify_sure(self, new: PoolCycle) -> None:
        """Evaluate a cycle's drafts, which writes the drafter's caches; build the verify of the probable ones.

        Every sequence has as many drafts verified as the one with the most before its first improbable one.
        """
        tic = time.perf_counter()
        drafts = new.drafts.first(evaluated(new.drafts.sure, self.p_min))
        waited = time.perf_counter() - tic
        for sequence in new.rows:
            if sequence and not sequence.finished:
                sequence.stats.add_time(0.0, waited)
        new.run = verify(new.frame, new.given, drafts, new.limits(drafts.k))
        new.drafts, new.after = NO_DRAFTS, self.pool.mark()
