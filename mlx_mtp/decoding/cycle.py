"""Plan a cycle, build or replay its step, submit it and read its tokens; bring the caches to rest at the end."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import mlx.core as mx

from ..cache.prompt_cache import Mark, PromptCache
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import TROUBLE, Fallback, KernelRefused, Trouble, newly_refused
from ..tuning.plan import Cycle, Fixed, Plan
from .agreement import Agreement
from .draft import NO_DRAFTS, NONE_ACCEPTED, Drafts, Run, prime
from .prefill import evaluated, first_run, prefill, read_again
from .prompt_lookup import Text
from .replay import Compiled
from .sampling import Picker
from .stats import Stats
from .step import Frame, propose, step, verify

PROMPT = Plan()  # of the prompt's own run, which is no cycle
LEAST = 0.25  # share of its seconds that a cycle is said to have taken at least, however long the next was built
HOST_BOUND = 0.05  # share of a cycle's seconds; a host that waits longer for the device is the faster of the two


@dataclass
class Flight:
    """A cycle from when it is begun until its tokens have been shown. Its fields are known from some moment on:

    planned    plan, matched (tokens that the text's own past knows), caught_up (rows that idle heads read for it),
               before (the caches as its predecessor leaves them, once those heads have read).
    begun      run, or with p_min the `drafts` that it will be made from; replayed; built (the host's seconds for it).
    submitted  run, base (the position of its first row), after (the caches as it leaves them itself).
    read       accepted, seconds, waited. late: why its successor could not be built ahead, "" behind the prompt.
    failed     MLX could not evaluate it.
    """

    plan: Plan
    before: Mark
    matched: int = 0
    caught_up: int = 0
    run: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS
    after: Mark = field(init=False)
    base: int = field(init=False)
    accepted: int = 0
    replayed: bool = False
    late: str | None = None
    built: float = 0.0
    seconds: float | None = None
    waited: float = 0.0
    failed: bool = False

    def __post_init__(self):
        self.after = self.before


@dataclass
class Decoder:
    """The model, caches, sampling and settings that every cycle of one generation shares, and where it stands.

    control: decides what a cycle does, and is told what each did.
    chunk:   rows that idle heads read at a time when they are needed again, and that a prompt is read in.
    k, max_lookup: most drafts of the heads in a cycle, and of the text's own past.
    p_min:   least probability of a draft that is verified, in cycles whose plan says so.
    compiled: replays cycles that were recorded; None: all are built.
    text:    the tokens that the host has read.
    ended:   the cycle under way is to be the last.
    shown, rows: the cycle whose tokens are going out, and how many have. newest: the one submitted last.
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
    text: Text = field(default_factory=Text)
    ended: bool = False
    shown: Flight = field(init=False)
    newest: Flight = field(init=False)
    rows: int = 0

    def __post_init__(self):
        self.fallback = Fallback(self.model)


def read_prompt(d: Decoder, prompt: list[int], progress: Callable[[int, int], None] | None = None) -> Flight:
    """Read the prompt and submit the choice of the first token, as the first of all cycles."""
    cache = d.cache
    cache.begin(cache.offset + len(prompt))
    hidden = prefill(d.model, cache, prompt, heads=d.k > 0, step=d.chunk, progress=progress)
    return follow(d, partial(first_run, d.model, cache, hidden, d.picker))


def follow(d: Decoder, build: Callable[[], Run]) -> Flight:
    """Submit the choice of a token, the first of all cycles; the cache, at rest, holds all before that token.

    build: makes the run of one row that has chosen it, without kernels that are refused when it is called again.
    """
    cache = d.cache
    d.text = Text(cache.tokens)
    while True:
        try:
            run = build()
            agree(d)
            start(d, run)
            break
        except TROUBLE as e:
            give_way(d, e)
    cache.pop_row()
    first = Flight(PROMPT, cache.mark())
    first.run, first.base = run, cache.offset - 1
    d.shown, d.rows, d.newest = first, 1, first
    return first


def builds_ahead(d: Decoder, flight: Flight) -> bool:
    """Tell whether the cycle after this one can be built before this one's tokens are read; note why if it cannot."""
    if flight.plan is PROMPT:  # its token goes out first, before the heads read the prompt
        flight.late = ""
    elif d.picker.processors:
        flight.late = "logits processors"
    else:
        flight.late = d.cache.needs_host(flight.base + flight.run.size, 1 + max(d.k, d.max_lookup))
    return flight.late is None


def begin(d: Decoder, last: Flight, most: float = float("inf")) -> Flight:
    """Plan the cycle after `last`, with at most `most` drafts, and build its graph, or replay it."""
    tic = perf_counter()
    new, cache = _planned(d, last, most), d.cache
    frame = _frame(d, last, new)
    replayed = _recorded(d.compiled, frame, last.run.size, d.stats) if d.compiled else None
    guesses = prepare(d, last, new.plan, on_device=replayed is not None)
    if new.plan.p_min:
        new.drafts = propose(frame, last.run, cache.unload(), guesses)
    else:
        take = replayed or partial(step, frame)
        new.run, arrays = take(last.run.given, cache.unload(), guesses)
        if replayed:
            limit = last.base + last.run.size
            cache.load(arrays, limit + new.run.size, limit)
    new.replayed, new.built = replayed is not None, perf_counter() - tic
    return new


def _recorded(compiled: Compiled, frame: Frame, rows: int, stats: Stats) -> Callable | None:
    """Find the record of a step behind `rows` rows, None where it is to be built; count one that is made now."""
    known = compiled.shapes
    found = compiled.find(frame, rows)
    stats.replays(0, compiled.shapes - known)
    return found


def _frame(d: Decoder, last: Flight, new: Flight) -> Frame:
    return Frame(d.model, d.cache, new.plan, d.picker, last.base, d.text.tokens)


def _planned(d: Decoder, last: Flight, most: float) -> Flight:
    """Ask the control for a plan, and let idle heads that are to draft read what they have missed."""
    cache, base = d.cache, last.base
    matched = d.text.matched() if d.max_lookup else 0
    plan = d.control.plan(matched, 0 if cache.live else cache.behind)
    if most < plan.k:
        plan = replace(plan, k=int(most)) if most else Plan()
    if not (plan.k and plan.source == "heads") or cache.live:
        return Flight(plan, last.after, matched)
    behind = cache.behind
    prime(d.model, cache, d.text.tokens, base - behind, base, step=d.chunk)
    return Flight(plan, cache.mark(), matched, behind)


def prepare(d: Decoder, last: Flight, plan: Plan, *, on_device: bool) -> Drafts:
    """Bring the caches to where the step begins; return the drafts that are looked up, if the plan asks for them."""
    cache, run, base = d.cache, last.run, last.base
    if plan.k and plan.source == "heads":
        cache.wake(base)
        return NO_DRAFTS
    cache.idle(base)
    if plan.k or on_device:
        cache.to_device()
    elif run.size == 1:
        cache.to_host(base + 1)
    return Drafts(d.text.continued(base + 1, run.tokens, run.accepted + 1, plan.k)) if plan.k else NO_DRAFTS


def read(d: Decoder, flight: Flight) -> list[int]:
    """Wait for a cycle's tokens; return the right ones, of which `flight.accepted` are drafts."""
    waited = d.stats.wait_time
    tokens, flight.accepted, flight.seconds = evaluated(d.stats.reads, flight.run, flight.plan.source)
    flight.waited = d.stats.wait_time - waited
    d.stats.replays(flight.replayed)
    d.text.extend(tokens)
    return tokens


def submit(d: Decoder, last: Flight, new: Flight) -> None:
    """Start computing `new`, now that it is known which rows of the cycle before are right.

    Keys and values are written in place: nothing else may refer to them from here on.
    """
    if d.shown is not last:
        d.shown, d.rows = last, 0
    if new.plan.p_min:
        new.run = verify(_frame(d, last, new), last.run, _sure(d, last, new))
    agree(d)
    d.newest = new
    last.after.release()
    new.before.release()
    start(d, new.run)
    if not d.cache.live:
        whole = last.accepted + 1 == last.run.size
        d.cache.push(last.run.hidden if whole else last.run.hidden[:, : last.accepted + 1])
    new.base = last.base + last.accepted + 1
    d.cache.advance(new.base)
    new.after = d.cache.mark()


def _sure(d: Decoder, last: Flight, new: Flight) -> Drafts:
    """Evaluate a cycle's drafts, which writes the heads' caches; return the first ones that the heads are sure of."""
    assert new.drafts.confidence is not None
    if refused := newly_refused():
        raise refused
    d.newest = new
    last.after.release()
    new.before.release()
    count = evaluated(d.stats.reads_confidence, new.drafts.confidence, d.p_min)
    new.before.caches = d.cache.mark().caches  # held again until the verify of them is submitted
    return new.drafts.first(count)


def agree(d: Decoder) -> None:
    """Run the kernels that a graph, about to be started, launches for the first time; agree with other ranks on it.

    Raises KernelRefused, on every rank, where one is refused.
    """
    refused = newly_refused()
    if isinstance(d.control, Agreement):
        d.control.meet(d.text, d.cache, refused)
        d.ended = d.control.ended
    elif refused:
        raise refused


def start(d: Decoder, run: Run) -> None:
    """Hand a run's graph to the device, with all that the next one builds on."""
    if d.stats.phases:
        evaluated(d.stats.time_phases, run)
    logprobs = [] if run.logprobs is None else [run.logprobs]
    evaluated(mx.async_eval, run.packed, *logprobs, *d.cache.arrays)


def give_way(d: Decoder, error: Trouble) -> None:
    """Switch off the kernels to blame for an error, on every rank; raise it where there are none."""
    if isinstance(d.control, Agreement) and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            d.control.meet(d.text, d.cache, error)
    d.fallback.take(error, len(d.text.tokens))


def resume(d: Decoder, error: Trouble) -> Flight:
    """Go on behind the tokens that were shown, without the kernels to blame for an error; return the first cycle.

    Its token has been shown, unless it is a prompt's first one.
    """
    try:
        give_way(d, error)
    except Exception:
        d.newest.failed = False  # the error ends the answer, and nothing is read again
        raise
    settle(d)
    known = len(d.text.tokens) > d.shown.base + d.rows
    if not known:
        return follow(d, partial(first_run, d.model, d.cache, d.shown.run.hidden, d.picker))
    row = newest_row(d)
    first = follow(d, lambda: row)
    d.text.extend(row.read()[0])
    d.stats.goes_on()
    return first


def learn(d: Decoder, flight: Flight, ahead: Flight | None) -> None:
    """Tell the control what a cycle did; when the next one is under way, for nobody waits for it."""
    seconds = flight.seconds
    if d.compiled:
        seconds = d.compiled.observe(flight.plan, flight.run.size, flight.replayed, seconds)
    if seconds is not None and ahead:
        seconds = among_its_like(seconds, flight.waited, flight.built, ahead.built)
    if flight.plan is not PROMPT:
        verified = flight.run.size - 1
        d.control.observe(Cycle(flight.plan, verified, flight.accepted, seconds, flight.caught_up, flight.matched))
    if isinstance(d.control, (Controller, Agreement)):
        d.stats.pauses(d.control.paused)


def among_its_like(seconds: float, waited: float, built: float, following: float) -> float:
    """Estimate a cycle's seconds if the next one, built in its time, had taken as long to build as itself.

    Without it a plain step between cycles that draft seems as slow as they are to build. A device that the host had
    to wait for was busy all the time, and hides a quicker host.
    """
    more = built - following
    if waited > HOST_BOUND * seconds:
        return seconds + max(0.0, more - waited)
    return max(seconds + more, LEAST * seconds)


def newest_row(d: Decoder) -> Run:
    """Return the row that has chosen the token shown last, of a text that has been brought to rest."""
    row, token = d.shown.run.hidden[:, d.rows - 1 : d.rows], d.text.tokens[d.shown.base + d.rows]
    return Run.of(row, mx.array([int(token)], mx.int32), NONE_ACCEPTED, NO_DRAFTS.tokens, None)


def settle(d: Decoder) -> None:
    """Bring the caches to rest: drop a cycle that was not submitted, take back rows that were not shown."""
    cache, shown, newest = d.cache, d.shown, d.newest
    if newest.failed:
        newest.after = newest.before
    lost = newest.failed and newest.after.caches is None
    rest = shown.after if shown is newest else newest.before
    cache.restore(newest.after)  # keys and values as the device has them: a cycle after it was only built
    rest.release()  # of the moment behind the tokens shown: states alone, rows that came later stay and are covered
    cache.restore(rest)
    if d.rows:
        cache.push(shown.run.hidden[:, : d.rows])
    else:  # a plain row that was read comes out of the states again
        cache.restore_states(shown.before)
    cache.settle(d.text.tokens[: shown.base + d.rows].tolist())
    if lost:
        read_again(d.model, cache, heads=d.k > 0, step=d.chunk)
