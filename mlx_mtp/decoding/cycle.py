"""Plan a cycle, build or replay its step, submit it and read its tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx

from ..cache.absorb import absorb
from ..cache.aside import end_aside, set_aside
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import TROUBLE
from ..tuning.plan import Accepted, Cycle, Plan, by_depth
from .agreement import Agreement
from .consent import agree, disable_kernels
from .cycle_masks import CycleMasks
from .decoder import PROMPT, Decoder, Flight
from .drafters.drafter import Frame
from .guided import choose_early, confident_drafts, forced_plan, submit_guided
from .history import TokenHistory
from .members import Single
from .prefill import evaluated, first_run, prefill
from .replay import Compiled
from .run import NO_DRAFTS, Run
from .step import forward, propose, read_rows, step, verify


def prefill_prompt(d: Decoder, prompt: list[int], progress: Callable[[int, int], None] | None = None) -> Flight:
    """Prefill the prompt and submit the run that chooses the first token; return that run as the first `Flight`."""
    cache = d.cache
    cache.begin(cache.offset + len(prompt))
    hidden = prefill(d.model, cache, prompt, heads=d.k > 0, chunk=d.chunk, progress=progress)
    return submit_first(d, partial(first_run, d.model, cache, hidden, d.picker))


def submit_first(d: Decoder, choose: Callable[[], Run]) -> Flight:
    """Submit the run that chooses a generation's first token; return it as a `Flight`.

    The cache is at rest and contains every earlier token. choose: builds the run, of one row; it is called again
    after `disable_kernels` if a kernel is refused or the graph fails. Raises as `choose` and `disable_kernels`.
    """
    cache = d.cache
    d.history = TokenHistory(cache.ids, cache.tokens)
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
    """Return whether the next cycle can be built before this one is read, and set `late_reason`: None if it can."""
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

    With p_min only the drafts are built, with a grammar and a caller's code only the pass; `submit` builds the rest.
    """
    return _built(d, last, _plan(d, last, max_drafts))


def redraft(d: Decoder, last: Flight, new: Flight, max_drafts: float = float("inf")) -> Flight:
    """Return the cycle after `last`, which has been read: `new`, or one with the grammar's drafts (`forced_plan`)."""
    if (plan := forced_plan(d, new.plan, max_drafts)) is None:
        return new
    d.cache.restore(new.before)
    return _built(d, last, Flight(plan, new.before, prefilled=new.prefilled, late=True))


def _built(d: Decoder, last: Flight, new: Flight) -> Flight:
    """Build or replay the step of a planned cycle, unevaluated; return the cycle."""
    tic, cache = perf_counter(), d.cache
    source = d.drafters[new.plan.source] if new.plan.k else None
    in_step, masked = source is not None and source.in_step, d.picker.matcher is not None
    if masked:
        new.masks = CycleMasks((Single(d.picker, d.history),), new.plan.k, drafted=in_step)
    allowed = new.masks.allowed if new.masks else None
    frame, given, replay = prepare(d, last, new.plan, d.compiled, allowed)
    drafts = NO_DRAFTS if source is None or in_step else source.propose(frame, last.run, new.plan.k)
    if new.plan.p_min:
        new.drafts = propose(frame, last.run, cache.unload(), drafts)
    else:
        build: Any = replay or partial(forward if masked else step, frame)
        built, arrays = build(given, cache.unload(), drafts)
        if replay:
            limit = last.base + last.run.size
            cache.load(arrays, limit + new.plan.k + 1, limit)
        if new.masks:
            choose_early(d, frame, new, built)
        else:
            new.run = built
    new.replayed, new.built = replay is not None, perf_counter() - tic
    return new


def _frame(d: Decoder, last: Flight, new: Plan) -> Frame:
    drafter = d.drafters[new.source] if new.k else None
    in_step = drafter if drafter and drafter.in_step else None
    return Frame(d.model, d.cache, new, in_step, (Single(d.picker, d.history, last.base),), last.base)


