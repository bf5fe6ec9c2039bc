"""Decode one sequence on its own `PromptCache`, whose positions are host integers while it does not draft."""

from contextlib import suppress
from typing import Any

from ..cache.absorb import absorb
from ..cache.aside import end_aside, set_aside
from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..tuning.kernel_fallback import KernelRefused, Trouble, newly_refused
from ..tuning.plan import Plan
from .again import come_to_rest, first_rows, read_kept, why_read_again
from .agreement import Agreement
from .cycle_masks import mask_thread
from .drafters.drafter import Drafter
from .flight import Flight
from .memory_needs import RESERVED_TOKENS
from .policy import compiled_for, control_for, remember
from .prefill import read_again
from .run import Run
from .seating import DriverOptions, Seating, Waiting
from .sequence import Sequence

PROMPT = Plan()  # plan of the run that chose the token before the first cycle


class Alone(Seating):
    """The seating of one sequence: what a driver does with its own cache; `Pooled` has the same methods.

    control: plans each cycle and observes its outcome. compiled: replays recorded cycles; None to build every cycle.
    emitting, emitted: the cycle whose tokens are being yielded, and the number of these; read: of all its tokens.
    submitted: the cycle that was submitted last. stopping: rank 0 ends the generation.
    """

    defers = True  # a cycle that is built late begins after the tokens before it have been yielded

    def __init__(self, model: Target, sequence: Sequence, run: Run, drafters: dict[str, Drafter], how: DriverOptions):
        """run: of the row that chose the last token, which the cache lacks. how: the driver's options."""
        self.model, self.sequence, self.drafters = model, sequence, drafters
        self.chunk, self.p_min, self.stats, self.stopping = how.chunk, how.p_min, sequence.stats, False
        self.thread = mask_thread()
        if sequence.longest:
            self.cache.reserve(min(sequence.longest, self.cache.offset + RESERVED_TOKENS))
        self.compiled = compiled_for(model, self.cache, sequence.picker, how.compile_cycles)
        limits, adaptive = (sequence.k, sequence.max_lookup), how.adaptive
        options = {"p_min": self.p_min > 0, "tree": sequence.tree, "compiled": self.compiled}
        self.own = control_for(model, *limits, adaptive=adaptive, matcher=sequence.picker.matcher, **options)
        self.control = Agreement(model.ranks, self.own, drafters) if model.ranks else self.own
        if sequence.picker.matcher:
            sequence.picker.matcher.restart()
        first = Flight([sequence], PROMPT, self.control, self.cache.mark(), why_late="")
        first.run, first.base, first.after = run, sequence.base, first.before
        first.was_read = True
        self.emitting, self.emitted, self.read, self.submitted = first, 1, 1, first

    @property
    def cache(self) -> PromptCache:
        return self.sequence.cache

    @property
    def first(self) -> Flight:
        """The cycle, already read, after which the first one is built."""
        return self.submitted

    @property
    def pending_rows(self) -> int:
        """Number of rows that the model's drafter must read before it drafts again; 0 if it follows the target."""
        drafter = next((d for d in self.drafters.values() if d.in_step), None)
        return drafter.behind(self.cache) if drafter else 0

    def agree(self) -> None:
        """Run each kernel that the next graph launches for the first time; on ranks also receive rank 0's next plan.

        On ranks `stopping` is set, too. Raises as `Agreement.meet`, and KernelRefused, on every rank, if one refuses.
        """
        refused = newly_refused()
        if isinstance(self.control, Agreement):
            self.control.meet(self.sequence.history, self.pending_rows, refused)
            self.stopping = self.control.stopping
        elif refused:
            raise refused

    def why_late(self, last: Flight) -> str | None:
        """Return why the cycle after `last` cannot be built before `last` is read; None if it can."""
        if last.plan is PROMPT:  # the first token is yielded before the heads prefill the prompt
            return ""
        if self.sequence.picker.processors:
            return "logits processors"
        most, rows = self.sequence.most_drafts, last.run.size
        return why_read_again(self.cache, rows) or self.cache.needs_host(last.base + rows, 1 + most)

    def begin_late(self, last: Any) -> float:
        """Prepare for a cycle that is built after `last` was read; return the maximum number of its drafts."""
        if last.why_late:
            self.stats.built_late[last.why_late] += 1
        position = self.sequence.next_base
        self.reread = read_kept(self.model, self.cache, [first_rows(self.sequence)], last.run.size)
        self.cache.quantize_at(position)
        last.after.release()
        last.after = self.cache.mark()
        return self.cache.room(position) - 1

    def plan(self, active: list[Sequence]) -> tuple[Any, Plan, int]:
        """Return the control, its plan for the next cycle, and the length of the match for prompt lookup."""
        matched = self.sequence.history.matched() if self.sequence.max_lookup else 0
        return self.control, self.control.plan(matched, self.pending_rows), matched

    def arrange(self, last: Flight, new: Flight, joining: list[Any]) -> tuple[Run, int]:
        """Let a paused drafter that the plan resumes read its rows; return the previous run and its position."""
        cache, base, plan, tokens = self.cache, last.base, new.plan, self.sequence.history.tokens
        assert not joining
        end_aside(cache, base, self.drafters[plan.source].spare.get(plan.source, 0) if plan.k else 0)
        if not plan.k or cache.live or not (drafter := self.drafters[plan.source]).in_step:
            new.before = cache.mark() if absorb(cache, tokens) else last.after
        else:
            new.prefilled = drafter.behind(cache)
            drafter.read(self.model, cache, tokens, base - new.prefilled, base, step=self.chunk)
            new.before = cache.mark()
        return last.run, base

    def enter(self, plan: Plan, run: Run, base: int) -> tuple[Run, int, Drafter | None]:
        """Move the drafter into or out of the step; return the step's input, its position and its drafter or None."""
        drafter = self.drafters[plan.source] if plan.k else None
        reader = drafter if drafter and drafter.in_step else None
        if reader:
            self.cache.resume_heads(base)
            set_aside(self.cache, reader.spare.get(plan.source, 0), base)
        else:
            self.cache.pause_heads(base)
        return run.given, base, reader

    def place(self, plan: Plan, run: Run, base: int, *, replayed: bool) -> None:
        """Move the target's position to the device if the step needs it there, else to the host."""
        if plan.k or replayed:
            self.cache.to_device()
        elif run.size == 1:
            self.cache.to_host(base + 1)

    def begin_drafts(self, last: Flight, new: Flight) -> None:
        """Release marks before the drafts of `new` are evaluated, which writes the drafter's caches."""
        self.release(last, new)

    def end_drafts(self, new: Flight) -> None:
        """Keep the drafter's caches for `new.before` until the verify is submitted."""
        new.before.caches = self.cache.mark().caches

    def release(self, last: Flight, new: Flight) -> None:
        """Release the marks before `new` is submitted, so that buffers are written in place."""
        self.submitted, new.after = new, new.before
        last.after.release()
        new.before.release()

    def advance(self, last: Flight, new: Flight) -> None:
        """Keep the accepted rows of `last` for a drafter that has not read them; move on to the cycle `new`."""
        cache, sequence, kept = self.cache, self.sequence, self.sequence.next_base - last.base
        if cache.aside or not cache.live:
            cache.push(last.run.hidden if kept == last.run.size else last.run.hidden[:, :kept])
        new.base = sequence.base = sequence.next_base
        cache.advance(new.base)
        new.after = cache.mark()

    def was_read(self, flight: Flight, found: list[Any]) -> None:
        """Note that a cycle was read, whose tokens are yielded next."""
        if found:
            self.emitting, self.emitted, self.read = flight, 0, len(found[0].tokens)

    def leave(self, last: Any) -> Waiting:
        """Bring the cache to rest; return the sequence with its last token's run, unless it has finished."""
        self.emitted = self.read
        run = self.rest()
        return [] if self.sequence.finished else [(self.sequence, run)]

    def recovered(self, error: Trouble, last: Any, active: list[Sequence]) -> Waiting:
        """Return as `leave` does; `rest` prefills all tokens again if the arrays are lost."""
        return self.leave(last)

    def vote(self, error: Trouble) -> None:
        """Report a refused kernel of this rank to the others, which wait for it in `Agreement.meet`."""
        if isinstance(self.control, Agreement) and isinstance(error, KernelRefused) and not error.voted:
            with suppress(KernelRefused):
                self.control.meet(self.sequence.history, self.pending_rows, error)

    def abandon(self) -> None:
        """Note that an error ends the generation: `rest` must not prefill again."""
        self.submitted.failed = False

    def rest(self) -> Run:
        """Bring the cache to rest: it then contains every token but the last one yielded; return that token's run.

        After a stop token the emitting cycle N was submitted last; after a close N+1, as a rule. Costs are stored.

        1. Restore the arrays after the cycle submitted last. A cycle that was only built is dropped.
        2. Return the states and what the heads have read to `end`, the mark after N: N+1's `before`, or N's own
           `after` if N was submitted last. Keys and values of N+1 stay in the buffers, to be overwritten.
        3. Lower the positions to the last yielded token. If a failed graph has lost the arrays, prefill all again.
        """
        cache, emitting, submitted, sequence = self.cache, self.emitting, self.submitted, self.sequence
        if submitted.failed:
            submitted.after = submitted.before
        lost = submitted.failed and submitted.after.caches is None
        end = emitting.after if emitting is submitted else submitted.before
        cache.restore(submitted.after)
        end.release()  # its arrays are restored above or outdated, and would make the next write a copy
        cache.restore(end)
        if self.emitted:
            cache.push(emitting.run.hidden[:, : self.emitted])
            come_to_rest(self.model, cache, first_rows(sequence, self.emitted), emitting.run.size)
        else:  # no token of this cycle was yielded, so that its first row is rolled back too
            cache.restore_states(emitting.before)
        cache.settle(sequence.history.exact(emitting.base + self.emitted))
        if lost:
            read_again(self.model, cache, heads=sequence.k > 0, chunk=self.chunk)
        remember(self.model, self.own, self.compiled)
        n, token = max(self.emitted, 1), int(sequence.history.tokens[emitting.base + self.emitted])
        return Run.of_row(emitting.run.hidden[:, n - 1 : n], token)
