"""Plan a cycle, build or replay its step, submit it and read its tokens."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.mark import Mark
from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import TROUBLE, Fallback, KernelRefused, Trouble, newly_refused
from ..tuning.plan import Cycle, Fixed, Plan
from .agreement import Agreement
from .clock import Clock
from .drafters import drafters_of
from .drafters.drafter import Frame
from .history import TokenHistory
from .masks import mask_rows
from .members import Single
from .prefill import evaluated, first_run, prefill
from .replay import Compiled
from .run import NO_DRAFTS, Drafts, Run
from .sampling import Picker
from .stats import Stats
from .step import Passed, choose, forward, propose, read_rows, roll_back, step, verify

PROMPT = Plan()  # plan of the run that chooses the first token after a prompt


@dataclass
class Flight:
    """A cycle from its plan until its tokens are yielded. Each function sets the fields of its own phase.

    begin:   plan. matched: length of the sequence's repeated suffix. prefilled: rows that a paused drafter read for
             it. before: mark of the caches after the previous cycle. run: the step's result (with p_min `drafts`,
             from which `submit` builds it). replayed: whether it was recorded. built: the host's seconds for it.
             late: whether it was begun after the previous cycle was read. passed: with a grammar, instead of run,
             which `submit` completes when it has read the drafts.
    submit:  base: position of its first row. after: mark of the caches after it. failed: MLX could not evaluate it.
    read:    accepted: number of accepted drafts. seconds: None if not measured. late_reason: why the next cycle
             cannot be built before this one is read; None if it can.
    """

    plan: Plan
    before: Mark
    matched: int = 0
    prefilled: int = 0
    run: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS
    passed: Passed | None = None
    after: Mark = field(init=False)
    base: int = field(init=False)
    accepted: int = 0
    replayed: bool = False
    late_reason: str | None = None
    late: bool = False
    built: float = 0.0
    seconds: float | None = None
    failed: bool = False

    def __post_init__(self):
        self.after = self.before


@dataclass
class Decoder:
    """The state of one generation: model, caches, sampling, settings, and its current cycles.

    control: plans each cycle and observes its outcome. drafters: by their names in plans.
    chunk:   rows per prefill chunk, of prompts and of paused drafters.
    k, max_lookup: maximum number of drafts in a cycle, from the model's drafter and from prompt lookup.
    p_min:   minimum probability of a verified draft, in cycles whose plan has p_min.
    compiled: the recorded cycles; None to build every cycle. clock: measures the seconds of cycles.
    history: the tokens that the host has read.
    stopping: the current cycle is the last one.
    emitting, emitted: the cycle whose tokens are being yielded, and the number already yielded. submitted: the cycle
             submitted last.
    """

    model: Target
    cache: PromptCache
    picker: Picker
    control: Controller | Fixed | Agreement
    stats: Stats
    chunk: int
    k: int
    max_lookup: int = 0
    p_min: float = 0.0
    compiled: Compiled | None = None
    history: TokenHistory = field(default_factory=TokenHistory)
    stopping: bool = False
    emitting: Flight = field(init=False)
    submitted: Flight = field(init=False)
    emitted: int = 0

    def __post_init__(self):
        self.fallback, self.clock = Fallback(self.model), Clock()
        self.drafters = drafters_of(self.model, self.max_lookup)

    @property
    def pending_rows(self) -> int:
        """Number of rows that the model's drafter must read before it drafts again; 0 if it follows the target."""
        drafter = next((d for d in self.drafters.values() if d.in_step), None)
        return drafter.behind(self.cache) if drafter else 0


def prefill_prompt(d: Decoder, prompt: list[int], progress: Callable[[int, int], None] | None = None) -> Flight:
    """Prefill the prompt and submit the run that chooses the first token; return that run as the first `Flight`."""
    cache = d.cache
    cache.begin(cache.offset + len(prompt))
    hidden = prefill(d.model, cache, prompt, heads=d.k > 0, chunk=d.chunk, progress=progress)
    return submit_first(d, partial(first_run, d.model, cache, hidden, d.picker))


def submit_first(d: Decoder, choose: Callable[[], Run]) -> Flight:
    """Submit the run that chooses a generation's first token; return it as a `Flight`.

    The cache is at rest and contains every earlier token. choose: builds the run, of one row. It is called again,
    with the refused kernels switched off, if a kernel is refused or the graph fails.
    """
    cache = d.cache
    d.history = TokenHistory(cache.tokens)
    if d.picker.matcher:
        d.picker.matcher.restart()
    while True:
        try:
            run = choose()
            agree(d)
            start(d, run)
            break
        except TROUBLE as e:
            disable_kernels(d, e)
    cache.pop_row()
    first = Flight(PROMPT, cache.mark())
    first.run, first.base = run, cache.offset - 1
    d.emitting, d.emitted, d.submitted = first, 1, first
    return first


