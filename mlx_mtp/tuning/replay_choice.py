"""Choose whether recorded cycles are replayed: by a given verdict, or by a trial during generation."""

from statistics import median
from typing import Any

BLOCK = 8  # cycles replayed, then the same number built, during a trial
MIXED = 2  # first cycles of a block, which are not compared because they overlap with the last block


class CompileChoice:
    """Chooses between replaying recorded cycles and building each cycle's graph again.

    on: whether the next cycle is replayed. verdict: whether all are; None until the trial has ended.

    The trial alternates blocks of BLOCK cycles of each kind. It compares the medians of at least 2 * BLOCK cycles of
    each, of equal `like`; the first MIXED cycles of a block do not count. A given verdict is kept: there is no trial
    then.
    """

    def __init__(self, verdict: bool | None):
        self.verdict, self.on, self.tried = verdict, verdict is not False, verdict is None
        self._done = 0
        self._times: dict[Any, tuple[list[float], list[float]]] = {}

    def observe(self, like: Any, replayed: bool, seconds: float | None) -> None:
        """Add a cycle to the trial; ignored after the verdict, and if seconds is None (not measured).

        like: cycles with an equal value are compared. Also switches `on` after each block.
        """
        if self.verdict is not None or seconds is None:
            return
        place, self._done = self._done % BLOCK, self._done + 1
        if place >= MIXED and replayed == self.on:
            times = self._times.setdefault(like, ([], []))
            times[replayed].append(seconds)
            if min(map(len, times)) >= 2 * BLOCK:
                self.verdict = self.on = median(times[True]) <= median(times[False])
                return
        if self._done % BLOCK == 0:
            self.on = not self.on
