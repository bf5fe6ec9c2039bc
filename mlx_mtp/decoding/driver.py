"""Decode sequences in cycles: draft, verify, accept, commit. Plain decoding is the same cycle with 0 drafts.

The host builds cycle N+1 on the unevaluated arrays of cycle N while the device computes N. It submits N+1 only after
it has read N's tokens, so that no pending work refers to the cache buffers and every write happens in place:

    host    build N+1 | read N (waits), submit N+1 | observe N, yield N's tokens, build N+2 | read N+1, submit N+2 ...
    device  N ─────────────────┤                   N+1 ──────────────────────────────────────────┤             N+2 ...

The read is the only wait of a cycle, except with p_min, where `submit` also reads the confidence of the drafts, and
with a grammar, where it reads the drafts while the device computes the target's pass, and writes the masks. The
accepted count stays on the device: shapes do not depend on it. The plan of N+1 is made before N is read. A cycle that
needs N's tokens, for logits processors or for states that are read again, is built after N is read.
"""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import TROUBLE, Fallback, GraphFailed, KernelRefused, Trouble
from ..tuning.plan import Fixed
from .agreement import Agreement
from .alone import Alone
from .build import plan_and_build, submit
from .clock import Clock
from .control import outcome
from .drafters import drafters_of
from .flight import Flight
from .policy import LOOKUP_DRAFTS, remember
from .pooled import Pooled
from .prefill import evaluated
from .redraft import with_forced
from .run import Run
from .seating import DriverOptions, Waiting
from .sequence import Sequence, Yielded
from .stats import Stats

CALM = 16  # cycles that the last sequence of a pool stays in it, because leaving copies its caches


class NewTokens(NamedTuple):
    """Tokens that a cycle added to a sequence, the first `accepted` of them drafts. row: the sequence's in `run`."""

    sequence: Sequence
    tokens: list[int]
    accepted: int
    run: Run
    row: int

    def yielded(self) -> Iterator[Yielded]:
        """Yield each token with its logprobs."""
        for i, token in enumerate(self.tokens):
            yield token, self.run.logprobs_of(i, self.row), i < self.accepted


