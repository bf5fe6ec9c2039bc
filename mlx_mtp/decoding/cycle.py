"""Plan a cycle, build or replay its step, submit it and read its tokens."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import mlx.core as mx

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
from .members import Single
from .prefill import evaluated, first_run, prefill
from .replay import Compiled
from .run import NO_DRAFTS, Drafts, Run
from .sampling import Picker
from .stats import Stats
from .step import propose, step, verify
from .text import Text

PROMPT = Plan()  # of the prompt's own run, which is no cycle


@dataclass
class Flight:
    """A cycle from when it is begun until its tokens have been shown. Its fields are known from some moment on:

    planned    plan, matched (tokens that the text's own past knows), caught_up (rows that an idle drafter read for
               it), before (the caches as its predecessor leaves them, once that has read).
    begun      run, or with p_min the `drafts` that it will be made from; replayed; built (the host's seconds for it);
               began_late (its predecessor's tokens had been read).
    submitted  run, base (the position of its first row), after (the caches as it leaves them itself).
    read       accepted, seconds. late: why its successor could not be built ahead, "" behind the prompt.
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
    began_late: bool = False
    built: float = 0.0
    seconds: float | None = None
    failed: bool = False

    def __post_init__(self):
        self.after = self.before


@dataclass
class Decoder:
    """The model, caches, sampling and settings that every cycle of one generation shares, and where it stands.

    control: decides what a cycle does, and is told what each did.
    chunk:   rows that an idle drafter reads at a time when it is needed again, and that a prompt is read in.
    k, max_lookup: most drafts of the model's drafter in a cycle, and of the text's own past.
    p_min:   least probability of a draft that is verified, in cycles whose plan says so.
    compiled: replays cycles that were recorded; None: all are built.
    drafters: who may draft, by the name in plans. clock: times the cycles.
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
        self.fallback, self.clock = Fallback(self.model), Clock()
        self.drafters = drafters_of(self.model, self.max_lookup)

    @property
    def behind(self) -> int:
        """Rows that the model's drafter has to read before it drafts again."""
        drafter = next((d for d in self.drafters.values() if d.in_step), None)
        return drafter.behind(self.cache) if drafter else 0


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
    frame, take = prepare(d, last, new.plan, d.compiled)
    before = new.plan.k and not frame.drafter  # its drafter drafts before the step
    guesses = d.drafters[new.plan.source].propose(frame, last.run, new.plan.k) if before else NO_DRAFTS
    if new.plan.p_min:
        new.drafts = propose(frame, last.run, cache.unload(), guesses)
    else:
        new.run, arrays = (take or partial(step, frame))(last.run.given, cache.unload(), guesses)
        if take:
            limit = last.base + last.run.size
            cache.load(arrays, limit + new.run.size, limit)
    new.replayed, new.built = take is not None, perf_counter() - tic
    return new


def _frame(d: Decoder, last: Flight, new: Plan) -> Frame:
    drafter = d.drafters[new.source] if new.k else None
    in_step = drafter if drafter and drafter.in_step else None
    return Frame(d.model, d.cache, new, in_step, (Single(d.picker, d.text, last.base),), last.base)


def _planned(d: Decoder, last: Flight, most: float) -> Flight:
    """Ask the control for a plan, and let an idle drafter that is to draft read what it has missed."""
    cache, base = d.cache, last.base
    matched = d.text.matched() if d.max_lookup else 0
    plan = d.control.plan(matched, d.behind)
    if most < plan.k:
        plan = replace(plan, k=int(most)) if most else Plan()
    if not plan.k or cache.live or not (drafter := d.drafters[plan.source]).in_step:
        return Flight(plan, last.after, matched)
    behind = drafter.behind(cache)
    drafter.read(d.model, cache, d.text.tokens, base - behind, base, step=d.chunk)
    return Flight(plan, cache.mark(), matched, behind)


def prepare(d: Decoder, last: Flight, plan: Plan, compiled: Compiled | None) -> tuple[Frame, Callable | None]:
    """Bring the caches to where the step begins; return its frame, and what replays it if it is recorded."""
    cache, run, base, frame = d.cache, last.run, last.base, _frame(d, last, plan)
    if frame.drafter:
        cache.resume_heads(base)
    else:
        cache.pause_heads(base)
    take = compiled.find(frame, run.size, d.stats) if compiled else None
    if plan.k or take:
        cache.to_device()
    elif run.size == 1:
        cache.to_host(base + 1)
    return frame, take


def read(d: Decoder, flight: Flight, ahead: Flight | None = None) -> list[int]:
    """Wait for a cycle; return its right tokens, of which `flight.accepted` are drafts. ahead: the next cycle."""
    tic, stats, clock = perf_counter(), d.stats, d.clock
    ((tokens, flight.accepted),) = evaluated(flight.run.read)
    waited = perf_counter() - tic
    if flight.plan is PROMPT:
        stats.begins()
        clock.restart()
    else:
        clock.hidden = clock.hidden or stats.crowded
        following = ahead.built if ahead else None
        flight.seconds = clock.arrived(waited, flight.built, following, late=flight.began_late)
        stats.counts(flight.run.size - 1, flight.accepted, flight.plan.source)
        stats.spends(clock.took, waited)
    stats.replays(flight.replayed)
    d.text.extend(tokens)
    return tokens


def submit(d: Decoder, last: Flight, new: Flight) -> None:
    """Start computing `new`, now that it is known which rows of the cycle before are right.

    Keys and values are written in place: nothing else may refer to them from here on.
    """
    if d.shown is not last:
        d.shown, d.rows = last, 0
    if new.plan.p_min:
        new.run = verify(_frame(d, last, new.plan), last.run, _sure(d, last, new))
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
    """Evaluate a cycle's drafts, which writes the drafter's caches; return the first ones that it is sure of."""
    if refused := newly_refused():
        raise refused
    d.newest = new
    last.after.release()
    new.before.release()
    tic = perf_counter()
    count = evaluated(new.drafts.sure, d.p_min)
    d.stats.spends(0.0, perf_counter() - tic)
    new.before.caches = d.cache.mark().caches  # held again until the verify of them is submitted
    return new.drafts.first(count)


def agree(d: Decoder) -> None:
    """Run the kernels that a graph, about to be started, launches for the first time; agree with other ranks on it.

    Raises KernelRefused, on every rank, where one is refused.
    """
    refused = newly_refused()
    if isinstance(d.control, Agreement):
        d.control.meet(d.text, d.behind, refused)
        d.ended = d.control.ended
    elif refused:
        raise refused


def start(d: Decoder, run: Run) -> None:
    """Hand a run's graph to the device, with all that the next one builds on."""
    if d.stats.phases:
        evaluated(d.stats.time_phases, run)
    evaluated(mx.async_eval, run.packed, run.logprobs, *d.cache.arrays)


def give_way(d: Decoder, error: Trouble) -> None:
    """Switch off the kernels to blame for an error, on every rank; raise it where there are none."""
    if isinstance(d.control, Agreement) and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            d.control.meet(d.text, d.behind, error)
    d.fallback.take(error, len(d.text.tokens))


def learn(d: Decoder, flight: Flight) -> None:
    """Tell the control what a cycle did; when the next one is under way, for nobody waits for it."""
    seconds = flight.seconds
    if d.compiled:
        seconds = d.compiled.observe(flight.plan, flight.run.size, flight.replayed, seconds)
    if flight.plan is not PROMPT:
        verified = flight.run.size - 1
        d.control.observe(Cycle(flight.plan, verified, flight.accepted, seconds, flight.caught_up, flight.matched))
    if isinstance(d.control, (Controller, Agreement)):
        d.stats.pauses(d.control.paused)
