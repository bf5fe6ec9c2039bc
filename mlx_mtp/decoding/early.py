"""Read drafts before their rows are verified: for masks of grammars, or to cut them where they are improbable."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import mlx.core as mx
import numpy as np

from .accept import Passed
from .cycle_masks import CycleMasks
from .drafters.drafter import Frame
from .flight import Flight
from .prefill import evaluated
from .replay import Compiled
from .run import NO_DRAFTS, Run
from .seating import Seating
from .stats import Stats
from .step import choose, read_rows, roll_back, verify


def verify_confident(seating: Seating, last: Flight | None, new: Flight) -> None:
    """Evaluate a cycle's drafts, which writes the drafter's caches; build the rest of the step.

    With a grammar the rest is the target's pass and, unless `choose_late`, the choice of tokens; else the verify. The
    number of drafts verified is the same for all sequences: the maximum, over them, of the number of drafts before a
    sequence's first improbable one. If all have a grammar, drafts that no grammar allows are not verified either.
    """
    seating.begin_drafts(last, new)
    tic, masks = perf_counter(), new.masks
    count = evaluated(new.drafts.sure, seating.p_min)
    if masks and all(s.picker.matcher for s in new.active):
        count = min(count, masks.read(evaluated(np.array, new.drafts.tokens).tolist()))
    waited, drafts = perf_counter() - tic, new.drafts.first(count)
    for sequence in new.active:
        sequence.stats.add_time(0.0, waited)
    seating.end_drafts(new)
    new.most = seating.limits(new, drafts.k)
    if masks:
        choose_early(seating, new, read_rows(new.frame, new.given, drafts))
    else:
        new.run = verify(new.frame, new.given, drafts, new.most)
    new.drafts = NO_DRAFTS
    seating.built(new)


def choose_early(seating: Seating, new: Flight, passed: Passed) -> None:
    """Set a cycle's `passed`, and build its run unless `submit_masked` must."""
    new.passed = passed
    if not choose_late(new.frame):
        _choose(seating, new)


def submit_masked(seating: Seating, new: Flight) -> None:
    """Submit a cycle's pass and write its masks; then build its run if that is missing."""
    assert new.passed
    assert new.masks
    for waited in submit_pass(new.passed, new.masks, seating.thread, stepwise=new.plan.stepwise):
        for sequence in new.active:
            sequence.stats.add_time(0.0, waited)
    if choose_late(new.frame):
        _choose(seating, new)
        seating.built(new)


def _choose(seating: Seating, new: Flight) -> None:
    assert new.passed
    assert new.masks
    new.run = choose_allowed(new.frame, new.passed, new.masks, seating.compiled, seating.stats, new.most)


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


def submit_pass(passed: Passed, masks: CycleMasks, thread: Executor, *, stepwise: bool) -> list[float]:
    """Submit the target's pass and write its rows' masks; return the seconds of each wait for drafts, [] if none.

    Without `masks.allowed`, no drafter in the step makes the drafts: they are read first, and `thread` writes the
    masks while this thread submits the pass. With it, the caller has called `masks.begin()`, and this thread reads
    the drafts and writes the masks while the device computes the pass. stepwise: each draft from
    `masks.first_unknown` on is read, and the next draft's mask is written, before the next draft is computed.
    """
    waits: list[float] = []
    if masks.allowed is None:
        drafts = () if (drafted := _drafted(passed)) is None else _received(drafted, waits)
        with during(thread, partial(masks.write, drafts)):
            evaluated(mx.async_eval, passed.hidden)
        return waits
    each = [*passed.each] if stepwise else []
    for depth in range(masks.first_unknown, len(each) - 1):
        evaluated(mx.async_eval, each[depth])
        masks.read(_received(mx.concatenate(each[: depth + 1], axis=1), waits))
    drafted = _drafted(passed)
    if drafted is not None:
        evaluated(mx.async_eval, drafted)
    evaluated(mx.async_eval, passed.hidden)
    if drafted is not None:
        masks.read(_received(drafted, waits))
    return waits


def _drafted(passed: Passed) -> mx.array | None:
    """Return the drafts [n, k], those of a tree followed by their parents, [n, 2 * k]; None if there are none."""
    if passed.drafts is None or passed.tree is None:
        return passed.drafts
    return mx.concatenate([passed.drafts, passed.tree.parents], axis=1)


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
