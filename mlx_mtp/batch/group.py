"""Decode the texts of one layout together, cycle by cycle: build the next while one runs, read, show, let go.

As `decoding.loop`, for whoever is there: who joins does so with the next cycle that is built, and who is over is in
one more cycle at most, whose rows nobody looks at.
"""

import math
import time
from collections.abc import Callable

import mlx.core as mx

from ..cache.drafting import is_chained
from ..cache.mark import Mark
from ..cache.pool import Pool
from ..cache.prompt_cache import SPILL, PromptCache
from ..cache.ring import MAX_ROWS
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
from ..tuning.plan import Fixed
from .control import Control, outcome
from .pool_cycle import PoolCycle, Rows, Steps
from .rows import merged, row_of, slots_for
from .sequence import Response, Sequence, read_text_again

MOST_MISSED = 8  # rows that idle heads in a pool may miss: their rings take MAX_ROWS at once


class Group:
    """The texts whose caches have one layout, and their pool.

    controls: `Controls.control`. chunk: rows that the drafter reads at a time when it catches up.
    stats: counts what was recorded. p_min, compile_cycles: as `generate_step` has them.
    drafter: of the model. drafters: who may draft, by the name in plans.
    alone: number of cycles with a single sequence. clock: times cycles; other work in between must be reported to it.
    joining, marks: of the cycle that is being built, who joins with it, and caches before the drafter reads for it.
    written: its drafts were evaluated. compiled: replays cycles that were recorded; None: all are built.
    """

    def __init__(
        self,
        model: Target,
        controls: Callable[[int, int, int], Control],
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
        self.clock, self.alone, self.written = Clock(), 0, False
        self.clock.hidden = True
        self.pool: Pool | None = None
        self.last: PoolCycle | None = None
        self.unread: list[mx.array] = []
        self.readers: list[tuple[int, Sequence]] = []
        self.waiting: list[tuple[Sequence, Run]] = []
        self.joining: list[tuple[Sequence, Run]] = []
        self.marks: list[tuple[Sequence, Mark]] = []
        self.fallback = Fallback(model)

    @property
    def texts(self) -> list[Sequence]:
        """Those that decode or are about to."""
        rows = self.last.rows if self.last else []
        return [s for s in (*rows, *(s for s, _ in self.waiting)) if s and not s.over]

    def join(self, text: Sequence, run: Run) -> None:
        """Let a text, whose cache is at rest, in with the next cycle; `run` has chosen its last token."""
        text.cache.pop_row()
        text.base, text.follows = text.cache.offset - 1, text.cache.offset
        self.waiting.append((text, run))
        self.alone = 0

    def cycle(self) -> list[Response]:
        """Finish a cycle; return what it says, and leave the next one under way."""
        self.clock.resume()
        shown: list[Response] = []
        try:
            self.last = last = self.last or self._submitted(None, self._built(None, late=True))
            ahead, refused = self._ahead(last)
            shown = self._shown(last, ahead)
            if refused:
                raise refused
            if ahead is None and any(s and not s.over for s in last.rows):
                ahead = self._built(last, late=True)
            if ahead is not None and any(s and not s.over for s in ahead.rows):
                self.last = self._submitted(last, ahead)
            else:
                self._close()
        except TROUBLE as e:
            self._begin_again(e)
        self.alone = self.alone + 1 if self.last and len(self.texts) == 1 else 0
        self.clock.leave()
        return shown

    def _ahead(self, last: PoolCycle) -> tuple[PoolCycle | None, KernelRefused | None]:
        """Build the cycle after `last` while the device is busy with that; None where it cannot be, or why not."""
        try:
            return self._built(last, late=False) if self._builds_ahead(last) else None, None
        except KernelRefused as e:
            return None, e

    def _begin_again(self, error: Trouble) -> None:
        """Let all join a new pool, without the kernels to blame for an error; each has what was shown of it."""
        last, joining, marks = self.last, self.joining, self.marks
        there = [s for s in (*(last.rows if last else ()), *(s for s, _ in joining)) if s and not s.over]
        self.fallback.take(error, sum(len(s.all_tokens) for s in there))
        left: list[tuple[Sequence, Run]] = []
        if isinstance(error, KernelRefused) and not self.written:
            for text, mark in marks:
                text.cache.restore(mark)
            self.waiting = [*joining, *self.waiting]
            left = self._left(last) if last else []
        else:
            left = [(s, read_text_again(self.model, s, step=self.chunk)) for s in there]
        self._close()
        for text, run in left:
            self.join(text, run)

    def finish(self) -> tuple[list[Response], list[tuple[Sequence, Run]]]:
        """Finish the last cycle; return what it says, and who goes on elsewhere, each with a cache at rest."""
        assert self.last
        assert not self.waiting
        self.clock.resume()
        try:
            shown = self._shown(self.last, None)
        except GraphFailed as e:
            self._begin_again(e)
            return [], []
        left = self._left(self.last)
        self._close()
        return shown, left

    def _left(self, cycle: PoolCycle) -> list[tuple[Sequence, Run]]:
        """Bring home all that go on behind a cycle that was read; return each with the row of its last token."""
        left = []
        for row, text in enumerate(cycle.rows):
            if text and not text.over:
                n = text.follows - text.base
                self._bring_home(cycle, row, n, text.cache)
                left.append((text, row_of(cycle.run, row, n - 1, text.all_tokens[-1])))
        return left

    def cache_of(self, text: Sequence) -> PromptCache:
        """Copy the cache of a text as it stands: all its tokens but the last that was told."""
        self._hand_out()
        cache = text.cache.copy()
        for run in (run for each, run in self.waiting if each is text):
            cache.push(run.hidden)
            return cache
        assert self.last
        self._bring_home(self.last, self.last.rows.index(text), 0, cache)
        return cache

    def take_out(self, text: Sequence) -> None:
        """Let a text go before its end."""
        self.waiting = [pair for pair in self.waiting if pair[0] is not text]
        text.over = True
        if not self.texts:
            self._close()

    def _close(self) -> None:
        self.pool = self.last = None
        self.unread, self.readers = [], []
        self.joining, self.marks = [], []

    def _builds_ahead(self, last: PoolCycle) -> bool:
        """Tell whether somebody is there, and the next cycle can be built before this one's tokens are known."""
        there = [s for s in (*last.rows, *(s for s, _ in self.waiting)) if s]
        return not (all(s.over for s in there) or any(s.picker.processors for s in there))

    def _built(self, last: PoolCycle | None, *, late: bool) -> PoolCycle:
        """Build the graph of the next cycle of all that are there."""
        tic = time.perf_counter()
        rows, run = (last.rows, last.run) if last else ([], None)
        joining, self.waiting = self.waiting, []
        self.joining, self.written = joining, False
        there = [s for s in (*rows, *(s for s, _ in joining)) if s and not s.over]
        control = self.controls(len(there), max(s.k for s in there), max(s.max_lookup for s in there))
        pool = self.pool or self._opened(there[0].cache)
        matched, behind = _matched(there), self._behind(pool, there)
        plan = control.plan(matched=matched, behind=behind)
        in_step = plan.k > 0 and self.drafters[plan.source].in_step
        moves = bool(joining) or len(there) < sum(s is not None for s in rows)
        if pool.missed and (moves or self._misses_many(pool, 0 if in_step else plan.k)):
            pool.retire_heads([(row, s.slot, s.base, s.cache) for row, s in enumerate(rows) if s and not s.over])
        waking = in_step and not pool.has_heads
        if run is None or moves or waking:
            rows, run = self._regrouped(pool, rows, run, joining, waking=waking)
        new = PoolCycle(rows, control, plan, matched, behind if in_step else 0, late)
        self.steps.build(new, run, max(s.base for s in there))
        new.built = time.perf_counter() - tic
        return new

    def _misses_many(self, pool: Pool, k: int) -> bool:
        """Return whether the drafter has more unread rows than it can read in one step with k + 1 more."""
        depths = len(pool.heads) if is_chained(self.model) else 1
        return len(pool.missed) >= MOST_MISSED or len(pool.missed) + 1 + k + depths > MAX_ROWS

    def _behind(self, pool: Pool, there: list[Sequence]) -> int:
        """Count the rows that the drafter has to read before it drafts, of all texts."""
        if pool.has_heads or self.drafter is None:
            return len(pool.missed)
        waiting = len(self.unread) if pool.heads else 0
        every = (self.drafter.behind(s.cache) + waiting for s in there)
        return sum(int(min(behind, s.cache.reach or math.inf)) for behind, s in zip(every, there, strict=True))

    def _opened(self, like: PromptCache) -> Pool:
        """Make the pool, and what replays its cycles."""
        self.pool = Pool(like)
        self.compiled = compiled_for(self.model, like, Picker(), self.compile_cycles)
        own = self.p_min, self.compiled, self.stats
        self.steps = Steps(self.model, self.pool, self.drafters, *own)
        return self.pool

    def _regrouped(
        self, pool: Pool, rows: Rows, run: Run | None, joining: list[tuple[Sequence, Run]], *, waking: bool
    ) -> tuple[Rows, Run]:
        """Change who is in the next pass; return whose its rows are, and the run before it in their order.

        waking: the heads of all are to draft, after a time in which they were not in the pool.
        """
        staying, new = [s for s in rows if s and not s.over], [s for s, _ in joining]
        taken = {s.slot for s in staying}
        free = (slot for slot in range(len(taken) + len(new)) if slot not in taken)
        for text in new:
            text.slot = next(free)
        texts = {s.slot: s for s in (*staying, *new)}
        used = range(slots_for(max(texts) + 1)) if self.compiled else list(texts)
        span = Span(used, max(pool.slots, max(used) + 1))
        places = {id(s): row for row, s in enumerate((*rows, *new))}
        found = [texts.get(slot) for slot in span.slots]
        anyone = next(iter(texts.values()))
        order = [places[id(s or anyone)] for s in found]
        if waking:
            self._hand_out()
        self.marks = [(text, text.cache.mark()) for text in ((*staying, *new) if waking else new)]
        for text in (*staying, *new) if waking else new if pool.has_heads else ():
            self._prime(text)
        pool.regroup(span, order, [(s.slot, s.cache) for s in new])
        if waking:
            pool.wake([(s.slot, s.cache) for s in texts.values()])
        for text, first in joining if not pool.has_heads else ():
            text.cache.push(first.hidden)
        return found, merged(run, [each for _, each in joining], mx.array(order))

    def _prime(self, text: Sequence) -> None:
        """Let the drafter read all but a newcomer's newest position."""
        cache, base = text.cache, text.base
        assert self.drafter
        first = base - self.drafter.behind(cache)
        self.drafter.read(self.model, cache, text.text.tokens, first, base, step=self.chunk)
        cache.backlog = []

    def _submitted(self, last: PoolCycle | None, new: PoolCycle) -> PoolCycle:
        """Start computing a cycle: keys and values are written in place, and nothing else may refer to them."""
        assert self.pool is not None
        run_first(self.model)
        self.marks = []
        if new.plan.p_min:
            self.written = True
            if last:
                last.after = None
            self.steps.verify_sure(new)
            run_first(self.model)
        moved = last is None or last.rows is not new.rows
        if last:
            last.after = None
            if self.pool.heads and not self.pool.has_heads:
                self._keep_unread(last)
            if moved or len(self.unread) == SPILL:
                self._hand_out()
        for text in new.rows:
            if text:
                text.base = text.follows
                own = text.cache.caches if self.pool.has_heads else text.cache.layers
                for c in own if moved and not text.over else ():
                    c.parts = ()
        evaluated(mx.async_eval, new.run.packed, new.run.logprobs, self.pool.arrays)
        self.joining = []
        return new

    def _keep_unread(self, cycle: PoolCycle) -> None:
        """Keep the rows of a cycle; of plain ones those of all texts in one array, as each on its own takes time."""
        if cycle.run.size > 1:
            self._hand_out()
            for row, text in enumerate(cycle.rows):
                if text and not text.over:
                    text.cache.push(cycle.run.hidden[row : row + 1, : text.follows - text.base])
            return
        if not self.unread:
            self.readers = [(row, text) for row, text in enumerate(cycle.rows) if text and not text.over]
        self.unread.append(cycle.run.hidden)

    def _hand_out(self) -> None:
        """Give each text what its idle heads have to read."""
        if not self.unread:
            return
        rows, readers = mx.concatenate(self.unread, axis=1), self.readers
        self.unread, self.readers = [], []
        for row, text in readers:
            text.cache.push(rows[row : row + 1])
        mx.async_eval([text.cache.backlog for _, text in readers])

    def _shown(self, cycle: PoolCycle, ahead: PoolCycle | None) -> list[Response]:
        """Wait for a cycle; return what it says, with the caches of those that are over."""
        tic = time.perf_counter()
        values = evaluated(cycle.run.read)
        waited = time.perf_counter() - tic
        seconds = self.clock.arrived(waited, cycle.built, ahead.built if ahead else None, late=cycle.late)
        shown: list[Response] = []
        kept: list[tuple[int, int]] = []
        verified, source, logprobs = cycle.run.size - 1, cycle.plan.source, cycle.run.logprobs
        for row, text in enumerate(cycle.rows):
            if text is None or text.over:
                continue
            tokens, accepted = values[row]
            kept.append((accepted, min(text.most(source), verified)))
            new = text.show(tokens, accepted, logprobs[row] if logprobs else None)
            text.stats.counts(kept[-1][1], accepted, source)
            text.stats.generation_tokens += len(new)
            text.stats.spends(self.clock.took, waited)
            text.stats.replays(cycle.replayed)
            if text.k and isinstance(cycle.control, Controller):
                text.stats.pauses(cycle.control.paused)
            text.follows = text.base + accepted + 1
            if text.over:
                self._bring_home(cycle, row, len(new), text.cache)
            shown += text.hand_over(new)
        if self.compiled:
            seconds = self._replay_learns(self.compiled, cycle, seconds)
        if kept:
            cycle.control.observe(outcome(cycle.plan, verified, kept, seconds, cycle.caught_up, cycle.matched))
        return shown

    def _replay_learns(self, compiled: Compiled, cycle: PoolCycle, seconds: float | None) -> float | None:
        """Tell a trial of replays what a cycle took; return None where these seconds tell nothing."""
        like = len(cycle.rows), cycle.run.size
        seconds = compiled.observe(cycle.plan, like, cycle.replayed, seconds)
        if compiled.recorder.verdict is None and compiled.found():
            remember(self.model, Fixed(0), compiled)
        return seconds

    def _bring_home(self, cycle: PoolCycle, row: int, shown: int, cache: PromptCache) -> None:
        """Copy a text's state behind so many of a cycle's rows from the pool to a cache of its own, at rest."""
        text, mark = cycle.rows[row], cycle.after
        assert text
        assert self.pool
        assert mark
        self._hand_out()
        self.pool.copy_out(mark, cache, text.slot, row, base=text.base, rows=shown)
        if shown:
            cache.push(cycle.run.hidden[row : row + 1, :shown])
        cache.settle(text.all_tokens[: text.base + shown])
        mx.eval(cache.arrays)


def _matched(texts: list[Sequence]) -> int:
    """Count the last tokens that have occurred before, of the text that has most of them, if it may look them up."""
    return max((s.text.matched() for s in texts if s.max_lookup), default=0)


def layout_of(cache: PromptCache) -> str:
    """Name what texts must have alike to share a pool."""
    configs = [{name: value for name, value in c.config.items() if name != "start"} for c in cache.caches]
    return f"{len(cache.layers)} {configs} {cache.quantizing}"
