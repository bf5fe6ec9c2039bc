"""Plan a cycle, and build or replay its step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx

from ..cache.branches import rows_with_room
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import newly_refused
from ..tuning.plan import TREES, Plan
from .agreement import Agreement
from .cycle_masks import CycleMasks
from .drafters.drafter import Frame
from .drafters.lookup import Lookup
from .early import choose_early, submit_masked, verify_confident
from .flight import Flight
from .prefill import evaluated
from .run import NO_DRAFTS, Run
from .seating import Seating, Waiting
from .step import forward, propose, step


def plan_and_build(seating: Seating, last: Flight | None, joining: Waiting, most: float | None) -> Flight:
    """Plan the cycle after `last` and build or replay its step, unevaluated.

    With p_min only the drafts are built, with a grammar and a caller's code only the pass; `submit` builds the rest.
    joining: sequences, with their runs, that join with this cycle. most: maximum number of drafts of a cycle that is
    built after `last` was read; None before.
    """
    tic = perf_counter()
    active = [*(last.active if last else ()), *(sequence for sequence, _ in joining)]
    control, plan, matched = seating.plan(active)
    if plan.tree:
        plan = _with_room(control, plan, seating.cache.layers)
    if most is not None and most < plan.k:
        plan = replace(plan, k=int(most)) if most else Plan()
    new = Flight(last.rows if last else [], plan, control, matched=matched, late=most is not None)
    run, base = seating.arrange(last, new, joining)
    build(seating, new, run, base)
    new.built = perf_counter() - tic
    return new


def _with_room(control: Any, plan: Plan, layers: Sequence[Any]) -> Plan:
    """Return the plan of a tree, with fewer drafts if its copies of caches would not fit; `control` then plans so."""
    own, room = control.control if isinstance(control, Agreement) else control, rows_with_room(layers) - 1
    if isinstance(own, Controller):
        own.room = max(room, TREES[0])  # of which some is planned later, when room may be back
    return plan if plan.k <= room else replace(plan, k=room) if room > 1 else Plan(plan.source, 1)


def build(seating: Seating, new: Flight, run: Run, base: int) -> None:
    """Build or replay a planned cycle's step after the rows of `run`, whose first position is at most `base`."""
    plan, cache = new.plan, seating.cache
    assert not (plan.tree and (plan.p_min or plan.stepwise)), "only chains are cut, or masked draft by draft"
    drafter = new.drafter = seating.drafters[plan.source] if plan.k else None
    in_step = drafter is not None and drafter.in_step
    given, first, reader = seating.enter(plan, run, base)
    if any(s is not None and s.picker.matcher for s in new.rows):
        new.masks = CycleMasks(new.rows, plan.k, drafted=in_step, tree=plan.tree)
    allowed = new.masks.allowed if new.masks else None
    frame = Frame(seating.model, cache, plan, reader, new.rows, first, allowed)
    drafts = NO_DRAFTS if drafter is None or in_step else drafter.propose(frame, run, plan.k)
    if plan.stem:
        drafts = seating.drafters[Lookup.source].propose(frame, run, plan.k)
    limit, replay = first + given.size, None
    if seating.compiled:
        frame, given, replay = seating.compiled.find(frame, given, seating.stats)
    seating.place(plan, run, base, replayed=replay is not None)
    new.frame, new.given, new.replayed = frame, given, replay is not None
    if plan.p_min:
        new.drafts = propose(frame, given, cache.unload(), drafts)
        return
    new.most = seating.limits(new, plan.k, replayed=new.replayed)
    if new.masks:
        passed, arrays = (replay or partial(forward, frame))(given, cache.unload(), drafts)
    else:
        new.run, arrays = (replay or partial(step, frame))(given, cache.unload(), drafts, new.most)
    if replay:
        cache.load(arrays, limit + plan.k + 1, limit)
    if new.masks:
        choose_early(seating, new, passed)
    seating.built(new)


def submit(seating: Seating, last: Flight | None, new: Flight) -> None:
    """Start computing `new`, the cycle after the read cycle `last`; raises KernelRefused and GraphFailed."""
    if new.masks and new.masks.allowed is not None:
        new.masks.begin()
    if new.plan.p_min:
        if refused := newly_refused():
            raise refused
        verify_confident(seating, last, new)
    seating.agree()
    seating.release(last, new)
    seating.advance(last, new)
    if new.masks:
        submit_masked(seating, new)
    start(seating, new.run)


def start(seating: Seating, run: Run) -> None:
    """Submit a run's graph, with the cache arrays that the next graph reads, to the device."""
    if seating.stats.phases:
        evaluated(seating.stats.time_phases, run)
    evaluated(mx.async_eval, run.packed, run.logprobs, seating.cache.arrays)
