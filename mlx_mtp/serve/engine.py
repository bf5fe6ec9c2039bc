"""Run the model on one thread: between two decode cycles of all active jobs, prefill one chunk of each new prompt."""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..cache.prompt_prefix import shared
from ..machine.errors import with_type, without_directories
from ..machine.stream import in_turn
from .endings import FinishedJobs, closed, failed_by, keep_rows, must_end
from .failures import QUIET, dropped, log, take_turns
from .follow import PREFILL, as_json
from .job import (
    LOST,
    DecodeRequest,
    Job,
    RequestFailed,
    Served,
    answer,
    compare_rows,
    prefill_next,
    prefill_tail,
    with_adapter,
)
from .limits import JobLimits, QueueFull

Steps = Generator[None, None, PromptCache | None]
TIMED_OUT = RequestFailed(504, "the request reached its time limit (--timeout)")
DONE: Any = object()  # marks the end of background work
ENDING = RequestFailed(503, "the server is shutting down")


@dataclass
class Engine:
    """The thread that runs the model, with its queue of jobs; the caller starts `thread`.

    Of several models each has an engine whose thread is not started: `Models` calls its methods on one thread.

    load:  loads and returns the model, on that thread. ready: called there after the first load.
    store: writes the prefix cache to files when the model is unloaded or the engine ends.
    state: "loading", "ready", "unloaded" or "failed" (the exception `error` ended the thread).
    served: the model, None while it is not loaded. running: the active jobs, each with its generator.
    signal: set by each request, and by `stop`, to end a wait of the thread; engines that one thread runs share it.
    idle_unload: seconds without a job after which the model is unloaded: those of the last request, or of `limits`.

    An exception ends only the jobs that it concerns: `_advance` catches those of one job, `BatchDecoder.step` those
    of a shared cycle, `dropped` those of background work, `take_turns` all others.
    """

    load: Callable[[], Served]
    limits: JobLimits = field(default_factory=JobLimits)
    ready: Callable[[], None] = lambda: None
    store: Callable[[Served], None] = lambda served: None
    state: str = "loading"
    error: BaseException | None = None
    served: Served | None = None
    running: list[tuple[Job, Steps]] = field(default_factory=list)
    signal: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.idle_unload = self.limits.idle_unload
        self._queue: deque[Job] = deque()
        self._finished = FinishedJobs()
        self._background: Iterator[Any] | None = None  # prefills a prompt that a client may send next
        self._prefill: tuple[str | None, list[int]] = None, []  # its adapter and that prompt
        self._prefilled = 0  # number of its prefilled tokens
        self._comparing: Iterator[Any] | None = None  # decides whether the tree may store decoded rows
        self._last: DecodeRequest | None = None  # of the last finished job
        self._asked: list[int] = []  # the first prompt, for the check of rows
        self._unsaved: float | None = None  # end of the last job; None once its entry is in a file
        self._stopping: float | None = None
        self._opened = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="mlx-mtp engine", daemon=True)

    @property
    def queued(self) -> int:
        """Number of jobs that were submitted and have not begun."""
        return len(self._queue)

    @property
    def is_busy(self) -> bool:
        """Whether jobs are queued or active."""
        return bool(self._queue or self.running)

    @property
    def oldest(self) -> float:
        """time.monotonic() at which the first queued job arrived; infinite if none is queued."""
        return self._queue[0].begun if self._queue else float("inf")

    def submit(self, jobs: list[Job]) -> None:
        """Queue all jobs of a request or none. Raises QueueFull without room for all, or if the engine is ending."""
        with self._lock:
            if self._stopping is not None or self.queued + len(jobs) > self.limits.queued:
                raise QueueFull
            self._queue.extend(jobs)
        self.signal.set()

    def stop(self, grace: float) -> None:
        """Let the engine end, once no job is active or after `grace` seconds; return without waiting for that.

        Until then queued jobs may still begin, but `submit` raises QueueFull. Jobs left at the end fail (503).
        """
        with self._lock:
            self._stopping = time.monotonic() + grace
        self.signal.set()

    def _run(self) -> None:
        try:
            if self._loaded():
                take_turns(lambda: self._turn())
        except BaseException as e:
            self.state, self.error = "failed", e
            log.exception("the engine ended")
        finally:
            self.close()

    def close(self) -> None:
        """End all jobs with status 503, store the prefix cache and release the model; later jobs are refused."""
        with dropped("requests were not ended"):
            self._fail_all()
        with dropped("the model was not released"):
            self._release()

    def _loaded(self) -> bool:
        """Load the model unless it is loaded; return whether it is.

        A failure of the first load ends the engine; one of a later load ends the queued jobs, and the next job
        repeats the load.
        """
        if self.served is not None:
            return True
        self.state = "loading"
        try:
            with in_turn():
                served = self.load()
        except BaseException as e:
            self.served, self.state = None, "unloaded" if self._opened else "failed"
            if self._opened:
                self._fail_queued(e)
            else:
                self.error = e
            return False
        self.open(served)
        if not self._opened:
            self._opened = True
            with dropped("the start was not reported"):
                self.ready()
        return True

    def open(self, served: Served) -> None:
        """Serve a loaded model from now on: set `served`, and the state to "ready"."""
        self.served, self.state = served, "ready"
        with dropped("rows were not compared"):
            self._comparing = compare_rows(served) if served.tree.decoded is None else None

    def _fail_queued(self, error: BaseException) -> None:
        """End all queued jobs with status 503, because the model could not be loaded again."""
        log.error("the model was not loaded again", exc_info=error)
        failed = RequestFailed(503, without_directories(f"the model cannot be loaded: {with_type(error)}"))
        for _ in range(len(self._queue)):  # for a later request the model is loaded again
            self._end(self._queue.popleft(), None, failed)

    def _turn(self) -> bool:
        """Begin queued jobs and advance each active job by a chunk or a cycle; without jobs do background work.

        Loads the model first if jobs are queued. Returns False to end the engine: after `stop`, or if its first load
        failed.
        """
        ending = self._stopping is not None
        if ending and (not self.running or time.monotonic() > (self._stopping or 0)):
            return False
        if self._queue and not self._loaded():
            return self.error is None
        self.end_due()  # first: jobs that begin may reuse their caches
        while self._queue and len(self.running) < self.limits.active:
            self.begin()
        self.advance()
        if not self.is_busy and not ending:
            self._idle()
        return True

    def end_due(self) -> None:
        """End the active jobs that were cancelled or have reached their deadline."""
        for job, steps in [running for running in self.running if must_end(running[0])]:
            self._advance(job, steps)

    def advance(self) -> None:
        """Advance each active job by a step, such as a prefill chunk or a cycle."""
        for job, steps in sorted(self.running, key=lambda running: running[0].prefilling):  # decoding before prefills
            self._advance(job, steps)
        if self.served and self.served.batch:
            self.served.batch.step()

    def begin(self) -> None:
        """Move the first queued job to the active ones, on all ranks; if that raises, end it."""
        assert self.served
        job = self._queue[0]
        try:
            with dropped("a prefix was not stored"), in_turn():
                self._finished.keep_for(self.served, job.request)
                self._end_prefill_for(job.request)
            self._broadcast("begin", id(job), as_json(job.request))
            self.running.append((job, answer(self.served, job, lambda: len(self.running) > 1)))
        except BaseException as e:
            self._end(job, None, e)
        finally:
            del self._queue[0]

    def _end_prefill_for(self, request: DecodeRequest) -> None:
        """End the background prefill if it has read tokens, and a new prompt of its adapter starts with all of these.

        The prefill then gives its last chunk a checkpoint, so that the prompt can continue there.
        """
        adapter, begun = self._prefill
        if self._background and adapter == request.adapter and 0 < self._prefilled <= shared(begun, request.prompt):
            work, self._background = self._background, None
            self._broadcast("close")
            closed(work)

    def _advance(self, job: Job, steps: Steps) -> None:
        """Advance a job by a step, or end it if `must_end(job)`; after its last step or any exception, end it too."""
        try:
            with in_turn():
                if must_end(job):
                    self._end(job, steps, TIMED_OUT)
                    return
                self._broadcast("step", id(job))
                try:
                    next(steps)
                    return
                except StopIteration as end:
                    cache = end.value
            self._end(job, None)
            with dropped("the next prompt was not prefilled"), in_turn():
                assert self.served
                self._finished.add(self.served, job, cache)
        except BaseException as e:
            self._end(job, steps, e)

    def _end(self, job: Job, steps: Steps | None, failed: RequestFailed | BaseException | None = None) -> None:
        """Remove a job. steps: its generator, to close; None if it has ended. Never raises.

        failed: sent as its last event; an exception is converted by `failed_by`. If the closed generator returns a
        cache after its prefill, the conversation is queued for one, or only stored if the client has left.
        """
        self.running = [running for running in self.running if running[0] is not job]
        job.finished, self._unsaved, self._asked = True, time.monotonic(), self._asked or job.request.prompt
        if is_error := isinstance(failed, BaseException):
            error, failed = failed, LOST
            with dropped("an error has no text"):
                failed = failed_by(error)
        if failed and not job.cancelled:
            job.send(failed)
        if steps or is_error:
            with dropped("the other ranks received no message"):
                self._broadcast("close", id(job))
        if steps:
            with dropped("a job was not closed"), in_turn():
                cache = closed(steps)
                if not job.prefilling:
                    self._last = job.request
                    if cache is not None and self.served:
                        (keep_rows if job.cancelled else self._finished.add)(self.served, job, cache)

    def _broadcast(self, action: str, number: int = PREFILL, content: Any = None) -> None:
        """Send an instruction of `follow` to the other ranks, if there are any. number: of the job, or PREFILL."""
        if self.served and self.served.ranks:
            self.served.ranks.broadcast((action, number, content))

    def _release(self) -> None:
        """Store finished jobs' rows, then the prefix cache in files; release model and batch. Failures are logged."""
        served, self.served, self._background, self._comparing = self.served, None, None, None
        self._last = None  # it refers to the tokenizer
        if served:
            with dropped("a prefix was not stored"), in_turn():
                while self._finished:
                    self._finished.keep_oldest(served)
            self._finished.clear()
            with dropped("prefixes were not stored"):
                self.store(served)
            with dropped("the batch was not closed"):
                if served.batch:
                    served.batch.close()

    def _stays_idle(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether neither `signal` nor a request nor `stop` ended the wait."""
        woken = self.signal.wait(min(seconds, threading.TIMEOUT_MAX))
        self.signal.clear()
        return not (woken or self._queue or self._stopping is not None)

    def _idle(self) -> None:
        """Do a step of background work; if none is left, wait for a request, and unload the model after the limit."""
        seconds = self.idle_unload if self.served else threading.TIMEOUT_MAX
        if not self.background() and self._stays_idle(seconds) and self.served:
            self.unload()

    def unload(self) -> None:
        """Store the prefix cache in its files, if it has any; then release the model and MLX's unused memory."""
        self.state = "unloaded"
        self._release()
        gc.collect()  # trees and decoders refer to themselves
        mx.clear_cache()

    def background(self) -> bool:
        """Do a step of background work, some only after QUIET seconds without a request; False if none is left."""
        if self._background:
            self._background = self._continued(self._background, "a prompt was not prefilled")
        elif self.served and self._finished:
            with dropped("the next prompt was not prefilled"):
                self._start_prefill(self.served)
        elif self.served and (self._comparing or (self._last and self.served.tree.decoded)):
            if self._stays_idle(QUIET):
                self._use_quiet_time(self.served)
        elif self.served and self._unsaved is not None:
            self._store_piece(self.served, self._unsaved)
        else:
            return self._check_rows()
        return True

    def _check_rows(self) -> bool:
        """Run a pass of the check of rows, after QUIET seconds without a request; return whether one is due."""
        check = self.served.model.runtime.row_check if self._asked and isinstance(self.served, Served) else None
        if check is None or not check.due:
            return False
        check.tokens = check.tokens or self._asked
        if self._stays_idle(QUIET):
            with dropped("rows were not checked"):
                check.step()
        return True

    def _start_prefill(self, served: Served) -> None:
        """Start to prefill the conversation of the oldest finished job, as its next prompt will encode it.

        If that encoding is unknown or fails, the prompt is the cache's own tokens; without a cache nothing starts.
        """
        job, cache = self._finished.popleft()
        self._last, prompt = job.request, cache.tokens if cache else []
        if job.request.follows:
            with dropped("the next prompt was not prefilled"):
                prompt = job.request.follows(job.parts)
        if prompt:
            self._broadcast("prefill", content=prompt)
            with in_turn():
                self._background = prefill_next(with_adapter(served, job.request.adapter), prompt, cache)
            self._prefill, self._prefilled = (job.request.adapter, prompt), 0

    def _use_quiet_time(self, served: Served) -> None:
        """Do a step of the row comparison, or start to prefill the end of the last prompt in case it is repeated."""
        if self._comparing:
            self._comparing = self._continued(self._comparing, "rows were not compared")
            return
        assert self._last
        (prompt, adapter), self._last = (self._last.prompt, self._last.adapter), None
        self._prefill, self._prefilled = (adapter, prompt), 0
        with dropped("the end of a prompt was not prefilled"):
            self._background = prefill_tail(with_adapter(served, adapter), prompt)

    def _continued(self, work: Iterator[Any], failure: str) -> Iterator[Any] | None:
        """Do a step of background work; return the work, None if it has ended or failed. failure: for the log."""
        with dropped(failure), in_turn():
            if work is self._background:
                self._broadcast("step")
            if (done := next(work, DONE)) is not DONE:
                self._prefilled = done if work is self._background else self._prefilled
                return work
        return None

    def _store_piece(self, served: Served, ended: float) -> None:
        """Wait until QUIET seconds after `ended`, the last job's end; then write a piece of the prefix cache.

        Writes nothing if a request or `stop` ends the wait.
        """
        if (rest := ended + QUIET - time.monotonic()) > 0 and not self._stays_idle(rest):
            return
        self._unsaved = None
        with dropped("the prefix cache was not stored"), in_turn():
            self._unsaved = ended if served.files and served.files.step(served.tree) else None

    def _fail_all(self) -> None:
        """End all active and queued jobs with status 503, and the other ranks; later jobs are refused."""
        with self._lock:
            self._stopping = self._stopping or 0.0
        for job, steps in [*self.running, *((job, None) for job in self._queue)]:
            with dropped("a request was not ended"):
                self._end(job, steps, ENDING)
        self._queue.clear()
        with dropped("the other ranks were not stopped"):
            self._broadcast("end")
