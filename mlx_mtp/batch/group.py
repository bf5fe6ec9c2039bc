"""Decode the sequences of one cache layout in a shared pool, cycle by cycle, with the timeline of `decoding.loop`.

A new sequence joins with the next cycle that is built. A finished sequence is still in the cycle that was built
ahead, whose rows of it are not used.
"""

import math
import time
from collections.abc import Callable

import mlx.core as mx

from ..cache.absorb import push_read
from ..cache.drafting import chained_caches
from ..cache.mark import Mark
from ..cache.pool import Pool
from ..cache.prompt_cache import SPILL, PromptCache
from ..cache.slots import Span
from ..decoding.clock import Clock
from ..decoding.drafters import drafter_of, drafters_of
from ..decoding.policy import LOOKUP_DRAFTS, compiled_for, remember
from ..decoding.prefill import evaluated
from ..decoding.replay import Compiled
from ..decoding.run import Run
from ..decoding.sampling import Picker
from ..decoding.stats import Stats
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import TROUBLE, Fallback, GraphFailed, KernelRefused, Trouble, run_first
from ..tuning.plan import Accepted, Fixed
from .control import Control, outcome
from .pool_cycle import PoolCycle, Rows, Steps
from .rows import merged, misses_too_many, slots_for
from .sequence import Response, Sequence, prefill_again

Waiting = list[tuple[Sequence, Run]]  # sequences with a cache at rest, and the row that chose the last token of each


