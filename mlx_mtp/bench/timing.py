"""Measure times reliably: contenders take turns, ratios are within a round, and spreads are reported.

The spread of a row is the width of the confidence interval of its median (order statistics, no assumption about the
distribution), over the median. With seven rounds or fewer it is the whole range.

Single calls are timed in chains, each after the previous one, with alternating weights. Independent calls could
overlap in MLX's graph, and repeated calls on the same weights would find them in caches; both would make further rows
look cheaper than in a model.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from ..tuning.ab_test import TimedOp

K = TypeVar("K")
T = TypeVar("T")
INCONCLUSIVE = 0.05  # spread
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Measured:
    """A median of `count` values, and its bounds at 90% confidence (up to seven values: minimum and maximum)."""

    median: float
    low: float
    high: float
    count: int = 2

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median

    @property
    def conclusive(self) -> bool:
        return self.count > 1 and self.spread <= INCONCLUSIVE

    def __str__(self) -> str:
        return f"{self.median:.2f}" if self.conclusive else f"{self.median:.2f} inconclusive"


def measured(values: Sequence[float]) -> Measured:
    """Return the median of at least one value, with its 90% interval."""
    ordered = sorted(values)
    skip = _skipped(len(ordered))
    return Measured(statistics.median(ordered), ordered[skip], ordered[-1 - skip], len(ordered))


def ratio(values: Sequence[float], base: Sequence[float]) -> Measured:
    """Return the median of `values` over `base`, divided round by round, with its 90% interval."""
    return measured([value / other for value, other in zip(values, base, strict=True)])


def interleaved(
    contenders: Mapping[K, Callable[[], T]], rounds: int, *, warmups: int = 1, cooldown: float = 0.0
) -> dict[K, list[T]]:
    """Return the results of each contender (such as seconds), one per round, from `rounds` rounds of turns.

    `warmups` rounds run before them, and their results are dropped. Every other round runs in reverse order, so that
    no contender always follows the same one. cooldown: seconds of rest before each turn.
    """
    found: dict[K, list[T]] = {name: [] for name in contenders}
    for i in range(-warmups, rounds):
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            time.sleep(cooldown)
            found[name].append(contenders[name]())
    return {name: values[warmups:] for name, values in found.items()}


def _skipped(n: int) -> int:
    """Return the maximum number of values to drop at either end so that the median stays inside with CONFIDENCE."""
    outside = itertools.accumulate(2 * math.comb(n, skip) / 2**n for skip in range((n - 1) // 2 + 1))
    return max(0, sum(chance <= 1 - CONFIDENCE for chance in outside) - 1)


MOST_STEPS = 4096  # maximum calls of a chain
REPEATS = 3  # runs of a chain per turn; the minimum counts, because other work only adds time


@dataclass(frozen=True)
class Call:
    """op(x) -> outputs; x is the input that the call reads once the previous calls have ended."""

    op: TimedOp
    x: mx.array


def chain_seconds(calls: Sequence[Call], steps: int, start: int = 0) -> float:
    """Return the seconds of `steps` calls one after another: calls[start] first, and calls[0] after the last.

    Each call runs after all outputs of the previous one. Building the graph is not timed.
    """
    last: Sequence[mx.array] = ()
    for i in range(start, start + steps):
        call = calls[i % len(calls)]
        x = call.x
        for y in last:
            # Never true, even for NaN: x is unchanged but depends on y.
            x = mx.where(y.reshape(-1)[:1] < -math.inf, 0, x)
        last = call.op(x)
    mx.synchronize()
    tic = time.perf_counter()
    mx.eval(*last)
    mx.synchronize()
    return time.perf_counter() - tic


def links(calls: Sequence[Call]) -> list[Call]:
    """Return a chain of the same dependencies without the calls' work, to subtract its time from the chain's."""
    counts = [len(call.op(call.x)) for call in calls]
    return [Call(lambda x, outputs=n: [x] * outputs, call.x) for n, call in zip(counts, calls, strict=True)]


class Timed:
    """A chain of calls; calling it returns the seconds of one call, less those of the dependencies (`links`).

    steps: number of calls in a run of the chain; each turn continues with the calls after the previous one's.
    """

    def __init__(self, calls: Sequence[Call], steps: int):
        self.calls, self.links, self.steps, self.start = calls, links(calls), steps, 0
        for chain in (calls, self.links):
            chain_seconds(chain, min(steps, len(calls)))  # compiles

    def __call__(self) -> float:
        """Return the seconds of one call, from the fastest of REPEATS runs."""
        starts = [self.start + i * self.steps for i in range(REPEATS)]
        chains = [[chain_seconds(chain, self.steps, at) for at in starts] for chain in (self.calls, self.links)]
        own, waiting = map(min, chains)
        self.start += REPEATS * self.steps
        return max(own - waiting, 1e-9) / self.steps


def steps_for(calls: Sequence[Call], seconds: float) -> int:
    """Return the number of steps that take about `seconds`: a multiple of the number of calls, at most MOST_STEPS.

    It is at least one step per call, even if that exceeds MOST_STEPS or takes longer.
    """
    chain_seconds(calls, len(calls))  # compiles
    once = min(chain_seconds(calls, len(calls)) for _ in range(2))
    return len(calls) * max(1, min(round(seconds / once), MOST_STEPS // len(calls)))
