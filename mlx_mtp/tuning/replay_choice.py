"""Choose whether cycles are replayed: as the caller says, as was found before, or by a trial while generating."""

from statistics import median
from typing import Any

BLOCK = 8  # cycles replayed before as many are built, while a trial is under way
MIXED = 2  # first cycles of a block: of the other way in part


class CompileChoice:
    """The choice between replaying recorded cycles and building each anew.

    on: whether the next cycle is replayed. verdict: whether all are, None until a trial has found out.

    Cycles are replayed unless a trial finds that slower than building them. It compares cycles of like drafts and
    rows, medians of two blocks each.
    """

    def __init__(self, verdict: bool | None):
        self.verdict, self.on, self.tried = verdict, verdict is not False, verdict is None
        self._done = 0
        self._times: dict[Any, tuple[list[float], list[float]]] = {}

    def observe(self, like: Any, replayed: bool, seconds: float | None) -> None:
        """Learn from a cycle: its seconds, None if not measured."""
        if self.verdict is not None or seconds is None:
            return
        self._done += 1
        if self._done % BLOCK > MIXED and replayed == self.on:
            times = self._times.setdefault(like, ([], []))
            times[replayed].append(seconds)
            if min(map(len, times)) >= 2 * BLOCK:
                self.verdict = self.on = median(times[True]) <= median(times[False])
                return
        if self._done % BLOCK == 0:
            self.on = not self.on
