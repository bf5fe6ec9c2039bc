"""Own MLX on one thread: load the model there, read a chunk of each prompt in turn, decode all answers together."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..cache.prompt_prefix import shared
from ..machine.errors import first_line, with_type
from ..machine.stream import in_turn
from .failures import dropped
from .follow import AHEAD, as_json
from .job import LOST, Ask, Failed, Interrupted, Job, Served, answer, compare_rows, keep, read_end, reread, store

Steps = Generator[None, None, PromptCache | None]
log = logging.getLogger("mlx_mtp.serve")
TOO_LATE = Failed(504, "the time limit of a request is over (--timeout)")
OVER: Any = object()  # stands for the end of background work
ENDING = Failed(503, "the server is shutting down")
BEHIND = 4  # answers that idle time is to read again, at most
CALM = 0.05  # seconds without a request, after which there is time for what is seldom asked


@dataclass
class Limits:
    """How many requests are answered at once, how many wait, and how many idle seconds unload the model."""

    at_once: int = 8
    waiting: int = 64
    idle_unload: float = float("inf")


class Full(Exception):
    """As many requests wait as may."""


@dataclass
class Engine:
    """The thread, its queue, and its state.

    load:   makes what is served, on the engine's thread; ready: is called there after the first load.
    store:  writes the tree's prefixes to files, when the model is unloaded or the engine ends.
    state:  "loading", "ready", "unloaded" or "failed", whose reason is `error`.

    A failure costs at most the requests that it concerns: each step of a request is guarded by `_advance`, a cycle
    of all of them by `Together.step`, work that no request waits for by `dropped`, and what is left by `_serve`.
    """

    load: Callable[[], Served]
    limits: Limits = field(default_factory=Limits)
    ready: Callable[[], None] = lambda: None
    store: Callable[[Served], None] = lambda served: None
    state: str = "loading"
    error: BaseException | None = None
    served: Served | None = None
    running: list[tuple[Job, Steps]] = field(default_factory=list)

    def __post_init__(self):
        self._waiting: deque[Job] = deque()
        self._wake = threading.Event()  # set with each request, and to end
        self._behind: deque[tuple[Job, PromptCache | None]] = deque(maxlen=BEHIND)
        self._ahead: Iterator[Any] | None = None  # reads a prompt that may be requested next
        self._next: list[int] = []  # that prompt
        self._read = 0  # number of its tokens that are read
        self._comparing: Iterator[Any] | None = None  # decides whether the tree may store decoded answers
        self._answered: list[int] = []  # the prompt of the last answer that has ended
        self._unsaved: float | None = None  # when the last answer ended, None once its prefix is in a file
        self._stopping: float | None = None
        self._opened = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="mlx-mtp engine", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of jobs that were submitted and have not begun."""
        return len(self._waiting)

    def start(self) -> None:
        self.thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Queue the jobs of one request; raises Full if there is no room for them, or the engine is ending."""
        with self._lock:
            if self._stopping is not None or self.waiting + len(jobs) > self.limits.waiting:
                raise Full
            self._waiting.extend(jobs)
        self._wake.set()

    def stop(self, grace: float) -> None:
        """End: active jobs may go on for `grace` seconds, then they are cancelled."""
        with self._lock:
            self._stopping = time.monotonic() + grace
        self._wake.set()

    def _run(self) -> None:
        try:
            if self._loaded():
                self._serve()
        except BaseException as e:
            self.state, self.error = "failed", e
            log.exception("the engine ended")
        finally:
            with dropped("requests were not ended"):
                self._fail_all()
            with dropped("the model was not released"):
                self._release()

    def _serve(self) -> None:
        """Take turns until the engine is to end; a turn that raises is followed by the next one."""
        while True:
            try:
                if not self._turn():
                    return
            except BaseException as e:
                with contextlib.suppress(BaseException):
                    log.error("a turn of the engine failed", exc_info=e)
                    time.sleep(CALM)  # a failure that comes again each turn must not fill the log

    def _loaded(self) -> bool:
        """Load the model unless it is loaded; return whether it is. A load that fails later than the first is tried
        again for the next request.
        """
        if self.served is not None:
            return True
        self.state = "loading"
        try:
            with in_turn():
                self.served = self.load()
        except BaseException as e:
            self.served, self.state = None, "unloaded" if self._opened else "failed"
            if self._opened:
                self._refuse_waiting(e)
            else:
                self.error = e
            return False
        self.state = "ready"
        with dropped("rows were not compared"):
            self._comparing = compare_rows(self.served) if self.served.tree.decoded is None else None
        if not self._opened:
            self._opened = True
            with dropped("the start was not reported"):
                self.ready()
        return True

    def _refuse_waiting(self, error: BaseException) -> None:
        """End all jobs that wait for a model that could not be loaded again."""
        log.error("the model was not loaded again", exc_info=error)
        failed = Failed(503, f"the model cannot be loaded: {with_type(error)}")
        for _ in range(len(self._waiting)):  # for a later request the model is loaded again
            self._end(self._waiting[0], None, failed)
            del self._waiting[0]

    def _turn(self) -> bool:
        """Advance all active jobs by a chunk or a cycle, or use idle time; return whether to go on."""
        ending = self._stopping is not None
        if ending and (not self.running or time.monotonic() > (self._stopping or 0)):
            return False
        if self._waiting and not self._loaded():
            return self.error is None
        for job, steps in [running for running in self.running if _is_over(running[0])]:
            self._advance(job, steps)  # first, for what they leave may be of use to those that begin
        while self._waiting and len(self.running) < self.limits.at_once:
            self._begin()
        for job, steps in sorted(self.running, key=lambda running: running[0].reading):  # tokens before prompts
            self._advance(job, steps)
        if self.served and self.served.together:
            self.served.together.step()
        if not self.running and not self._waiting and not ending:
            self._idle()
        return True

    def _begin(self) -> None:
        """Make the job that has waited for longest active, on all ranks."""
        assert self.served
        job = self._waiting[0]
        try:
            with dropped("a prefix was not stored"), in_turn():
                self._keep_for(self.served, job.ask.prompt)
            self._tell("begin", id(job), job.ask)
            self.running.append((job, answer(self.served, job, self._crowded)))
        except BaseException as e:
            self._end(job, None, error=e)
        finally:
            del self._waiting[0]

    def _keep_for(self, served: Served, prompt: list[int]) -> None:
        """Store whatever is not in the tree yet and a prompt begins with: a request may arrive before idle time.

        Of another conversation no less than a chunk: what all have in common may be the first mark of the template.
        """
        for job, cache in self._behind:
            goes_on = prompt[: len(job.ask.prompt)] == job.ask.prompt
            if cache and (goes_on or shared(cache.tokens, prompt) >= served.tree.chunking.least):
                keep(served, prompt[:-1], cache)
        if self._ahead and 0 < self._read <= shared(self._next, prompt):
            ahead, self._ahead = self._ahead, None
            self._tell("close")
            _closed(ahead)

    def _advance(self, job: Job, steps: Steps) -> None:
        """Take one step of a job; an exception ends this job alone."""
        try:
            with in_turn():
                if _is_over(job):
                    self._end(job, steps, TOO_LATE)
                    return
                self._tell("step", id(job))
                try:
                    next(steps)
                    return
                except StopIteration as end:
                    cache = end.value
            self._end(job, None)
            with dropped("the next prompt was not read ahead"), in_turn():
                self._leave(job, cache)
        except BaseException as e:
            self._end(job, steps, error=e)

    def _leave(self, job: Job, cache: PromptCache | None) -> None:
        """Queue an answer for idle time, or store what can be stored of the oldest one without reading it again."""
        assert self.served
        if len(self._behind) == BEHIND:
            self._keep_oldest(self.served)
        self._behind.append((job, None if self.served.tree.decoded is False else cache))

    def _keep_oldest(self, served: Served) -> None:
        """Remove the oldest answer from the queue, and store its rows if they are as if read."""
        _, cache = self._behind.popleft()
        keep(served, cache.tokens if cache else [], cache)

    def _end(
        self, job: Job, steps: Steps | None, failed: Failed | None = None, *, error: BaseException | None = None
    ) -> None:
        """Remove a job; steps: of an answer that has not ended, which are closed on all ranks.

        failed: the last event for the client; error: an exception that it is made of.
        """
        self.running = [running for running in self.running if running[0] is not job]
        job.over, self._unsaved = True, time.monotonic()
        if error is not None:
            failed = LOST
            with dropped("an error has no text"):
                failed = _failed(error)
        if failed and not job.cancelled:
            job.tell(failed)
        if steps or error:
            with dropped("the other ranks were not told"):
                self._tell("close", id(job))
        if steps:
            with dropped("an answer was not closed"), in_turn():
                cache = _closed(steps)
                if not job.reading:
                    self._answered = job.ask.prompt
                    if cache is not None:
                        self._leave(job, cache)

    def _tell(self, word: str, number: int = AHEAD, what: Any = None) -> None:
        """Make the other ranks, if there are any, do the same."""
        if self.served and self.served.ranks:
            self.served.ranks.broadcast((word, number, as_json(what) if isinstance(what, Ask) else what))

    def _release(self) -> None:
        """Write prefixes to files, and release the model and the batch."""
        served, self.served, self._ahead, self._comparing = self.served, None, None, None
        if served:
            with dropped("a prefix was not stored"), in_turn():
                while self._behind:
                    self._keep_oldest(served)
            with dropped("prefixes were not stored"):
                self.store(served)
        if served and served.together:
            with dropped("the batch was not closed"):
                served.together.close()

    def _crowded(self) -> bool:
        return len(self.running) > 1

    def _waits(self, seconds: float) -> bool:
        """Wait for a request, or the end, at most so long; return whether neither came."""
        came = self._wake.wait(min(seconds, threading.TIMEOUT_MAX))
        self._wake.clear()
        return not (came or self._waiting or self._stopping is not None)

    def _idle(self) -> None:
        """Take a step of background work; if there is none, wait for a request and unload the model in time."""
        if self._ahead:
            self._ahead = self._continued(self._ahead, "a prompt was not read ahead")
        elif self.served and self._behind:
            with dropped("the next prompt was not read ahead"):
                self._read_ahead(self.served)
        elif self.served and (self._comparing or (self._answered and self.served.tree.decoded)):
            if self._waits(CALM):
                self._use_calm(self.served)
        elif self.served and self._unsaved is not None:
            self._store_piece(self.served, self._unsaved)
        elif self._waits(self.limits.idle_unload) and self.served:
            self.state = "unloaded"
            self._release()
            mx.clear_cache()

    def _read_ahead(self, served: Served) -> None:
        """Begin to read the conversation of the oldest answer that has ended, as its next prompt will begin."""
        job, cache = self._behind.popleft()
        self._answered, prompt = job.ask.prompt, cache.tokens if cache else []
        if job.ask.follows:
            with dropped("the next prompt was not read ahead"):
                prompt = job.ask.follows(job.parts)
        if prompt:
            self._tell("read ahead", what=prompt)
            with in_turn():
                self._ahead = reread(served, prompt, cache)
            self._next, self._read = prompt, 0

    def _use_calm(self, served: Served) -> None:
        """Take a step of work that is of use later."""
        if self._comparing:
            self._comparing = self._continued(self._comparing, "rows were not compared")
            return
        prompt, self._answered = self._answered, []
        self._next, self._read = prompt, 0
        with dropped("the end of a prompt was not read"):
            self._ahead = read_end(served, prompt)

    def _continued(self, work: Iterator[Any], what: str) -> Iterator[Any] | None:
        """Take a step of background work; return it, None if it has ended or failed. what: begins the log's line."""
        with dropped(what), in_turn():
            if work is self._ahead:
                self._tell("step")
            if (done := next(work, OVER)) is not OVER:
                self._read = done if work is self._ahead else self._read
                return work
        return None

    def _store_piece(self, served: Served, ended: float) -> None:
        """Write a piece of the prefix cache to a file, once no request has arrived for CALM seconds."""
        if (rest := ended + CALM - time.monotonic()) > 0 and not self._waits(rest):
            return
        self._unsaved = None
        with dropped("the prefix cache was not stored"), in_turn():
            self._unsaved = ended if store(served) else None

    def _fail_all(self) -> None:
        """End all jobs: there will be no more answers."""
        with self._lock:
            self._stopping = self._stopping or 0.0
        for job, steps in [*self.running, *((job, None) for job in self._waiting)]:
            with dropped("a request was not ended"):
                self._end(job, steps, ENDING)
        self._waiting.clear()
        with dropped("the other ranks were not told of the end"):
            self._tell("end")


def _is_over(job: Job) -> bool:
    """Return whether a job ends early: its client has disconnected, or its time limit is over."""
    return job.cancelled or time.monotonic() > job.deadline


def _closed(steps: Any) -> PromptCache | None:
    """End an answer or what is read ahead where it stands; return the cache that it leaves, None if it left none."""
    try:
        steps.throw(Interrupted)
    except StopIteration as end:
        return end.value
    except Interrupted:
        return None
    steps.close()
    return None


def _failed(error: BaseException) -> Failed:
    """Make an exception of a request the event that its client gets; only those of the server go into the log."""
    if isinstance(error, ValueError):
        return Failed(400, first_line(error))
    with contextlib.suppress(BaseException):
        log.error("a request failed", exc_info=error)
    return Failed(500, with_type(error))