class Driver:
    """The active sequences of one cache layout; one decodes on its own cache, several in a pool.

    A new sequence joins with the next cycle that is built. A finished sequence is still in the cycle that was built
    ahead, whose rows of it are not used. The last sequence of a pool leaves it after CALM cycles as the only one.
    controls: `Controls.control`, for a pool. stats: counts new records of a pool. seating: the step cache with its
    sequences; None before the first cycle and between two caches. last: the newest cycle: submitted, or read if the
    next one is built late. pending: sequences that join with the next cycle. clock: `hidden` must be set after other
    work. calm: number of a pool's last cycles with one sequence. trouble: an error, after which a cycle begins again.
    """

    def __init__(
        self,
        model: Target,
        options: DriverOptions,
        controls: Callable[..., Any] | None = None,
        stats: Stats | None = None,
    ):
        self.model, self.how, self.controls, self.stats = model, options, controls, stats or Stats()
        self.drafters, self.fallback = drafters_of(model, LOOKUP_DRAFTS), Fallback(model)
        self.clock, self.calm = Clock(), 0
        self.seating: Alone | Pooled | None = None
        self.last: Flight | None = None
        self.pending: Waiting = []
        self.joining: Waiting = []
        self.trouble: Trouble | None = None

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are not finished: those of the last cycle and those that join with the next one."""
        return self._unfinished(self.pending)

    @property
    def lone(self) -> Sequence | None:
        """The sequence that is decoded alone, also when it has finished; None without one."""
        return self.seating.sequence if isinstance(self.seating, Alone) else None

    @property
    def pool_nbytes(self) -> int:
        return self.seating.pool.nbytes if isinstance(self.seating, Pooled) else 0

    def _unfinished(self, joining: Waiting) -> list[Sequence]:
        seated = self.last or (self.seating.first if self.seating else None)
        return [*(seated.active if seated else ()), *(s for s, _ in joining if not s.finished)]

    def join(self, sequence: Sequence, run: Run) -> None:
        """Add a sequence to the next cycle that is built; `run`, of one row, chose its last token.

        Its cache must be at rest.
        """
        sequence.cache.pop_row()
        sequence.base, sequence.next_base = sequence.cache.offset - 1, sequence.cache.offset
        self.pending.append((sequence, run))
        self.calm = 0

    def open(self, *, pool: bool = False) -> None:
        """Create the seating of the pending sequences: a pool for several, or if `pool`. They join it in a cycle."""
        if pool or len(self.pending) > 1:
            assert self.controls
            own = self.pending[0][0].cache, self.drafters, self.controls, self.stats, self.how
            self.seating = Pooled(self.model, *own)
            self.clock.hidden = True
            return
        ((sequence, run),), self.pending = self.pending, []
        self.seating = Alone(self.model, sequence, run, self.drafters, self.how)
        self.clock.restart()
        if self.model.ranks:
            self.seating.agree()

    @property
    def stopping(self) -> bool:
        """Whether rank 0 has ended the generation: the last cycle was read."""
        last = self.last or (self.seating.first if self.seating else None)
        return self.seating is not None and self.seating.stopping and last is not None and last.was_read

    def emit(self, count: int) -> None:
        """Note that `count` tokens of a lone sequence's last cycle have been yielded, with the one being yielded."""
        assert isinstance(self.seating, Alone)
        self.seating.emitted = count

    def cycle(self) -> list[NewTokens]:
        """Complete the submitted cycle, submit the next one, and return the tokens of the completed cycle.

        The first call submits a cycle before that. After a refused kernel or a failed graph all begins again from the
        last tokens returned; [] if the completed cycle was lost. Raises what `Fallback.take` raises.
        """
        self.clock.resume()
        found: list[NewTokens] = []
        try:
            if self.trouble:
                self._rebuild(self.trouble)
            if self.pending and isinstance(self.seating, Alone):
                found = self._finish()
                found += self._advance(pool=True)
            else:
                found = self._finish() if self.calm >= CALM else self._advance()
        except TROUBLE as e:
            self._take(e)
        if isinstance(self.seating, Alone):
            self.seating.emitted = self.seating.read
        self.calm = self.calm + 1 if isinstance(self.seating, Pooled) and len(self.sequences) == 1 else 0
        self.clock.leave()
        return found

    def _advance(self, *, pool: bool = False) -> list[NewTokens]:
        """Build the next cycle, read the submitted one and submit the next, unless no sequence is left."""
        if self.seating is None:
            self.open(pool=pool)
        assert self.seating
        seating, last = self.seating, self.last or self.seating.first
        if last is None or last.was_read:
            last = self._begin(last)
        if last is None:
            self._end()
            return []
        ahead, refused = None, None
        try:
            ahead = self._build(last) if self._can_build_ahead(last) else None
        except KernelRefused as e:
            refused = e
        found = self._read(last, ahead)
        try:
            if refused:
                raise refused
            if ahead is None and not seating.defers and last.active:
                self._begin(last)
            elif ahead:
                self._submit(last, with_forced(seating, last, ahead))
        except TROUBLE as e:
            self._take(e)
        self._observe(seating, last)
        if isinstance(self.seating, Pooled) and not (self.last and self.last.active):
            self._end()
        return found

    def _can_build_ahead(self, last: Flight) -> bool:
        """Return whether the next cycle can be built before `last` is read, and set `why_late`: None if it can."""
        assert self.seating
        last.why_late = self.seating.why_late(last)
        if last.why_late is None and any(s.picker.processors for s, _ in self.pending):
            last.why_late = "logits processors"
        return last.why_late is None and not self.seating.stopping and bool(last.active or self.pending)

    def _build(self, last: Flight | None, most: float | None = None) -> Flight:
        """Build the cycle after `last`, with the pending sequences; most: as of `plan_and_build`."""
        assert self.seating
        self.joining, self.pending = self.pending, []
        return plan_and_build(self.seating, last, self.joining, most)

    def _begin(self, last: Flight | None) -> Flight | None:
        """Build and submit the cycle after `last`, which was read; return it, None if no sequence is left."""
        assert self.seating
        most = self.seating.begin_late(last)
        self.clock.hidden = self.clock.hidden or self.seating.reread
        new = self._build(last, most)
        return self._submit(last, with_forced(self.seating, last, new, most) if last else new)

    def _submit(self, last: Flight | None, new: Flight) -> Flight | None:
        """Submit a cycle and return it; None, without submitting it, if all its sequences have failed."""
        assert self.seating
        if not new.active:
            return None
        submit(self.seating, last, new)
        self.last, self.joining = new, []
        return new

    def _read(self, flight: Flight, ahead: Flight | None) -> list[NewTokens]:
        """Wait for a cycle and return its tokens. ahead: the next cycle, if it is built, for the measured seconds."""
        assert self.seating
        tic, active = perf_counter(), flight.active
        values = evaluated(flight.run.read)
        waited = perf_counter() - tic
        self.clock.hidden = self.clock.hidden or any(s.stats.crowded for s in active)
        flight.seconds = self.clock.arrived(waited, flight.built, ahead.built if ahead else None, late=flight.late)
        flight.context = max(s.base for s in flight.rows if s)
        found, verified = [], flight.run.verified
        for row, sequence in enumerate(flight.rows):
            if sequence is None or sequence.finished:
                continue
            tokens, accepted, nodes = values[row]
            flight.kept.append(counts := flight.counts(row, accepted, verified))
            if nodes and counts.most:
                flight.nodes.append(nodes)
            count, stats = sequence.append(tokens), sequence.stats
            stats.count_cycle(
                counts.most, accepted, flight.plan.source, counts.forced, flight.drafter, tree=flight.plan.tree
            )
            stats.add_time(self.clock.took, waited)
            stats.count_replays(flight.replayed)
            sequence.next_base = sequence.base + accepted + 1
            if sequence.finished:
                self.seating.finish(flight, row, count)
            found.append(NewTokens(sequence, tokens[:count], accepted, flight.run, row))
        flight.was_read = True
        self.seating.was_read(flight, found)
        return found

    def _observe(self, seating: Alone | Pooled, flight: Flight) -> None:
        """Report a cycle's outcome to the control and replay trial, after the next submit: the device is busy."""
        seconds, compiled = flight.seconds, seating.compiled
        if compiled:
            like = len(flight.rows), flight.run.size
            seconds = compiled.observe(flight.plan, like, flight.replayed, seconds)
            if compiled.recorder.verdict is None and compiled.decided():
                remember(self.model, Fixed(0), compiled)
        if flight.kept:
            flight.control.observe(outcome(flight, seconds))
        if isinstance(flight.control, (Controller, Agreement)):
            for sequence in flight.rows:
                if sequence and (sequence.k or sequence.max_lookup or sequence.most_forced):
                    sequence.stats.note_pause(flight.control.paused, flight.control.trees_paused)

    def _take(self, error: Trouble) -> None:
        """Begin again after an error: in a pool at once, alone once the tokens that were read have been yielded."""
        assert self.seating
        if isinstance(self.seating, Pooled):
            return self._rebuild(error)
        self.seating.submitted.failed, self.trouble = isinstance(error, GraphFailed), error

    def _rebuild(self, error: Trouble) -> None:
        """After an error, end the seating; its sequences join again, each after its last returned token.

        `Fallback.take` switches kernels off, or raises the error.
        """
        seating, self.trouble, active = self.seating, None, self._unfinished(self.joining)
        assert seating
        seating.vote(error)
        try:
            self.fallback.take(error, sum(len(s.history.tokens) for s in active))
        except Exception:
            seating.abandon()
            raise
        leaving = seating.recovered(error, self.last, active)
        if isinstance(error, KernelRefused) and not seating.drafts_evaluated:
            self.pending = [*self.joining, *self.pending]
        self._unseat(leaving)

    def _finish(self) -> list[NewTokens]:
        """Complete the submitted cycle and end the seating; return its tokens. Unfinished sequences join again."""
        assert self.seating
        found, last = [], self.last
        if last and not last.was_read:
            found = self._read(last, None)
            self._observe(self.seating, last)
        self._unseat(self.seating.leave(last))
        return found

    def _unseat(self, leaving: Waiting) -> None:
        if self.seating:
            self.seating.thread.shutdown()
        self.seating, self.last, self.joining = None, None, []
        for sequence, run in leaving:
            self.join(sequence, run)

    def cache_of(self, sequence: Sequence) -> PromptCache:
        """Return a copy of a sequence's cache, at rest: it contains every token but the last one returned."""
        if isinstance(self.seating, Alone):
            self._unseat(self.seating.leave(self.last))
        for run in (run for each, run in self.pending if each is sequence):
            cache = sequence.cache.copy()
            cache.push(run.hidden)
            return cache
        assert isinstance(self.seating, Pooled)
        assert self.last
        return self.seating.cache_of(self.last, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Cancel a sequence: no more of its tokens are returned; its rows leave with the next cycle."""
        self.pending = [pair for pair in self.pending if pair[0] is not sequence]
        sequence.finished = True
        if not self.sequences:
            self.close()

    def close(self) -> None:
        """Cancel all sequences; the caches of a lone one and of those that have not joined yet are at rest."""
        self._end()
        waiting, self.pending = self.pending, []
        for sequence, run in waiting:
            sequence.cache.push(run.hidden)

    def _end(self) -> None:
        if isinstance(self.seating, Alone):
            self.seating.rest()
        self._unseat([])
