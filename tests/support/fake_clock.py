"""Run threads on a clock that advances only when all of them sleep, so that times are exact and tests fast."""

import contextlib
import threading


class Ended(BaseException):
    """Raised in a thread to end it."""


class Clock:
    """Replaces the module `time` for threads that `run` starts. stops: by name, the time at which a thread hangs."""

    def __init__(self, stops: dict[str, float]):
        self.now, self.stops, self.ended = 0.0, stops, {}
        self._sleeps_until: dict[str, float | None] = {}
        self._turn = threading.Condition()

    def run(self, jobs: dict[str, object]) -> dict[str, float]:
        """Run named jobs until they end; return the times of those that did not hang."""
        self._sleeps_until = dict.fromkeys(jobs)
        threads = [threading.Thread(target=self._run, args=job, name=job[0]) for job in jobs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.ended

    def _run(self, name: str, job) -> None:
        with contextlib.suppress(Ended):
            job()
        with self._turn:
            del self._sleeps_until[name]
            if self.now < self.stops.get(name, float("inf")):
                self.ended[name] = self.now
            self._advance()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        name = threading.current_thread().name
        with self._turn:
            self._sleeps_until[name] = end = self.now + seconds
            self._advance()
            self._turn.wait_for(lambda: self.now >= end)
            if self.now >= self.stops.get(name, float("inf")):
                raise Ended
            self._sleeps_until[name] = None

    def _advance(self) -> None:
        """Advance to the earliest end of a sleep if all threads sleep."""
        ends = self._sleeps_until.values()
        if ends and all(end is not None and end > self.now for end in ends):
            self.now = min(ends)
            self._turn.notify_all()