def _plan(d: Decoder, last: Flight, max_drafts: float) -> Flight:
    """Return the cycle after `last` with its plan; prefill a paused drafter that the plan resumes."""
    cache, base = d.cache, last.base
    matched = d.history.matched() if d.max_lookup else 0
    plan = d.control.plan(matched, d.pending_rows)
    if max_drafts < plan.k:
        plan = replace(plan, k=int(max_drafts)) if max_drafts else Plan()
    end_aside(cache, base, d.drafters[plan.source].spare.get(plan.source, 0) if plan.k else 0)
    if not plan.k or cache.live or not (drafter := d.drafters[plan.source]).in_step:
        return Flight(plan, cache.mark() if absorb(cache, d.history.tokens) else last.after, matched)
    rows = drafter.behind(cache)
    drafter.read(d.model, cache, d.history.tokens, base - rows, base, step=d.chunk)
    return Flight(plan, cache.mark(), matched, rows)


def prepare(
    d: Decoder, last: Flight, plan: Plan, compiled: Compiled | None, allowed: mx.array | None = None
) -> tuple[Frame, Run, Callable | None]:
    """Move the caches to the step after `last`; return its frame with `allowed`, its input, its record or None."""
    cache, run, base, frame = d.cache, last.run.given, last.base, _frame(d, last, plan)._replace(allowed=allowed)
    if frame.drafter:
        cache.resume_heads(base)
        set_aside(cache, frame.drafter.spare.get(plan.source, 0), base)
    else:
        cache.pause_heads(base)
    frame, run, replay = compiled.find(frame, run, d.stats) if compiled else (frame, run, None)
    if plan.k or replay:
        cache.to_device()
    elif last.run.size == 1:
        cache.to_host(base + 1)
    return frame, run, replay


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
        stats.count_cycle(flight.run.size - 1, flight.accepted, flight.plan.source, flight.forced)
        stats.add_time(clock.took, waited)
    stats.count_replays(flight.replayed)
    d.history.extend(tokens)
    return tokens


def submit(d: Decoder, last: Flight, new: Flight) -> None:
    """Start computing `new`, the cycle after the read cycle `last`. Raises as `agree`, GraphFailed, GrammarError."""
    if d.emitting is not last:
        d.emitting, d.emitted = last, 0
    if new.masks and new.masks.allowed is not None:
        new.masks.begin()
    if new.plan.p_min:
        frame, drafts = _frame(d, last, new.plan), confident_drafts(d, last, new)
        if new.masks:
            choose_early(d, frame, new, read_rows(frame, last.run, drafts))
        else:
            new.run = verify(frame, last.run, drafts)
    agree(d)
    d.submitted = new
    last.after.release()  # buffers are written in place only if nothing else refers to them
    new.before.release()
    if new.masks:
        submit_guided(d, new)
    start(d, new.run)
    if d.cache.aside or not d.cache.live:
        whole = last.accepted + 1 == last.run.size
        d.cache.push(last.run.hidden if whole else last.run.hidden[:, : last.accepted + 1])
    new.base = last.base + last.accepted + 1
    d.cache.advance(new.base)
    new.after = d.cache.mark()


def start(d: Decoder, run: Run) -> None:
    """Submit a run's graph, with the cache arrays that the next graph reads, to the device."""
    if d.stats.phases:
        evaluated(d.stats.time_phases, run)
    evaluated(mx.async_eval, run.packed, run.logprobs, *d.cache.arrays)


def observe(d: Decoder, flight: Flight) -> None:
    """Report a cycle's outcome to the control and replay trial, after any next submit, so that the device is busy."""
    seconds = flight.seconds
    if d.compiled:
        seconds = d.compiled.observe(flight.plan, flight.run.size, flight.replayed, seconds)
    if flight.plan is not PROMPT:
        verified = flight.run.size - 1
        outcome = verified, flight.accepted, seconds, flight.prefilled, flight.matched
        depths = by_depth([Accepted(flight.accepted, verified, flight.forced)], verified) if flight.forced else {}
        d.control.observe(Cycle(flight.plan, *outcome, context=flight.base, **depths))
    if isinstance(d.control, (Controller, Agreement)):
        d.stats.note_pause(d.control.paused)
