"""Build or replay the step of a pool's next cycle; read the drafter's confidence if the plan requires it."""

import time
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from ..cache.pool import Pool, PoolMark
from ..decoding.cycle_masks import CycleMasks, mask_thread
from ..decoding.drafters import Drafter
from ..decoding.drafters.drafter import Frame
from ..decoding.guided import choose_allowed, choose_late, redrafted, submit_pass
from ..decoding.prefill import evaluated
from ..decoding.replay import Compiled
from ..decoding.run import NO_DRAFTS, Drafts, Run
from ..decoding.stats import Stats
from ..decoding.step import Passed, forward, propose, read_rows, step, verify
from ..grammar import GrammarError
from ..layers.target import Target
from ..tuning.plan import Accepted, Plan
from .control import Control, most_together
from .rows import with_missed
from .sequence import Sequence

Rows = list[Sequence | None]  # the sequence of each row of a pass; None for a free slot


@dataclass
class PoolCycle:
    """A cycle of a pool. `Steps` sets the fields after `built`.

    rows: the sequence of each row, None for a free slot. matched: the longest repeated suffix of any sequence with
    prompt lookup, in tokens. prefilled: rows that the drafter had to read first. late: begun after the previous
    cycle was read. built: seconds spent on planning and on building or replaying the step.
    same: whether the pool has the sequences and heads of the cycle before.
    after: a mark of the pool after this cycle, held until the next one begins.
    frame, given, drafts: set if only the drafts are built, because their confidence is read first; frame also with a
    grammar.
    passed: with a grammar, the rows that the run chooses from, which are submitted first. masks: with a grammar.
    most: as `limits` returns it, for a run that is built after the masks are written.
    forced: for a plan of "grammar", per row the number of drafts that the sequence's grammar forces; else [].
    """

    rows: Rows
    control: Control
    plan: Plan
    matched: int
    prefilled: int
    late: bool
    same: bool = False
    built: float = 0.0
    replayed: bool = False
    run: Run = field(init=False)
    after: PoolMark | None = None
    frame: Frame = field(init=False)
    given: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS
    passed: Passed | None = None
    masks: CycleMasks | None = None
    most: mx.array | None = None
    forced: list[int] = field(default_factory=list)

    @property
    def has_grammar(self) -> bool:
        """Whether any sequence has a grammar."""
        return any(s is not None and s.picker.matcher is not None for s in self.rows)

    def accepts(self, row: int, verified: int) -> int:
        """Return the number of drafts that the sequence of a row may accept of those verified; -1 for a free slot."""
        sequence = self.rows[row]
        if sequence is None:
            return -1
        most = self.forced[row] if self.plan.source == "grammar" else sequence.max_drafts(self.plan.source)
        return min(most, verified)

    def counts(self, row: int, accepted: int, verified: int) -> Accepted:
        """Return the counts of a row's drafts, of which `verified` were verified and `accepted` were accepted."""
        most = self.accepts(row, verified)
        return Accepted(accepted, most, min(self.masks.forced[row], most) if self.masks else 0)

    def limits(self, k: int, *, always: bool = False) -> mx.array | None:
        """Return each row's maximum of accepted drafts, at most k, int32 [n]; -1 in a free slot.

        None, unless `always`, if every row may accept k; a free slot may not.
        """
        each = [self.accepts(row, k) for row in range(len(self.rows))]
        return mx.array(each) if always or min(each) < k else None


