"""Plan a cycle, build its graph, submit it and read its tokens."""

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import mlx.core as mx

from ..cache.prompt_cache import Mark, PromptCache
from ..layers.target import Target
from ..tuning.controller import Controller, Cycle, Fixed, Plan
from ..tuning.replay_choice import HOST_BOUND
from .accept import accept
from .draft import Drafts, Run, draft, prime
from .draft_sampling import DraftChooser
from .prefill import NO_DRAFTS, NONE_ACCEPTED
from .prompt_lookup import Text
from .sampling import Picker
from .stats import Stats

PROMPT = Plan()  # of the prompt's own run, which is no cycle
LEAST = 0.25  # of a cycle's seconds, what is left of them when the next one's building is taken off


@dataclass
class Decoder:
    """The model, caches, sampling and settings that every cycle of one generation shares.

    control: decides what a cycle does, and is told what each did.
    step:    rows that idle heads read at a time when they are needed again.
    k, max_lookup: most drafts of the heads in a cycle, and of the text's own past.
    p_min:   least probability of a draft that is verified, in cycles whose plan says so.
    compiled: replays cycles that were recorded (`replay.Compiled`); None: all are built.
    text:    the tokens that the host has read.
    """

    model: Target
    cache: PromptCache
    picker: Picker
    control: Controller | Fixed
    stats: Stats
    step: int
    k: int
    max_lookup: int = 0
    p_min: float = 0.0
    compiled: "CycleReplay | None" = None
    text: Text = field(default_factory=Text)

    def needs_host(self, flight: "Flight") -> str | None:
        """Say why the cycle after this one cannot be built before this one's tokens have been read, if so."""
        if self.picker.processors:
            return "logits processors"
        rows = 1 + max(self.k, self.max_lookup)
        return self.cache.needs_host(flight.base + flight.run.tokens.size, rows)


class CycleReplay(Protocol):
    """What replays recorded cycles in place of building them."""

    def run(self, d: Decoder, last: "Flight", plan: Plan) -> Run | None:
        """Replay the cycle after `last`; None where it is to be built."""
        ...

    def observe(self, flight: "Flight", seconds: float | None, waited: float) -> float | None:
        """Learn from a cycle's seconds, `waited` of which the host waited; None where they tell nothing."""
        ...


@dataclass
class Flight:
    """A cycle from when it is begun until its tokens have been read.

    run:    with p_min, known when it is submitted.
    replayed: it was not built, but replayed.
    built:  seconds that the host took to build it.
    before: the caches as its predecessor leaves them, once heads that were behind have caught up.
    after:  the caches as it leaves them itself, known with `base`, the position of its first row.
    """

    plan: Plan
    before: Mark
    drafts: Drafts
    matched: int = 0
    caught_up: int = 0
    replayed: bool = False
    built: float = 0.0
    run: Run = field(init=False)
    after: Mark = field(init=False)
    base: int = field(init=False)
    seconds: float | None = None
    waited: float = 0.0


def begin(d: Decoder, last: Flight, most: float = float("inf")) -> Flight:
    """Plan the cycle after `last`, with at most `most` drafts, and build its graph."""
    cache, base, tic = d.cache, last.base, perf_counter()
    matched = d.text.matched() if d.max_lookup else 0
    plan = d.control.plan(matched, 0 if cache.live else cache.behind)
    plan = replace(plan, k=int(min(plan.k, most))) if most else Plan()
    caught_up = 0
    if plan.k and plan.source == "heads" and not cache.live:
        caught_up = cache.behind
        prime(d.model, cache, d.text.tokens, base - caught_up, base, step=d.step)
    before = cache.mark()
    run = d.compiled.run(d, last, plan) if d.compiled else None
    drafts = NO_DRAFTS if run else propose(d, last, plan)
    new = Flight(plan, before, drafts, matched, caught_up, replayed=run is not None)
    if run or not plan.p_min:
        new.run = run or verify(d, last.run, drafts)
    new.built = perf_counter() - tic
    return new