def can_build_ahead(d: Decoder, flight: Flight) -> bool:
    """Return whether the next cycle can be built before this one is read. If not, `flight.late_reason` states why."""
    if flight.plan is PROMPT:  # the first token is yielded before the heads prefill the prompt
        flight.late_reason = ""
    elif d.picker.processors:
        flight.late_reason = "logits processors"
    else:
        most = d.picker.matcher.most if d.picker.matcher else 0
        flight.late_reason = d.cache.needs_host(flight.base + flight.run.size, 1 + max(d.k, d.max_lookup, most))
    return flight.late_reason is None


def begin(d: Decoder, last: Flight, max_drafts: float = float("inf")) -> Flight:
    """Plan the cycle after `last`, with at most `max_drafts` drafts, and build or replay its step, unevaluated.

    With p_min only the drafts are built; `submit` builds the rest.
    """
    return _build(d, last, _plan(d, last, max_drafts))


def redraft(d: Decoder, last: Flight, new: Flight, max_drafts: float = float("inf")) -> Flight:
    """Return the cycle after `last`, which has been read: `new`, or one with drafts that the grammar forces."""
    matcher = d.picker.matcher
    if matcher is None or not (most := int(min(matcher.most, max_drafts))):
        return new
    matcher.follow(d.history.tokens)
    if not (forced := len(matcher.drafts(most))):
        return new
    control = d.control
    plan = control.redraft(new.plan, forced) if isinstance(control, Controller) else Plan("grammar", forced)
    if plan.source != "grammar":
        return new
    d.cache.restore(new.before)
    return _build(d, last, Flight(plan, new.before, prefilled=new.prefilled, late=True))


def _build(d: Decoder, last: Flight, new: Flight) -> Flight:
    """Build or replay the step of a planned cycle, unevaluated; return the cycle."""
    tic, cache = perf_counter(), d.cache
    frame, replay = prepare(d, last, new.plan, d.compiled)
    source = d.drafters[new.plan.source] if new.plan.k else None
    early = source is not None and not source.in_step  # this drafter drafts before the step
    drafts = source.propose(frame, last.run, new.plan.k) if source and early else NO_DRAFTS
    if new.plan.p_min:
        new.drafts = propose(frame, last.run, cache.unload(), drafts)
    else:
        masked = d.picker.matcher is not None
        build: Callable[..., Any] = replay or partial(forward if masked else step, frame)
        built, arrays = build(last.run.given, cache.unload(), drafts)
        setattr(new, "passed" if masked else "run", built)
        if replay:
            limit = last.base + last.run.size
            cache.load(arrays, limit + new.plan.k + 1, limit)
    new.replayed, new.built = replay is not None, perf_counter() - tic
    return new


def _frame(d: Decoder, last: Flight, new: Plan) -> Frame:
    drafter = d.drafters[new.source] if new.k else None
    if new.source == "grammar" and d.cache.live:  # it reads on, because the next cycles are often its own
        drafter = next(iter(d.drafters.values()))
    in_step = drafter if drafter and drafter.in_step else None
    return Frame(d.model, d.cache, new, in_step, (Single(d.picker, d.history, last.base),), last.base)


def _plan(d: Decoder, last: Flight, max_drafts: float) -> Flight:
    """Return the cycle after `last` with its plan; prefill a paused drafter that the plan resumes."""
    cache, base = d.cache, last.base
    matched = d.history.matched() if d.max_lookup else 0
    plan = d.control.plan(matched, d.pending_rows)
    if max_drafts < plan.k:
        plan = replace(plan, k=int(max_drafts)) if max_drafts else Plan()
    if not plan.k or cache.live or not (drafter := d.drafters[plan.source]).in_step:
        return Flight(plan, last.after, matched)
    rows = drafter.behind(cache)
    drafter.read(d.model, cache, d.history.tokens, base - rows, base, step=d.chunk)
    return Flight(plan, cache.mark(), matched, rows)


def prepare(d: Decoder, last: Flight, plan: Plan, compiled: Compiled | None) -> tuple[Frame, Callable | None]:
    """Move the caches' positions to the start of the step after `last`; return its frame, and its record or None."""
    cache, run, base, frame = d.cache, last.run, last.base, _frame(d, last, plan)
    if frame.drafter:
        cache.resume_heads(base)
    else:
        cache.pause_heads(base)
    replay = compiled.find(frame, run.size, d.stats) if compiled else None
    if plan.k or replay:
        cache.to_device()
    elif run.size == 1:
        cache.to_host(base + 1)
    return frame, replay


