"""Measure the seconds of cycles, each from the previous arrival to its own; `took` is without the caller's time."""

import time

LEAST = 0.25  # minimum share of the measured seconds that `steady_seconds` returns
HOST_BOUND = 0.05  # share of a cycle's seconds; with a longer wait the device, not the host, limits the speed
WAITED = 0.05  # minimum share of a cycle's time spent waiting, for the time to be the device's


class Clock:
    """Measures the cycles of one sequence, or of several that decode together.

    took: seconds of the last cycle, without the caller's. hidden: other work was computed since the last arrival.
    """

    def __init__(self):
        self.hidden, self.took = False, 0.0
        self.restart()

    def restart(self) -> None:
        """Start the next cycle's time now."""
        self._arrival = self._left = time.perf_counter()
        self._caller = 0.0

    def leave(self) -> None:
        """Start the caller's time: a token is yielded next, or was."""
        self._left = time.perf_counter()

    def resume(self) -> None:
        """End the caller's time: the caller has requested the next token."""
        self._caller += time.perf_counter() - self._left

    def arrived(self, waited: float, built: float, following: float | None, *, late: bool) -> float | None:
        """Return the seconds of the cycle that has just arrived; None if other work or the caller's time hides them.

        waited: seconds that the host waited for the cycle. built, following: seconds spent building this cycle and
        the next one; following is None if the next one is not built, else the result is that of `steady_seconds`.
        late: the cycle was begun after the caller's time; only then is that time subtracted, because the two do not
        overlap. Sets `took`, and starts the next cycle's time.
        """
        now = time.perf_counter()
        elapsed, caller, self._arrival, self._caller = now - self._arrival, self._caller, now, 0.0
        self.took = elapsed - caller
        hidden, self.hidden = self.hidden, False
        if hidden or (not late and waited < WAITED * elapsed and caller > WAITED * elapsed):
            return None
        seconds = self.took if late else elapsed
        return seconds if following is None else steady_seconds(seconds, waited, built, following)


def steady_seconds(seconds: float, waited: float, built: float, following: float) -> float:
    """Estimate a cycle's seconds as if building the next one, during it, had taken as long as building itself.

    Otherwise a plain cycle before one with drafts would seem slow. built, following: seconds spent building this
    cycle and the next one. waited: the host's wait for the device, which hides the time of building.
    """
    more = built - following
    if waited > HOST_BOUND * seconds:
        return seconds + max(0.0, more - waited)
    return max(seconds + more, LEAST * seconds)
