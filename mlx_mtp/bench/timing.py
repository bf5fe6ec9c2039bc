"""Measure ratios to be trusted: contenders take turns, ratios are within a round, the spread says their worth.

The spread of a row is the width of the confidence interval of its median (order statistics, no assumption about the
distribution), over the median. Seven rounds or fewer give the whole range.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")
INCONCLUSIVE = 0.05  # spread
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Measured:
    """A median, and the bounds between which it lies with 90% confidence (seven values or fewer: least and most).

    count: the values it is of; a single one has no spread to judge it by.
    """

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
    """Take the median of one value or more, with its interval."""
    ordered = sorted(values)
    skip = _skipped(len(ordered))
    return Measured(statistics.median(ordered), ordered[skip], ordered[-1 - skip], len(ordered))


def ratio(values: Sequence[float], base: Sequence[float]) -> Measured:
    """Divide two contenders' values round by round; where seconds are given, `base` over `values` is the speed."""
    return measured([value / other for value, other in zip(values, base, strict=True)])


def interleaved(
    contenders: Mapping[K, Callable[[], T]], rounds: int, *, warmups: int = 1, cooldown: float = 0.0
) -> dict[K, list[T]]:
    """Collect what each contender returns (seconds, say) in `rounds` rounds of turns; warm-ups do not count.

    Every other round goes backwards, so that nobody always runs behind the same one. cooldown: seconds of rest
    before each turn.
    """
    found: dict[K, list[T]] = {name: [] for name in contenders}
    for i in range(-warmups, rounds):
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            time.sleep(cooldown)
            value = contenders[name]()
            if i >= 0:
                found[name].append(value)
    return found


def _skipped(n: int) -> int:
    """The most values to leave out at either end, so that the median is among the others with CONFIDENCE."""
    outside = itertools.accumulate(2 * math.comb(n, skip) / 2**n for skip in range((n - 1) // 2 + 1))
    return max(0, sum(chance <= 1 - CONFIDENCE for chance in outside) - 1)