class Group:
    """The active sequences of one cache layout, and their pool.

    controls: `Controls.control`. chunk: rows per chunk when paused heads are prefilled. stats: counts new records.
    p_min, compile_cycles: options of `generate_step`. drafter, drafters: the model's, and all by name in plans.
    compiled: the recorded cycles; None to build each. clock: measures cycles; `hidden` must be set after other work.
    lone_cycles: number of consecutive cycles with only one sequence.
    pending: sequences that join with the next cycle. last: the cycle that was submitted last.
    unread: hidden rows of plain cycles for the sequences in `readers`, by row, which have not received them.
    Of the cycle being built: joining: its new sequences. marks: of caches before their heads are prefilled.
    drafts_evaluated: whether its drafts were evaluated, so that the drafter's caches have been written.
    """

    def __init__(
        self,
        model: Target,
        controls: Callable[..., Control],
        stats: Stats,
        *,
        chunk: int,
        p_min: float = 0.0,
        compile_cycles: bool | None = None,
    ):
        self.model, self.controls, self.stats, self.chunk = model, controls, stats, chunk
        self.compile_cycles, self.p_min = compile_cycles, p_min
        self.drafter, self.drafters = drafter_of(model), drafters_of(model, LOOKUP_DRAFTS)
        self.compiled: Compiled | None = None
        self.clock, self.lone_cycles, self.drafts_evaluated = Clock(), 0, False
        self.clock.hidden = True
        self.pool: Pool | None = None
        self.last: PoolCycle | None = None
        self.unread: list[mx.array] = []
        self.readers: list[tuple[int, Sequence]] = []
        self.pending: Waiting = []
        self.joining: Waiting = []
        self.marks: list[tuple[Sequence, Mark]] = []
        self.fallback = Fallback(model)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are not finished: those in the pool and those that join with the next cycle."""
        return self._unfinished(self.pending)

    def _unfinished(self, joining: Waiting) -> list[Sequence]:
        rows = self.last.rows if self.last else []
        return [s for s in (*rows, *(s for s, _ in joining)) if s and not s.finished]

    def join(self, sequence: Sequence, run: Run) -> None:
        """Add a sequence to the next cycle that is built; `run`, of one row, chose its last token.

        Its cache must be at rest.
        """
        sequence.cache.pop_row()
        sequence.base, sequence.next_base = sequence.cache.offset - 1, sequence.cache.offset
        self.pending.append((sequence, run))
        self.lone_cycles = 0

    def cycle(self) -> list[Response]:
        """Complete the submitted cycle, submit the next one, and return the tokens of the completed cycle.

        The first call submits a cycle before that. After a refused kernel or a failed graph the pool is rebuilt; []
        if the completed cycle was lost with it. Raises what `Fallback.take` raises.
        """
        self.clock.resume()
        responses: list[Response] = []
        try:
            self.last = last = self.last or self._submit(None, self._build(None, late=True))
            ahead, refused = None, None
            try:
                ahead = self._build(last, late=False) if self._can_build_ahead(last) else None
            except KernelRefused as e:
                refused = e
            responses = self._read(last, ahead)
            if refused:
                raise refused
            if ahead is None and any(s and not s.finished for s in last.rows):
                ahead = self._build(last, late=True)
            if ahead is not None and any(s and not s.finished for s in ahead.rows):
                self.last = self._submit(last, self.steps.with_forced(last, ahead))
            else:
                self.close()
        except TROUBLE as e:
            self._rebuild(e)
        self.lone_cycles = self.lone_cycles + 1 if self.last and len(self.sequences) == 1 else 0
        self.clock.leave()
        return responses

    def _rebuild(self, error: Trouble) -> None:
        """After an error, empty the pool; its sequences join a new one with the next cycle that is built.

        Each continues after its last returned token. `Fallback.take` switches kernels off, or raises the error.
        """
        active = self._unfinished(self.joining)
        self.fallback.take(error, sum(len(s.all_tokens) for s in active))
        if isinstance(error, KernelRefused) and not self.drafts_evaluated:
            for sequence, mark in self.marks:
                sequence.cache.restore(mark)
            self.pending = [*self.joining, *self.pending]
            leaving = self._leave(self.last) if self.last else []
        else:
            leaving = [(s, prefill_again(self.model, s, chunk=self.chunk)) for s in active]
        self.close()
        for sequence, run in leaving:
            self.join(sequence, run)

    def finish(self) -> tuple[list[Response], Waiting]:
        """Complete the submitted cycle and empty the pool, to decode elsewhere; no sequence may be pending.

        Returns its tokens, and (sequence, run of its newest row) of unfinished ones; ([], []) if it failed: all stay.
        """
        assert self.last
        assert not self.pending
        self.clock.resume()
        try:
            responses = self._read(self.last, None)
        except GraphFailed as e:
            self._rebuild(e)
            return [], []
        leaving = self._leave(self.last)
        self.close()
        return responses, leaving

    def _leave(self, cycle: PoolCycle) -> Waiting:
        """Copy unfinished sequences' caches from the pool after a read cycle; return each with its last row's Run."""
        leaving = []
        for row, sequence in enumerate(cycle.rows):
            if sequence and not sequence.finished:
                n = sequence.next_base - sequence.base
                self._copy_out(cycle, row, n, sequence.cache)
                newest = cycle.run.hidden[row : row + 1, n - 1 : n]
                leaving.append((sequence, Run.of_row(newest, sequence.all_tokens[-1])))
        return leaving

    def cache_of(self, sequence: Sequence) -> PromptCache:
        """Return a copy of a sequence's cache, at rest: it contains every token but the last one returned."""
        self._distribute_rows()
        cache = sequence.cache.copy()
        for run in (run for each, run in self.pending if each is sequence):
            cache.push(run.hidden)
            return cache
        assert self.last
        self._copy_out(self.last, self.last.rows.index(sequence), 0, cache)
        return cache

    def remove(self, sequence: Sequence) -> None:
        """Cancel a sequence: no more of its tokens are returned; its rows leave with the next cycle."""
        self.pending = [pair for pair in self.pending if pair[0] is not sequence]
        sequence.finished = True
        if not self.sequences:
            self.close()

    def close(self) -> None:
        """Drop the pool and its cycles, and end the thread that writes their masks; `pending` is unchanged."""
        if self.pool:
            self.steps.thread.shutdown()
        self.pool = self.last = None
        self.unread, self.readers, self.joining, self.marks = [], [], [], []

    def _can_build_ahead(self, last: PoolCycle) -> bool:
        """Return whether a sequence is unfinished, and none has logits processors, which need `last`'s tokens."""
        members = [s for s in (*last.rows, *(s for s, _ in self.pending)) if s]
        return not (all(s.finished for s in members) or any(s.picker.processors for s in members))

    def _build(self, last: PoolCycle | None, *, late: bool) -> PoolCycle:
        """Plan the next cycle; build its step, unevaluated, with p_min its drafts only. late: `last` was read."""
        tic = time.perf_counter()
        rows, run = (last.rows, last.run) if last else ([], None)
        joining, self.pending = self.pending, []
        self.joining, self.drafts_evaluated = joining, False
        active = [s for s in (*rows, *(s for s, _ in joining)) if s and not s.finished]
        masked = any(s.picker.matcher for s in active)
        most, longest = max(s.k for s in active), max(s.max_lookup for s in active)
        control = self.controls(len(active), most, longest, *([True] if masked else []))
        pool = self.pool or self._open_pool(active[0].cache)
        matched = max((s.history.matched() for s in active if s.max_lookup), default=0)
        unread = self._unread_rows(pool, active)
        plan = control.plan(matched, unread)
        in_step = plan.k > 0 and self.drafters[plan.source].in_step
        moves = bool(joining) or len(active) < sum(s is not None for s in rows)
        if pausing := pool.missed and (moves or self._misses_many(pool, 0 if in_step else plan.k)):
            pool.pause_heads([(row, s.slot, s.base, s.cache) for row, s in enumerate(rows) if s and not s.finished])
        resuming = in_step and not pool.has_heads
        if run is None or moves or resuming:
            rows, run = self._regroup(pool, rows, run, joining, resuming=resuming)
        same, unread = not (moves or pausing or resuming), unread if in_step else 0
        new = PoolCycle(rows, control, plan, matched, unread, late, same)
        self.steps.build(new, run, max(s.base for s in active))
        new.built = time.perf_counter() - tic
        return new

    def _misses_many(self, pool: Pool, k: int) -> bool:
        """Return whether the drafter must read the rows that it misses before a step with k drafts."""
        return misses_too_many(pool, 1 + k + max(1, chained_caches(self.model, len(pool.heads))))

    def _unread_rows(self, pool: Pool, active: list[Sequence]) -> int:
        """Return the number of rows that the drafter must read before it drafts.

        Of each sequence, if the pool has the drafter's caches; else in sum, of each sequence at most its `reach`.
        """
        if pool.has_heads or self.drafter is None:
            return len(pool.missed)
        shared = len(self.unread) if pool.heads else 0
        rows = ((self.drafter.behind(s.cache) + shared, s.cache.reach) for s in active)
        return sum(int(min(n, reach or math.inf)) for n, reach in rows)

    def _open_pool(self, like: PromptCache) -> Pool:
        """Create the pool and its recorded cycles."""
        self.pool = Pool(like)
        self.compiled = compiled_for(self.model, like, Picker(), self.compile_cycles)
        self.steps = Steps(self.model, self.pool, self.drafters, self.p_min, self.compiled, self.stats)
        return self.pool

    def _regroup(
        self, pool: Pool, rows: Rows, run: Run | None, joining: Waiting, *, resuming: bool
    ) -> tuple[Rows, Run]:
        """Assign slots and rows of the next pass; return its sequences by row, and one run of them in that order.

        rows, run: of the previous pass. joining: new sequences, with their runs. resuming: the heads of all sequences
        draft again and move into the pool.
        """
        staying, new = [s for s in rows if s and not s.finished], [s for s, _ in joining]
        taken = {s.slot for s in staying}
        free = (slot for slot in range(len(taken) + len(new)) if slot not in taken)
        for sequence in new:
            sequence.slot = next(free)
        by_slot = {s.slot: s for s in (*staying, *new)}
        used = range(slots_for(max(by_slot) + 1)) if self.compiled else list(by_slot)
        span = Span(used, max(pool.slots, max(used) + 1))
        row_of = {id(s): row for row, s in enumerate((*rows, *new))}
        members = [by_slot.get(slot) for slot in span.slots]
        filler = next(iter(by_slot.values()))  # free slots repeat this sequence's row
        order = [row_of[id(s or filler)] for s in members]
        if resuming:
            self._distribute_rows()
        entering = [*staying, *new] if resuming else new
        self.marks = [(sequence, sequence.cache.mark()) for sequence in entering]
        for sequence in entering if resuming or pool.has_heads else ():
            self._prefill_heads(sequence)
        pool.regroup(span, order, [(s.slot, s.cache) for s in new])
        if resuming:
            pool.resume_heads([(s.slot, s.cache) for s in by_slot.values()])
        for sequence, first in joining if not pool.has_heads else ():
            sequence.cache.push(first.hidden)
        return members, merged(run, [each for _, each in joining], mx.array(order))

    def _prefill_heads(self, sequence: Sequence) -> None:
        """Let the drafter read a sequence's unread hidden rows before position `sequence.base`; empty the backlog."""
        cache, base = sequence.cache, sequence.base
        assert self.drafter
        first = base - self.drafter.behind(cache)
        self.drafter.read(self.model, cache, sequence.history.tokens, first, base, step=self.chunk)
        cache.backlog = []

    def _submit(self, last: PoolCycle | None, new: PoolCycle) -> PoolCycle:
        """Start computing `new` and return it; before, `last` and caches release the arrays that `new` overwrites."""
        assert self.pool is not None
        run_first(self.model)
        self.marks = []
        if new.masks and new.masks.allowed is not None:
            new.masks.begin()
        if new.plan.p_min:
            self.drafts_evaluated = True
            if last:
                last.after = None
            self.steps.verify_sure(new)
            run_first(self.model)
        moved = last is None or last.rows is not new.rows
        if last:
            last.after = None
            if self.pool.heads and not self.pool.has_heads:
                self._keep_rows(last)
            if moved or len(self.unread) == SPILL:
                self._distribute_rows()
        for sequence in new.rows:
            if sequence:
                sequence.base = sequence.next_base
                pooled = sequence.cache.caches if self.pool.has_heads else sequence.cache.layers
                for c in pooled if moved and not sequence.finished else ():
                    c.parts = ()
        if new.passed:
            self.steps.begin_pass(new)
        evaluated(mx.async_eval, new.run.packed, new.run.logprobs, self.pool.arrays)
        self.joining = []
        return new

    def _keep_rows(self, cycle: PoolCycle) -> None:
        """Keep the accepted rows of a cycle for paused heads; rows of plain cycles are not split by sequence yet."""
        active = [(row, s) for row, s in enumerate(cycle.rows) if s and not s.finished]
        if cycle.run.size > 1:
            self._distribute_rows()
            for row, s in active:
                push_read(s.cache, cycle.run.hidden[row : row + 1, : s.next_base - s.base], s.history.tokens)
            return
        if not self.unread:
            self.readers = active
        self.unread.append(cycle.run.hidden)

    def _distribute_rows(self) -> None:
        """Move the kept rows of plain cycles to the backlog of each sequence's cache."""
        if not self.unread:
            return
        rows, readers = mx.concatenate(self.unread, axis=1), self.readers
        self.unread, self.readers = [], []
        for row, sequence in readers:
            push_read(sequence.cache, rows[row : row + 1], sequence.history.tokens)
        mx.async_eval([sequence.cache.arrays for _, sequence in readers])

    def _read(self, cycle: PoolCycle, ahead: PoolCycle | None) -> list[Response]:
        """Wait for a cycle and return its tokens; the last response of a finished sequence has its cache.

        ahead: the next cycle, if it is built already, for the measured seconds.
        """
        tic = time.perf_counter()
        values = evaluated(cycle.run.read)
        waited = time.perf_counter() - tic
        seconds = self.clock.arrived(waited, cycle.built, ahead.built if ahead else None, late=cycle.late)
        responses: list[Response] = []
        kept: list[Accepted] = []
        verified, logprobs = cycle.run.size - 1, cycle.run.logprobs
        for row, sequence in enumerate(cycle.rows):
            if sequence is None or sequence.finished:
                continue
            tokens, accepted = values[row]
            kept.append(counts := cycle.counts(row, accepted, verified))
            new = sequence.append(tokens, accepted, logprobs[row] if logprobs else None)
            stats = sequence.stats
            stats.count_cycle(counts.most, accepted, cycle.plan.source, counts.forced)
            stats.generation_tokens += len(new)
            stats.add_time(self.clock.took, waited)
            stats.count_replays(cycle.replayed)
            if sequence.k and isinstance(cycle.control, Controller):
                stats.note_pause(cycle.control.paused)
            sequence.next_base = sequence.base + accepted + 1
            if sequence.finished:
                self._copy_out(cycle, row, len(new), sequence.cache)
            responses += sequence.attach_cache(new)
        if self.compiled:
            like = len(cycle.rows), cycle.run.size
            seconds = self.compiled.observe(cycle.plan, like, cycle.replayed, seconds)
            if self.compiled.recorder.verdict is None and self.compiled.decided():
                remember(self.model, Fixed(0), self.compiled)
        if kept:
            context = max(sequence.base for sequence in cycle.rows if sequence)
            how = cycle.prefilled, cycle.matched, context
            cycle.control.observe(outcome(cycle.plan, verified, kept, seconds, *how))
        return responses

    def _copy_out(self, cycle: PoolCycle, row: int, rows: int, cache: PromptCache) -> None:
        """Copy a sequence's state from the pool to `cache`, which is then at rest.

        The state is that after the first `rows` rows of a cycle that was read; 0: before the cycle.
        """
        sequence, mark = cycle.rows[row], cycle.after
        assert sequence
        assert self.pool
        assert mark
        self._distribute_rows()
        self.pool.copy_out(mark, cache, sequence.slot, row, base=sequence.base, rows=rows)
        if rows:
            cache.push(cycle.run.hidden[row : row + 1, :rows])
        cache.settle(sequence.all_tokens[: sequence.base + rows])
        mx.eval(cache.arrays)
