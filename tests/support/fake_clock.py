"""Run threads on a clock that moves only when all of them sleep, so that seconds cost nothing and are exact."""

import contextlib
import threading


class Over(BaseException):
    """Ends a thread of the clock."""


class Clock:
    """Stands in for the module `time`. Threads begin in `run`; `stops` by name: the time from which one sleeps on."""

    def __init__(self, stops: dict[str, float]):
        self.now, self.stops, self.ended = 0.0, stops, {}
        self._wakes: dict[str, float | None] = {}
        self._turn = threading.Condition()

    def run(self, jobs: dict[str, object]) -> dict[str, float]:
        """Run the jobs, by their names, to their ends; returns when each of them has raised Over."""
        self._wakes = dict.fromkeys(jobs)
        threads = [threading.Thread(target=self._run, args=job, name=job[0]) for job in jobs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.ended

    def _run(self, name: str, job) -> None:
        with contextlib.suppress(Over):
            job()
        with self._turn:
            del self._wakes[name]
            if self.now < self.stops.get(name, float("inf")):
                self.ended[name] = self.now
            self._move()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        name = threading.current_thread().name
        with self._turn:
            self._wakes[name] = wake = self.now + seconds
            self._move()
            self._turn.wait_for(lambda: self.now >= wake)
            if self.now >= self.stops.get(name, float("inf")):
                raise Over
            self._wakes[name] = None

    def _move(self) -> None:
        """Move to the next time at which a thread wakes, once none is awake."""
        wakes = self._wakes.values()
        if wakes and all(wake is not None and wake > self.now for wake in wakes):
            self.now = min(wakes)
            self._turn.notify_all()
