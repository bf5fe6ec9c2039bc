"""Decode several sequences of one cache layout in the slots of a `Pool`."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..cache.absorb import push_read
from ..cache.drafting import chained_caches
from ..cache.mark import Mark
from ..cache.pool import Pool
from ..cache.prompt_cache import SPILL, PromptCache
from ..cache.slots import Span
from ..layers.target import Target
from ..tuning.kernel_fallback import KernelRefused, Trouble, run_first
from ..tuning.plan import Plan
from .again import come_to_rest, first_rows, read_kept, why_read_again
from .cycle_masks import mask_thread
from .drafters import drafter_of
from .drafters.drafter import Drafter
from .flight import Flight, SequenceRows
from .policy import compiled_for
from .pool_rows import merged, misses_too_many, slots_for, with_missed
from .prefill import read_again
from .run import Run
from .sampling import Picker
from .seating import DriverOptions, Seating, Waiting
from .sequence import Sequence
from .stats import Stats


class Pooled(Seating):
    """The seating of several sequences: what a driver does with their pool; `Alone` has the same methods.

    controls: `Controls.control`. compiled: the recorded cycles; None to build each. stats: counts new records.
    unread: hidden rows of plain cycles for the sequences in `readers`, by row, which have not received them.
    marks: of the caches of sequences that join the cycle being built, before their heads are prefilled.
    drafts_evaluated: whether its drafts were evaluated, so that the drafter's caches have been written.
    """

    defers = False
    stopping = False  # a batch has no ranks

    def __init__(
        self,
        model: Target,
        like: PromptCache,
        drafters: dict[str, Drafter],
        controls: Callable[..., Any],
        stats: Stats,
        how: DriverOptions,
    ):
        """like: a cache of the layout. how: the driver's options."""
        self.model, self.drafters, self.controls, self.stats = model, drafters, controls, stats
        self.drafter, self.chunk, self.p_min = drafter_of(model), how.chunk, how.p_min
        self.thread = mask_thread()
        self.pool = Pool(like)
        self.compiled = compiled_for(model, like, Picker(), how.compile_cycles)
        self.unread: list[mx.array] = []
        self.readers: list[tuple[int, Sequence]] = []
        self.marks: list[tuple[Sequence, Mark]] = []

    @property
    def cache(self) -> Pool:
        return self.pool

    @property
    def first(self) -> None:
        """There is no cycle before the first one."""

    def agree(self) -> None:
        """Run each kernel that the next graph launches for the first time; raises KernelRefused if one is refused."""
        run_first(self.model)

    def why_late(self, last: Flight) -> str | None:
        """Return why the cycle after `last` cannot be built before `last` is read; None if it can."""
        if any(s.picker.processors for s in last.active):
            return "logits processors"
        return why_read_again(self.pool, last.run.size)

    def begin_late(self, last: Flight | None) -> float:
        """Prepare as `Alone.begin_late`; return the maximum number of drafts of the cycle: no limit."""
        if last:
            kept = [first_rows(s) if s and not s.finished else None for s in last.rows]
            self.reread = read_kept(self.model, self.pool, kept, last.run.size)
            if self.reread:
                last.after = self.pool.mark()
        return math.inf

    def plan(self, active: list[Sequence]) -> tuple[Any, Plan, int]:
        """Return the control of these sequences, its plan for the next cycle, and the longest match for a lookup."""
        limit = self.model.runtime.most_drafts(self._rows_for(active))
        most, longest = (min(limit, max(each)) for each in zip(*((s.k, s.max_lookup) for s in active), strict=True))
        masked = any(s.picker.matcher for s in active)
        barred = masked or any(s.picker.callers for s in active)
        tree = 0 if barred else min(limit + 1, max(s.tree for s in active))
        control = self.controls(len(active), most, longest, *([masked, tree] if tree else [True] if masked else []))
        matched = max((s.history.matched() for s in active if s.max_lookup), default=0)
        return control, control.plan(matched, self._unread_rows(active)), matched

    def _rows_for(self, active: list[Sequence]) -> int:
        """Return an upper bound of the sequences of a pass over these ones, with the free slots that it includes."""
        return slots_for(max(len(active), 1 + max(s.slot for s in active))) if self.compiled else len(active)

    def arrange(self, last: Flight | None, new: Flight, joining: Waiting) -> tuple[Run, int]:
        """Move sequences and heads into or out of the pool; return one run of all rows, and its position."""
        pool, rows, plan = self.pool, last.rows if last else [], new.plan
        run, active = last.run if last else None, [*(last.active if last else ()), *(s for s, _ in joining)]
        self.drafts_evaluated = False
        in_step = plan.k > 0 and self.drafters[plan.source].in_step
        unread = self._unread_rows(active) if in_step else 0
        moves = bool(joining) or len(active) < sum(s is not None for s in rows)
        if pausing := pool.missed and (moves or self._misses_many(0 if in_step else plan.k)):
            pool.pause_heads([(row, s.slot, s.base, s.cache) for row, s in enumerate(rows) if s and not s.finished])
        resuming = in_step and not pool.has_heads
        if run is None or moves or resuming:
            rows, run = self._regroup(rows, run, joining, resuming=resuming)
        new.rows, new.prefilled = rows, unread
        new.before = last.after if last and not (moves or pausing or resuming) else None
        return run, max(s.base for s in active)

    def _misses_many(self, k: int) -> bool:
        """Return whether the drafter must read the rows that it misses before a step with k drafts."""
        return misses_too_many(self.pool, 1 + k + max(1, chained_caches(self.model, len(self.pool.heads))))

    def _unread_rows(self, active: list[Sequence]) -> int:
        """Return the number of rows that the drafter must read before it drafts.

        Of each sequence, if the pool has the drafter's caches; else in sum, of each sequence at most its `reach`.
        """
        if self.pool.has_heads or self.drafter is None:
            return len(self.pool.missed)
        shared = len(self.unread) if self.pool.heads else 0
        rows = ((self.drafter.behind(s.cache) + shared, s.cache.reach) for s in active)
        return sum(int(min(n, reach or math.inf)) for n, reach in rows)

    def _regroup(
        self, rows: SequenceRows, run: Run | None, joining: Waiting, *, resuming: bool
    ) -> tuple[SequenceRows, Run]:
        """Assign slots and rows of the next pass; return its sequences by row, and one run of them in that order.

        rows, run: of the previous pass. joining: new sequences, with their runs. resuming: the heads of all sequences
        draft again and move into the pool.
        """
        pool, staying, new = self.pool, [s for s in rows if s and not s.finished], [s for s, _ in joining]
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

    def enter(self, plan: Plan, run: Run, base: int) -> tuple[Run, int, Drafter | None]:
        """Move the drafter into or out of the step; return the step's input, its position and its drafter or None.

        Rows of plain cycles are kept for the drafter until it drafts again or a run has several rows.
        """
        pool = self.pool
        pool.live = pool.has_heads and (run.size > 1 or (plan.k > 0 and self.drafters[plan.source].in_step))
        if not pool.live:
            if pool.has_heads:
                pool.missed.append((run.hidden, run.tokens))
            return run.given, base, None
        base -= len(pool.missed)
        return with_missed(pool, run).given, base, next(d for d in self.drafters.values() if d.in_step)

    def limits(self, new: Flight, k: int, *, replayed: bool = False) -> mx.array | None:
        """Return `new.limits`; a recorded step always has limits."""
        return new.limits(k, always=replayed)

    def built(self, new: Flight) -> None:
        """Mark the pool after a cycle that was just built."""
        new.after = self.pool.mark()

    def begin_drafts(self, last: Flight | None, new: Flight) -> None:
        """Release the mark before the drafts of `new` are evaluated, which writes the drafter's caches."""
        self.drafts_evaluated = True
        if last:
            last.after = new.before = None

    def release(self, last: Flight | None, new: Flight) -> None:
        """Release the marks before `new` is submitted, so that buffers are written in place."""
        self.marks = []
        if last:
            last.after = new.before = None

    def advance(self, last: Flight | None, new: Flight) -> None:
        """Keep the accepted rows of `last` for a paused drafter; move the sequences on to the cycle `new`."""
        moved = last is None or last.rows is not new.rows
        if last and self.pool.heads and not self.pool.has_heads:
            self._keep_rows(last)
        if last and (moved or len(self.unread) == SPILL):
            self._distribute_rows()
        for sequence in new.rows:
            if sequence:
                sequence.base = sequence.next_base
                pooled = sequence.cache.caches if self.pool.has_heads else sequence.cache.layers
                for c in pooled if moved and not sequence.finished else ():
                    c.parts = ()

    def _keep_rows(self, flight: Flight) -> None:
        """Keep the accepted rows of a cycle for paused heads; rows of plain cycles are not split by sequence yet."""
        active = [(row, s) for row, s in enumerate(flight.rows) if s and not s.finished]
        if flight.run.size > 1:
            self._distribute_rows()
            for row, s in active:
                push_read(s.cache, flight.run.hidden[row : row + 1, : s.next_base - s.base], s.history.tokens)
            return
        if not self.unread:
            self.readers = active
        self.unread.append(flight.run.hidden)

    def _distribute_rows(self) -> None:
        """Move the kept rows of plain cycles to the backlog of each sequence's cache."""
        if not self.unread:
            return
        rows, readers = mx.concatenate(self.unread, axis=1), self.readers
        self.unread, self.readers = [], []
        for row, sequence in readers:
            push_read(sequence.cache, rows[row : row + 1], sequence.history.tokens)
        mx.async_eval([sequence.cache.arrays for _, sequence in readers])

    def finish(self, flight: Flight, row: int, count: int) -> None:
        """Copy the cache of a sequence, which ends with `count` tokens of a cycle that was read, from the pool."""
        sequence = flight.rows[row]
        assert sequence
        self.copy_out(flight, row, count, sequence.cache)

    def leave(self, last: Flight | None) -> Waiting:
        """Copy unfinished sequences' caches from the pool after a read cycle; return each with its last row's Run."""
        if last is None:
            return []
        leaving = []
        for row, sequence in enumerate(last.rows):
            if sequence and not sequence.finished:
                n = sequence.next_base - sequence.base
                self.copy_out(last, row, n, sequence.cache)
                newest = last.run.hidden[row : row + 1, n - 1 : n]
                leaving.append((sequence, Run.of_row(newest, sequence.all_tokens[-1])))
        return leaving

    def recovered(self, error: Trouble, last: Flight | None, active: list[Sequence]) -> Waiting:
        """Return the sequences of the pool as `leave` does, or, if their arrays may be lost, all prefilled again."""
        if isinstance(error, KernelRefused) and not self.drafts_evaluated:
            for sequence, mark in self.marks:
                sequence.cache.restore(mark)
            return self.leave(last)
        return [(sequence, prefill_again(self.model, sequence, chunk=self.chunk)) for sequence in active]

    def copy_out(self, flight: Flight, row: int, count: int, cache: PromptCache) -> None:
        """Copy a sequence's state from the pool to `cache`, which is then at rest.

        The state is that after the first `count` rows of a cycle that was read; 0: before the cycle.
        """
        sequence = flight.rows[row]
        assert sequence
        assert flight.after
        self._distribute_rows()
        self.pool.copy_out(flight.after, cache, sequence.slot, row, base=sequence.base, rows=count)
        come_to_rest(self.model, cache, first_rows(sequence, count), flight.run.size)
        if count:
            cache.push(flight.run.hidden[row : row + 1, :count])
        cache.settle(sequence.all_tokens[: sequence.base + count])
        mx.eval(cache.arrays)

    def cache_of(self, last: Flight, sequence: Sequence) -> PromptCache:
        """Return a copy of a sequence's cache at rest, with the rows of its last cycle if that was read."""
        self._distribute_rows()
        cache, count = sequence.cache.copy(), sequence.next_base - sequence.base if last.was_read else 0
        self.copy_out(last, last.rows.index(sequence), count, cache)
        return cache


def prefill_again(model: Target, sequence: Sequence, *, chunk: int) -> Run:
    """Prefill all tokens but the last of a sequence whose cache was lost; return the run of the newest row."""
    sequence.cache.settle(sequence.all_tokens[:-1])
    row = read_again(model, sequence.cache, heads=sequence.k > 0, chunk=chunk)[:, -1:]
    return Run.of_row(row, sequence.all_tokens[-1])