@dataclass
class Steps:
    """Builder of a pool's steps.

    drafters: all drafters, by their names in plans. p_min: in cycles whose plan has p_min, the probability below
    which a draft and those after it are not verified. compiled: the recorded steps; None to build each. stats: counts
    new recordings. thread: the executor of `mask_thread`, for `submit_pass`.
    """

    model: Target
    pool: Pool
    drafters: dict[str, Drafter]
    p_min: float
    compiled: Compiled | None
    stats: Stats
    thread: Executor = field(default_factory=mask_thread)

    def build(self, new: PoolCycle, run: Run, base: int) -> None:
        """Build or replay, unevaluated, the step of the cycle `new` after the rows of `run`; set the cycle's fields.

        base: upper bound of the position of the first row of `run`. Rows of plain cycles are kept for the drafter
        until it drafts again or a run has several rows. With p_min only the drafts are built, and `verify_sure`
        builds the rest; with a grammar and a caller's sampler or processors `begin_pass` builds the choice.
        """
        plan, pool = new.plan, self.pool
        source = self.drafters[plan.source] if plan.k else None
        in_step = source is not None and source.in_step
        pool.live = pool.has_heads and (in_step or run.size > 1)
        given, base = (with_missed(pool, run), base - len(pool.missed)) if pool.live else (run, base)
        if pool.has_heads and not pool.live:
            pool.missed.append((run.hidden, run.tokens))
        reader = next((d for d in self.drafters.values() if d.in_step), None) if pool.live else None
        if new.has_grammar:
            new.masks = CycleMasks(new.rows, plan.k, drafted=in_step)
        frame = Frame(self.model, pool, plan, reader, new.rows, base, new.masks.allowed if new.masks else None)
        drafts = NO_DRAFTS if source is None or in_step else source.propose(frame, run, plan.k)
        given, replay = given.given, None
        if self.compiled:
            frame, given, replay = self.compiled.find(frame, given, self.stats)
        if plan.p_min:
            new.frame, new.given = frame, given
            new.drafts = propose(frame, given, pool.unload(), drafts)
            return
        limits, limit = new.limits(plan.k, always=replay is not None), frame.base + given.size
        if new.masks:
            new.passed, arrays = (replay or partial(forward, frame))(given, pool.unload(), drafts)
            pool.load(arrays, limit + plan.k + 1, limit)
            new.frame, new.most = frame, limits
            if not choose_late(frame):
                new.run = choose_allowed(frame, new.passed, new.masks, self.compiled, self.stats, limits)
        else:
            new.run, arrays = (replay or partial(step, frame))(given, pool.unload(), drafts, limits)
            pool.load(arrays, limit + plan.k + 1, limit)
        new.replayed, new.after = replay is not None, pool.mark()

    def verify_sure(self, new: PoolCycle) -> None:
        """Evaluate a cycle's drafts, which writes the drafter's caches; build the rest of the step.

        With a grammar the rest is the target's pass and, unless `choose_late`, the choice of tokens; without a
        grammar the rest is the verify.
        The number of drafts verified is the same for all sequences: the maximum, over them, of the number of drafts
        before a sequence's first improbable one.
        """
        tic = time.perf_counter()
        drafts = new.drafts.first(evaluated(new.drafts.sure, self.p_min))
        waited = time.perf_counter() - tic
        for sequence in new.rows:
            if sequence and not sequence.finished:
                sequence.stats.add_time(0.0, waited)
        if new.masks:
            new.passed, new.most = read_rows(new.frame, new.given, drafts), new.limits(drafts.k)
            if not choose_late(new.frame):
                new.run = choose_allowed(new.frame, new.passed, new.masks, self.compiled, self.stats, new.most)
        else:
            new.run = verify(new.frame, new.given, drafts, new.limits(drafts.k))
        new.drafts, new.after = NO_DRAFTS, self.pool.mark()

    def with_forced(self, last: PoolCycle, new: PoolCycle) -> PoolCycle:
        """Return the cycle after `last`, which was read: `new`, or one with drafts of grammars (`Matcher.drafts`).

        It is `new` if no grammar forces a draft, if the control keeps the plan, or if building `new` changed the
        pool's sequences or heads.
        """
        if not new.same or last.after is None:
            return new
        forced = [self._forced(sequence, most_together(len(new.rows))) for sequence in new.rows]
        active = [count for count, s in zip(forced, new.rows, strict=True) if s and not s.finished]
        if not any(active):
            return new
        plan = redrafted(new.control, new.plan, active)
        if plan == new.plan:
            return new
        tic = time.perf_counter()
        self.pool.restore(last.after)
        other = PoolCycle(new.rows, new.control, plan, 0, new.prefilled, late=True, forced=forced)
        self.build(other, last.run, max(s.base for s in new.rows if s and not s.finished))
        other.built = time.perf_counter() - tic
        return other

    def _forced(self, sequence: Sequence | None, most: int) -> int:
        """Return the number of drafts of a sequence's `Matcher.drafts`: at most `most` and its matcher's `most`.

        0 without a grammar, for a free slot or a finished sequence, and if a GrammarError ends the sequence.
        """
        matcher = sequence.picker.matcher if sequence else None
        if sequence is None or sequence.finished or matcher is None or not matcher.most:
            return 0
        try:
            matcher.follow(sequence.history.tokens)
            return len(matcher.drafts(min(matcher.most, most)))
        except GrammarError as e:
            sequence.fail(e)
            return 0

    def begin_pass(self, new: PoolCycle) -> None:
        """Submit the target's pass of a cycle with grammars, and write its masks; then set its run, unless it is set.

        The run is not yet set if any sequence has a caller's sampler or processors (`choose_late`).
        """
        passed, masks = new.passed, new.masks
        assert passed
        assert masks
        waits = submit_pass(passed, masks, self.thread, stepwise=new.plan.stepwise)
        for sequence in new.rows:
            if sequence and not sequence.finished:
                for waited in waits:
                    sequence.stats.add_time(0.0, waited)
        if choose_late(new.frame):
            new.run = choose_allowed(new.frame, passed, masks, self.compiled, self.stats, new.most)
            new.after = self.pool.mark()
