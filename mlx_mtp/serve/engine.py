"""Own MLX on one thread: load the model there, read a chunk of each prompt in turn, decode all answers together."""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..machine.errors import first_line
from ..machine.memory import wired
from ..machine.stream import in_turn
from .follow import AHEAD, as_json
from .job import Ask, Failed, Job, Served, answer, read_end, reread, store

Steps = Generator[None, None, PromptCache]
log = logging.getLogger("mlx_mtp.serve")
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
    """The thread, its queue, and where it stands.

    load:   makes what is served, on the engine's thread; ready: is called there when it was made first.
    store:  keeps the tree's prefixes when the engine ends.
    state:  "loading", "ready", "unloaded" or "failed", whose reason is `error`.
    waiting: how many jobs were submitted and have not begun.
    """

    load: Callable[[], Served]
    limits: Limits = field(default_factory=Limits)
    ready: Callable[[], None] = lambda: None
    store: Callable[[Served], None] = lambda served: None
    state: str = "loading"
    error: BaseException | None = None
    served: Served | None = None
    running: list[tuple[Job, Steps]] = field(default_factory=list)
    waiting: int = 0

    def __post_init__(self):
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._behind: deque[tuple[Job, PromptCache]] = deque(maxlen=BEHIND)
        self._rereads: Iterator[int] | None = None
        self._answered: list[int] = []  # the last prompt whose answer is over
        self._unsaved: float | None = None  # when the last answer ended, None once its prefix is in a file
        self._stopping: float | None = None
        self._opened = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="mlx-mtp engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs of one request; raises Full where there is no room for them, or the engine is ending."""
        with self._lock:
            if self._stopping is not None or self.waiting + len(jobs) > self.limits.waiting:
                raise Full
            self.waiting += len(jobs)
        for job in jobs:
            self._asked.put(job)

    def stop(self, grace: float) -> None:
        """End: what runs may go on for `grace` seconds, then it is cancelled."""
        with self._lock:
            self._stopping = time.monotonic() + grace
        self._asked.put(None)  # ends the wait for a request

    def _run(self) -> None:
        try:
            with wired():
                if self._loaded():
                    while self._turn():
                        pass
                if self.served:
                    self.store(self.served)
        except BaseException as e:
            self.state, self.error = "failed", e
            log.exception("the engine ended")
        finally:
            self._fail_all()
            self._let_go()

    def _loaded(self) -> bool:
        """Load the model, if it is not; tell whether there is one."""
        if self.served is not None:
            return True
        self.state = "loading"
        try:
            with in_turn():
                self.served = self.load()
        except BaseException as e:
            self.state, self.error = "failed", e
            return False
        self.state = "ready"
        if not self._opened:
            self._opened = True
            self.ready()
        return True

    def _turn(self) -> bool:
        """Advance all running jobs by a chunk or a cycle, or use idle time; tell whether to go on."""
        self._collect()
        ending = self._stopping is not None
        if ending and (not self.running or time.monotonic() > (self._stopping or 0)):
            return False
        if self._waiting and not self._loaded():
            return False
        while self._waiting and len(self.running) < self.limits.at_once and self.served:
            job = self._waiting.popleft()
            with self._lock:
                self.waiting -= 1
            self._tell("begin", id(job), job.ask)
            self.running.append((job, answer(self.served, job, self._crowded)))
        self.running.sort(key=lambda running: running[0].reading)  # who decodes has something to tell
        self.running = [(job, steps) for job, steps in self.running if self._advanced(job, steps)]
        if self.served and self.served.together:
            self.served.together.step()
        if not self.running and not self._waiting and not ending:
            self._idle()
        return True

    def _tell(self, word: str, number: int = AHEAD, what: Any = None) -> None:
        """Let the other ranks, where there are any, do the same."""
        if self.served and self.served.ranks:
            self.served.ranks.told((word, number, as_json(what) if isinstance(what, Ask) else what))

    def _let_go(self) -> None:
        """Let go of the model, and of the batch."""
        if self.served and self.served.together:
            self.served.together.close()
        self.served = None

    def _crowded(self) -> bool:
        return len(self.running) > 1

    def _collect(self, timeout: float = 0.0) -> None:
        """Take new requests from the queue; wait for one at most `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            while True:
                if job := self._asked.get(timeout=timeout):
                    self._waiting.append(job)
                timeout = 0.0

    def _advanced(self, job: Job, steps: Steps) -> bool:
        """Take one step of a job; tell whether there are more. What goes wrong in it is its own."""
        try:
            with in_turn():
                if not (job.cancelled or time.monotonic() > job.deadline):
                    self._tell("step", id(job))
                    next(steps)
                    return True
                self._tell("close", id(job))
                steps.close()
            if not job.cancelled:
                job.emit(Failed(504, "the time limit of a request is over (--timeout)"))
        except StopIteration as end:
            self._behind.append((job, end.value))
        except ValueError as e:
            job.emit(Failed(400, first_line(e)))
        except Exception as e:
            log.exception("a request failed")
            job.emit(Failed(500, f"{type(e).__name__}: {first_line(e)}"))
        self._unsaved = time.monotonic()
        return False

    def _idle(self) -> None:
        """Read the beginning of what may be asked next; with nothing to read wait for a request, or unload."""
        if self._rereads is None and self._behind and self.served:
            job, cache = self._behind.popleft()
            prompt = job.ask.follows(job.parts) if job.ask.follows else []
            self._tell("read ahead", what=prompt)
            self._rereads, self._answered = reread(self.served, prompt, cache), job.ask.prompt
        if self._rereads is not None:
            try:
                with in_turn():
                    self._tell("step")
                    next(self._rereads)
            except Exception as e:  # nobody has asked for it, nor is told
                self._rereads = None
                if not isinstance(e, StopIteration):
                    log.warning("not read ahead: %s", first_line(e))
        elif self.served and self._answered and self.served.tree.decoded:
            self._collect(CALM)
            if not self._waiting:
                self._rereads, self._answered = read_end(self.served, self._answered), []
        elif self.served and self._unsaved is not None:
            self._store_piece(self.served, self._unsaved)
        else:
            self._collect(min(self.limits.idle_unload, threading.TIMEOUT_MAX))
            if self.served and not self._waiting and self._stopping is None:
                self.store(self.served)
                self._let_go()
                self.state = "unloaded"
                mx.clear_cache()

    def _store_piece(self, served: Served, ended: float) -> None:
        """Write a piece of the prefix cache to a file, once no request has arrived for CALM seconds."""
        if (rest := ended + CALM - time.monotonic()) > 0:
            self._collect(rest)
            return
        try:
            with in_turn():
                self._unsaved = ended if store(served) else None
        except Exception as e:  # nobody has asked for it
            self._unsaved = None
            log.warning("prefix cache not stored: %s", first_line(e))

    def _fail_all(self) -> None:
        """Tell everybody who waits that there will be no answer."""
        self._collect()
        self._tell("end")
        with self._lock:
            self._stopping = self._stopping or 0.0
        for _, steps in self.running:
            steps.close()
        for job in [*(job for job, _ in self.running), *self._waiting]:
            job.emit(Failed(503, "the server is shutting down"))
        self.running, self._waiting = [], deque()