def read(d: Decoder, flight: Flight, ahead: Flight | None = None) -> list[int]:
    """Wait for a cycle; return its accepted drafts and the token after them. ahead: the next cycle, if built."""
    tic, stats, clock = perf_counter(), d.stats, d.clock
    ((tokens, flight.accepted),) = evaluated(flight.run.read)
    waited = perf_counter() - tic
    if flight.plan is PROMPT:
        stats.note_first_token()
        clock.restart()
    else:
        clock.hidden = clock.hidden or stats.crowded
        following = ahead.built if ahead else None
        flight.seconds = clock.arrived(waited, flight.built, following, late=flight.late)
        stats.count_cycle(flight.run.size - 1, flight.accepted, flight.plan.source)
        stats.add_time(clock.took, waited)
    stats.count_replays(flight.replayed)
    d.history.extend(tokens)
    return tokens


def submit(d: Decoder, last: Flight, new: Flight) -> None:
    """Start computing `new`, the cycle after `last`, which has been read; raises KernelRefused or GraphFailed."""
    if d.emitting is not last:
        d.emitting, d.emitted = last, 0
    if new.plan.p_min:
        frame, drafts = _frame(d, last, new.plan), _confident(d, last, new)
        if d.picker.matcher:
            new.passed = read_rows(frame, last.run, drafts)
        else:
            new.run = verify(frame, last.run, drafts)
    agree(d)
    d.submitted = new
    last.after.release()  # buffers are written in place only if nothing else refers to them
    new.before.release()
    if new.passed:
        new.run = _choose(d, _frame(d, last, new.plan), new.passed)
    start(d, new.run)
    if not d.cache.live:
        whole = last.accepted + 1 == last.run.size
        d.cache.push(last.run.hidden if whole else last.run.hidden[:, : last.accepted + 1])
    new.base = last.base + last.accepted + 1
    d.cache.advance(new.base)
    new.after = d.cache.mark()


def _choose(d: Decoder, frame: Frame, passed: Passed) -> Run:
    """Submit the target's pass; build the choice from its rows under the masks, which depend on the drafts.

    The host reads the drafts and makes the masks while the device computes the pass.
    """
    drafts, waited = submit_pass(passed)
    if waited is not None:
        d.stats.add_time(0.0, waited)
    masks = [mask_rows(d.picker.matcher, d.history.tokens, drafts[0])]
    if d.compiled:
        run = d.compiled.choose(frame, passed, None, masks, d.stats)
    else:
        run = choose(frame.model, frame.members, passed, masks=masks)
    roll_back(frame, run)
    return run


def submit_pass(passed: Passed) -> tuple[list[list[int]], float | None]:
    """Submit the target's pass; return each sequence's drafts, and the seconds waited for them, None without any.

    The host has the drafts before the pass ends.
    """
    if passed.drafts is None:
        evaluated(mx.async_eval, passed.hidden)
        return [[] for _ in range(passed.hidden.shape[0])], None
    evaluated(mx.async_eval, passed.drafts)
    evaluated(mx.async_eval, passed.hidden)
    tic = perf_counter()
    drafts = evaluated(np.array, passed.drafts).tolist()
    return drafts, perf_counter() - tic


def _confident(d: Decoder, last: Flight, new: Flight) -> Drafts:
    """Evaluate a cycle's drafts, which writes the drafter's caches; return those before the first improbable one."""
    if refused := newly_refused():
        raise refused
    d.submitted = new
    last.after.release()
    new.before.release()
    tic = perf_counter()
    count = evaluated(new.drafts.sure, d.p_min)
    d.stats.add_time(0.0, perf_counter() - tic)
    new.before.caches = d.cache.mark().caches  # kept until the verify is submitted
    return new.drafts.first(count)


def agree(d: Decoder) -> None:
    """Run kernels that the next graph launches first; raise KernelRefused, on every rank, if any rank refuses one."""
    refused = newly_refused()
    if isinstance(d.control, Agreement):
        d.control.meet(d.history, d.pending_rows, refused)
        d.stopping = d.control.stopping
    elif refused:
        raise refused


def start(d: Decoder, run: Run) -> None:
    """Submit a run's graph, with the cache arrays that the next graph reads, to the device."""
    if d.stats.phases:
        evaluated(d.stats.time_phases, run)
    evaluated(mx.async_eval, run.packed, run.logprobs, *d.cache.arrays)


def disable_kernels(d: Decoder, error: Trouble) -> None:
    """Switch off, on every rank, the kernels that caused an error; raise MLX's error if none can have caused it."""
    if isinstance(d.control, Agreement) and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            d.control.meet(d.history, d.pending_rows, error)
    d.fallback.take(error, len(d.history.tokens))


def observe(d: Decoder, flight: Flight) -> None:
    """Report a cycle's outcome to the control. Call it after the next submit, so that the device does not wait."""
    seconds = flight.seconds
    if d.compiled:
        seconds = d.compiled.observe(flight.plan, flight.run.size, flight.replayed, seconds)
    if flight.plan is not PROMPT:
        verified = flight.run.size - 1
        outcome = verified, flight.accepted, seconds, flight.prefilled, flight.matched
        d.control.observe(Cycle(flight.plan, *outcome, context=flight.base))
    if isinstance(d.control, (Controller, Agreement)):
        d.stats.note_pause(d.control.paused)
