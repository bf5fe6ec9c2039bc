"""Round the positions and rows of a step, so that few records serve an answer of many draft lengths in any order."""

from collections.abc import Iterable

import mlx.core as mx

from ..cache.growing import round_up
from .drafters.drafter import Frame
from .run import Run

BLOCK = 2048  # positions to which a step's end is rounded up; from 32,768 on an eighth to a sixteenth of the end
WHOLE = 4096  # maximum positions of buffers that recorded steps read as a whole


def recordable(frame: Frame, run: Run) -> tuple[Frame, Run]:
    """Return a step's frame and input as they are recorded; grow the caches, if they have arrays, to hold the step.

    `base` is raised so that the step's last position is the last of buffers of up to WHOLE positions; in longer ones,
    of a block of BLOCK positions or more. Without a drafter the run is cut to its newest row; with one, rows of
    zeros, which count as rejected, are added up to the next of its `row_counts`. A step built with this frame and run
    reads as many positions and rows as the recorded step, and so has the same bits.
    """
    if frame.drafter:
        run = _padded(run, _row_counts(frame))
    else:
        frame, run = frame._replace(base=frame.base + run.size - 1), Run(None, run.newest(), None)
    need, caches = frame.base + run.size + frame.plan.k + 1, frame.cache.stepped
    for c in caches:
        c.hold(round_up(need))
    block = max(BLOCK, (1 << need.bit_length()) // 16)
    end = -(-need // block) * block
    places = min((c.places for c in caches if c.places), default=end)
    end = places if places <= WHOLE else min(end, places)
    return frame._replace(base=end - run.size - frame.plan.k - 1), run


def _row_counts(frame: Frame) -> Iterable[int]:
    """Return the ascending numbers of rows of which a step with this plan pads its run to the next; () for none."""
    assert frame.drafter
    counts = frame.drafter.row_counts
    return counts.get(frame.plan.source if frame.asked else "", counts.get("", ()))


def _padded(run: Run, counts: Iterable[int]) -> Run:
    """Return a step's input, with rows of zeros appended up to the next of the ascending `counts`, if any."""
    if not (more := next((rows for rows in counts if rows >= run.size), run.size) - run.size):
        return run.given
    hidden, tokens = mx.pad(run.hidden, [(0, 0), (0, more), (0, 0)]), mx.pad(run.tokens, [(0, 0), (0, more)])
    return Run(hidden, tokens, run.last)