def propose(d: Decoder, last: Flight, plan: Plan) -> Drafts:
    """Draft plan.k tokens behind a cycle's rows; MTP heads that are not asked stay before these rows."""
    cache, run, base = d.cache, last.run, last.base
    cache.bound(base, run.tokens.size)
    if plan.k and plan.source == "heads":
        cache.wake(base)
        return draft(d.model, cache, run, plan.k, DraftChooser.of(d.picker, confidence=plan.p_min))
    cache.idle(base)
    if plan.k:
        cache.to_device()
        return Drafts(d.text.continued(base + 1, run.tokens, run.accepted + 1, plan.k))
    if not run.drafts.size:
        cache.to_host(base + 1)
    return NO_DRAFTS


def verify(d: Decoder, run: Run, drafts: Drafts) -> Run:
    """Choose the target's own tokens after the newest one and each draft; count the drafts that equal them."""
    cache, guesses = d.cache, drafts.tokens
    position, rows = cache.layers[0].offset + 1, run.newest()
    if guesses.size:
        rows = mx.concatenate([rows, guesses])
    hidden = d.model.hidden(rows[None], cache.layers)
    tokens, logprobs = d.picker.pick(d.model, hidden, position, d.text.tokens, guesses)
    accepted = NONE_ACCEPTED
    if guesses.size:
        accepted = accept(guesses, tokens)
        cache.rollback(guesses.size - accepted)
    return Run.of(hidden, tokens, accepted, guesses, logprobs)


def read(d: Decoder, flight: Flight) -> tuple[list[int], int]:
    """Wait for a cycle, its only host read; return its right tokens and how many of them are drafts."""
    waited = d.stats.wait_time
    tokens, accepted, flight.seconds = d.stats.reads(flight.run, flight.plan.source)
    flight.waited = d.stats.wait_time - waited
    d.stats.compiled_cycles += flight.replayed
    return tokens, accepted


def learn(d: Decoder, flight: Flight, accepted: int, following: Flight | None) -> None:
    """Tell the control what a cycle did; when the next one is under way, for nobody waits for it."""
    seconds = flight.seconds
    if d.compiled:
        seconds = d.compiled.observe(flight, seconds, flight.waited)
    if seconds is not None and following:
        seconds = among_its_like(seconds, flight.waited, flight.built, following.built)
    if flight.plan is not PROMPT:
        verified = flight.run.drafts.size
        d.control.observe(Cycle(flight.plan, verified, accepted, seconds, flight.caught_up, flight.matched))


def among_its_like(seconds: float, waited: float, built: float, following: float) -> float:
    """Estimate a cycle's seconds if the next one, built in its time, had taken as long to build as itself.

    Without it a plain step between cycles that draft seems as slow as they are to build. A device that the host had
    to wait for was busy all the time, and hides a quicker host.
    """
    more = built - following
    if waited > HOST_BOUND * seconds:
        return seconds + max(0.0, more - waited)
    return max(seconds + more, LEAST * seconds)


def submit(d: Decoder, last: Flight, new: Flight, accepted: int) -> None:
    """Start computing `new`, now that `accepted` drafts of the cycle before are known to be right."""
    last.after.release()
    new.before.release()
    if new.plan.p_min:
        assert new.drafts.confidence is not None
        new.run = verify(d, last.run, new.drafts.first(d.stats.reads_confidence(new.drafts.confidence, d.p_min)))
    start(d, new.run)
    if not d.cache.live:
        d.cache.push(last.run.hidden[:, : accepted + 1])
    new.base = last.base + accepted + 1
    d.cache.advance(new.base)
    new.after = d.cache.mark()


def start(d: Decoder, run: Run) -> None:
    """Hand a run's graph to the device, with all that the next one builds on."""
    if d.stats.phases:
        d.stats.time_phases(run)
    logprobs = [] if run.logprobs is None else [run.logprobs]
    mx.async_eval(run.packed, *logprobs, *d.cache.arrays)
