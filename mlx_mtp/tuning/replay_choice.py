"""Choose whether cycles are replayed: as the caller says, as was found before, or by a trial while generating."""

from collections import deque
from statistics import median
from typing import Any

WINDOW = 32  # last cycles that tell whether the host is what takes the time
HOST_BOUND = 0.05  # of their time, the most that the host may have waited
BLOCK = 8  # cycles built alike before they are built the other way
MIXED = 2  # first cycles of a block: of the other way in part
FASTER = 0.97  # of the time of a cycle that is built, the most that a replayed one may take


class CompileChoice:
    """The choice between building each cycle's graph and replaying a compiled one, by a replay trial.

    on: whether the next cycle is replayed. verdict: whether all are, None until a replay trial has found out.

    A replay trial needs a host that hardly waits, as only such a one gains. It compares cycles of like drafts and
    rows.
    """

    def __init__(self, verdict: bool | None):
        self.verdict, self.on = verdict, bool(verdict)
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._done = 0
        self.tried = verdict is None
        self._trying = False
        self._times: dict[Any, tuple[list[float], list[float]]] = {}

    def observe(self, like: Any, compiled: bool, seconds: float | None, waited: float) -> None:
        """Learn from a cycle: its seconds, None if not measured, and those that the host waited for it."""
        if self.verdict is not None or seconds is None:
            return
        if not self._trying:
            self._last.append((seconds, waited))
            total, idle = (sum(column) for column in zip(*self._last, strict=True))
            self._trying = len(self._last) == WINDOW and idle < HOST_BOUND * total
            return
        self._done += 1
        if self._done % BLOCK > MIXED and compiled == self.on:
            built, replayed = self._times.setdefault(like, ([], []))
            (replayed if compiled else built).append(seconds)
            if min(len(built), len(replayed)) >= 2 * BLOCK:
                self.verdict = self.on = median(replayed) <= FASTER * median(built)
                return
        if self._done % BLOCK == 0:
            self.on = not self.on
