"""Time cycles from one's arrival to the next one's, without what the caller does between two tokens."""

import time

LEAST = 0.25  # share of its seconds that a cycle is said to have taken at least, however long the next was built
HOST_BOUND = 0.05  # share of a cycle's seconds; a host that waits longer for the device is the faster of the two
WAITED = 0.05  # share of a cycle's time that the host must have waited, for it to be the device's


class Clock:
    """Times the cycles of one sequence, or of several that decode together.

    took: seconds of the last cycle, without the caller's. hidden: something else was computed since the last arrival.
    """

    def __init__(self):
        self.hidden, self.took = False, 0.0
        self.restart()

    def restart(self) -> None:
        """Begin anew: until now it was something else that took the time."""
        self._arrival = self._left = time.perf_counter()
        self._caller = 0.0

    def leave(self) -> None:
        """Note that the caller goes on."""
        self._left = time.perf_counter()

    def resume(self) -> None:
        """Note that the caller's own time is over."""
        self._caller += time.perf_counter() - self._left

    def arrived(self, waited: float, built: float, following: float | None, *, late: bool) -> float | None:
        """Return the seconds of the cycle that has just arrived; None where other work or the caller hides them.

        waited: for it. built: seconds that building it took; following: the next one, None if it is not built yet.
        late: it was begun when the caller came back, so that it did not run in the caller's time.
        """
        now = time.perf_counter()
        elapsed, caller, self._arrival, self._caller = now - self._arrival, self._caller, now, 0.0
        self.took = elapsed - caller
        hidden, self.hidden = self.hidden, False
        if hidden or (not late and waited < WAITED * elapsed and caller > WAITED * elapsed):
            return None
        seconds = self.took if late else elapsed
        return seconds if following is None else among_its_like(seconds, waited, built, following)


def among_its_like(seconds: float, waited: float, built: float, following: float) -> float:
    """Estimate a cycle's seconds if the next one, built in its time, had taken as long to build as itself.

    Without it a plain step between cycles that draft seems as slow as they are to build. A device that the host had
    to wait for was busy all the time, and hides a quicker host.
    """
    more = built - following
    if waited > HOST_BOUND * seconds:
        return seconds + max(0.0, more - waited)
    return max(seconds + more, LEAST * seconds)
