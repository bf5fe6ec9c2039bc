"""Time chains of calls, each of which waits for the one before: nothing overlaps, and weights take turns.

MLX's graph lets independent calls overlap, and a call repeated on the same weights finds them in caches; either makes
a row more look cheaper than it is in a model.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..tuning.ab_test import Op

REPEATS = 3  # of a chain in each turn; other work on the machine only ever adds time, so the fastest counts


@dataclass(frozen=True)
class Call:
    """op(x) -> outputs; x is what the call reads once those before it have ended."""

    op: Op
    x: mx.array


def chain_seconds(calls: Sequence[Call], steps: int, start: int = 0) -> float:
    """Time `steps` calls in turn from number `start` on, each after all outputs of the one before; seconds."""
    last: Sequence[mx.array] = ()
    for i in range(start, start + steps):
        call = calls[i % len(calls)]
        x = call.x
        for y in last:
            # Never true, of NaN neither: x stays what it is, but has to wait for y.
            x = mx.where(y.reshape(-1)[:1] < -math.inf, 0, x)
        last = call.op(x)
    mx.synchronize()
    tic = time.perf_counter()
    mx.eval(*last)
    mx.synchronize()
    return time.perf_counter() - tic


def links(calls: Sequence[Call]) -> list[Call]:
    """Make the chain without the calls: what makes each wait for the one before, and costs time of its own."""
    counts = [len(call.op(call.x)) for call in calls]
    return [Call(lambda x, outputs=n: [x] * outputs, call.x) for n, call in zip(counts, calls, strict=True)]


class Timed:
    """A chain to be timed turn by turn, the time of its links taken off. steps: calls in a turn."""

    def __init__(self, calls: Sequence[Call], steps: int):
        self.calls, self.links, self.steps, self.start = calls, links(calls), steps, 0
        for chain in (calls, self.links):
            chain_seconds(chain, min(steps, len(calls)))  # compiles

    def __call__(self) -> float:
        """Seconds of a call."""
        starts = [self.start + i * self.steps for i in range(REPEATS)]
        own, waiting = (
            min(chain_seconds(chain, self.steps, start) for start in starts) for chain in (self.calls, self.links)
        )
        self.start += REPEATS * self.steps
        return max(own - waiting, 1e-9) / self.steps


def steps_for(calls: Sequence[Call], seconds: float, most: int = 4096) -> int:
    """Choose how many calls take about that long; all of them in turn at least once."""
    chain_seconds(calls, len(calls))  # compiles
    once = min(chain_seconds(calls, len(calls)) for _ in range(2))
    return len(calls) * max(1, min(round(seconds / once), most // len(calls)))
