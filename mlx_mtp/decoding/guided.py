"""Read drafts before their rows are verified: for masks of a grammar, or to cut them where they are improbable.

Also replace a plan by one that verifies tokens which the grammar forces.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from ..tuning.controller import Controller
from ..tuning.kernel_fallback import newly_refused
from ..tuning.plan import Plan
from .cycle_masks import CycleMasks
from .decoder import Decoder, Flight
from .drafters.drafter import Frame
from .prefill import evaluated
from .replay import Compiled
from .run import Drafts, Run
from .stats import Stats
from .step import Passed, choose, roll_back


def forced_plan(d: Decoder, planned: Plan, max_drafts: float) -> Plan | None:
    """Return a plan that verifies drafts of the grammar after the tokens that were read; None to keep `planned`.

    max_drafts: maximum number of drafts. Raises GrammarError if the grammar forbids one of those tokens.
    """
    matcher = d.picker.matcher
    if matcher is None or not (most := int(min(matcher.most, max_drafts))):
        return None
    matcher.follow(d.history.tokens)
    forced = len(matcher.drafts(most))
    plan = redrafted(d.control, planned, [forced]) if forced else planned
    return plan if plan != planned else None


def redrafted(control: Any, planned: Plan, forced: Sequence[int]) -> Plan:
    """Return `planned`, or a plan of drafts that grammars force. forced: their number in each sequence.

    A Controller compares estimates; with another control the forced drafts are the plan if they are more in sum.
    """
    if isinstance(control, Controller):
        return control.redraft(planned, forced)
    return Plan("grammar", max(forced)) if sum(forced) > planned.k * len(forced) else planned


def choose_early(d: Decoder, frame: Frame, new: Flight, passed: Passed) -> None:
    """Set a cycle's `frame` and `passed`, and build its run unless `submit_guided` must."""
    new.frame, new.passed = frame, passed
    if new.masks and not choose_late(frame):
        new.run = choose_allowed(frame, passed, new.masks, d.compiled, d.stats)


def submit_guided(d: Decoder, new: Flight) -> None:
    """Submit a cycle's pass and write its masks; then build its run if that is missing."""
    assert new.passed
    assert new.masks
    for waited in submit_pass(new.passed, new.masks, d.thread, stepwise=new.plan.stepwise):
        d.stats.add_time(0.0, waited)
    if choose_late(new.frame):
        new.run = choose_allowed(new.frame, new.passed, new.masks, d.compiled, d.stats)


def choose_late(frame: Frame) -> bool:
    """Return whether masks must be written before the choice is built: a caller's code may evaluate the logits."""
    return any(member and (member.picker.sampler or member.picker.processors) for member in frame.members)


def choose_allowed(
    frame: Frame,
    passed: Passed,
    masks: CycleMasks,
    compiled: Compiled | None,
    stats: Stats,
    limits: mx.array | None = None,
) -> Run:
    """Build or replay the choice from the rows of a pass under masks, roll back rejected rows, and return the run.

    Unless `choose_late`, the host writes the masks later, once the pass is submitted. compiled: None builds it.
    limits: as in `step`. stats counts a new record.
    """
    rows = masks.of_rows(passed.hidden.shape[1])
    if compiled:
        run = compiled.choose(frame, passed, limits, rows, stats)
    else:
        run = choose(frame.model, frame.members, passed, limits, rows)
    roll_back(frame, run, limits)
    return run


def confident_drafts(d: Decoder, last: Flight, new: Flight) -> Drafts:
    """Evaluate a cycle's drafts, which writes the drafter's caches; return those before the first improbable one.

    With a grammar, also only those before the first that it forbids. `new` becomes the cycle submitted last. Raises
    KernelRefused if a kernel that the graph launches for the first time is refused, GraphFailed, and GrammarError.
    """
    if refused := newly_refused():
        raise refused
    d.submitted = new
    last.after.release()
    new.before.release()
    tic = perf_counter()
    count = evaluated(new.drafts.sure, d.p_min)
    if new.masks:
        count = min(count, new.masks.read(evaluated(np.array, new.drafts.tokens).tolist()))
    d.stats.add_time(0.0, perf_counter() - tic)
    new.before.caches = d.cache.mark().caches  # kept until the verify is submitted
    return new.drafts.first(count)


def submit_pass(passed: Passed, masks: CycleMasks, thread: Executor, *, stepwise: bool) -> list[float]:
    """Submit the target's pass and write its rows' masks; return the seconds of each wait for drafts, [] if none.

    Without `masks.allowed`, no drafter in the step makes the drafts: they are read first, and `thread` writes the
    masks while this thread submits the pass. With it, the caller has called `masks.begin()`, and this thread reads
    the drafts and writes the masks while the device computes the pass. stepwise: each draft from
    `masks.first_unknown` on is read, and the next draft's mask is written, before the next draft is computed.
    """
    waits: list[float] = []
    if masks.allowed is None:
        drafts = () if passed.drafts is None else _received(passed.drafts, waits)
        with during(thread, partial(masks.write, drafts)):
            evaluated(mx.async_eval, passed.hidden)
        return waits
    each = [*passed.each] if stepwise else []
    for depth in range(masks.first_unknown, len(each) - 1):
        evaluated(mx.async_eval, each[depth])
        masks.read(_received(mx.concatenate(each[: depth + 1], axis=1), waits))
    if passed.drafts is not None:
        evaluated(mx.async_eval, passed.drafts)
    evaluated(mx.async_eval, passed.hidden)
    if passed.drafts is not None:
        masks.read(_received(passed.drafts, waits))
    return waits


@contextmanager
def during(thread: Executor, work: Callable[[], None]) -> Iterator[None]:
    """Context in which `work` runs in the executor `thread`; at the end wait for `work`, and raise its error.

    An error that the block raises is raised instead of the error of `work`.
    """
    running = thread.submit(work)
    try:
        yield
    finally:
        running.exception()
    running.result()


def _received(drafts: mx.array, waits: list[float]) -> list[list[int]]:
    """Wait for drafts [n, k] and return them as n lists of k integers; append the seconds to `waits`."""
    tic = perf_counter()
    found = evaluated(np.array, drafts).tolist()
    waits.append(perf_counter() - tic)
    return found
