"""Run several models on one thread: load each on demand, and unload the least recently used for room."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..checkpoint.load import UNTRUSTED
from ..machine import memory
from ..machine.errors import first_line, with_type, without_directories
from ..machine.memory import in_gb
from ..machine.progress import watcher
from ..machine.stream import in_turn
from .catalog import ModelFacts
from .engine import ENDING, TIMED_OUT, Engine
from .failures import QUIET, dropped, log, printable, take_turns
from .fields import LATEST, ModelInfo, Refused, text, unknown_model
from .job import Job, RequestFailed, Served
from .limits import JobLimits, QueueFull
from .slot import ModelSlot, Ready, Ticket

NOT_RUN = "it is code of the checkpoint, which this server does not run"


@dataclass
class Models:
    """The thread that runs several models, with the queue of requests that wait for one; the caller starts `thread`.

    It has the interface of `Engine` that the server and the metrics use. One model is loaded at a time, on a thread
    of its own, and loaded models continue meanwhile. A request for a loaded model waits for the load of another model
    only if its own is to be unloaded for that one, and only if the request arrives after this was decided.

    find: lists the models; called on that thread at its start. load: loads one, on the thread of the load.
    ready: called once the models are listed. store: writes a model's prefix cache to files before it is unloaded.
    most: maximum bytes that MLX may have allocated when a load ends; None: what is available at the start.
    aliases: other names of the first model; "*" allows any. slots: the models that can be served, by name; skipped:
    the others.
    state: "loading" until the models are listed, then "ready"; "failed" if the exception `error` ended the thread.
    """

    find: Callable[[], list[ModelFacts]]
    load: Callable[[ModelFacts], Ready]
    limits: JobLimits = field(default_factory=JobLimits)
    ready: Callable[[], None] = lambda: None
    store: Callable[[Served], None] = lambda served: None
    most: int | None = None
    aliases: tuple[str, ...] = ()
    state: str = "loading"
    error: BaseException | None = None
    slots: dict[str, ModelSlot] = field(default_factory=dict)
    skipped: list[ModelFacts] = field(default_factory=list)

    def __post_init__(self):
        self.signal, self.lock = threading.Event(), threading.Lock()
        self._tickets: list[Ticket] = []
        self._claimed: set[ModelSlot] = set()  # get no new requests: they are unloaded once their answers have ended
        self.loading: ModelSlot | None = None  # the model that is being loaded
        self._loaded: list[tuple[ModelSlot, Ready | RequestFailed]] = []  # results of the loading thread
        self._stopping: float | None = None
        self.limit = memory.available().bytes + mx.get_active_memory() if self.most is None else self.most
        self.thread = threading.Thread(target=self._run, name="mlx-mtp engine", daemon=True)

    @property
    def engines(self) -> list[Engine]:
        """The engines of the loaded models."""
        return [slot.engine for slot in self._ready]

    @property
    def _ready(self) -> list[ModelSlot]:
        return [slot for slot in [*self.slots.values()] if slot.ready]

    @property
    def running(self) -> list[Any]:
        """The active jobs of all models."""
        return [each for engine in self.engines for each in engine.running]

    @property
    def queued(self) -> int:
        """Number of requests that wait for a model, and of jobs that were submitted and have not begun."""
        return len(self._tickets) + sum(engine.queued for engine in self.engines)

    def named(self, body: dict[str, Any]) -> ModelSlot:
        """Return the slot of the model that a request names in `model`, by default of the first model.

        Raises Refused: 503 before the models are listed, 404 for an unknown name, 400 for a value that is no text.
        """
        if not self.slots:
            raise Refused("the models are still being listed; repeat the request later", status=503)
        first = next(iter(self.slots.values()))
        if body.get("model") is None:
            return first
        name = text(body, "model")
        for known in (name, name.removesuffix(LATEST)):
            if found := self.slots.get(known) or (first if known in self.aliases else None):
                return found
        if "*" in self.aliases:
            return first
        problem = next((f" ({each.shown_problem})" for each in self.skipped if each.name == name), "")
        raise unknown_model(name, self.names, problem)

    @property
    def names(self) -> list[str]:
        """The names that requests may use: those of the models, then the aliases of the first one without "*"."""
        return [*self.slots, *(alias for alias in self.aliases if alias != "*")]

    def offer_of(self, name: str) -> ModelFacts:
        """Return the `ModelFacts` of a model under one of `names`; if it is loaded, with the context of the load.

        Raises Refused as `named` does.
        """
        slot = self.named({"model": name})
        context = slot.ready.info.positions if slot.ready else slot.offer.context
        return replace(slot.offer, name=name, context=context)

    async def take(self, slot: ModelSlot, until: float) -> ModelInfo:
        """Return a model's facts for requests, once it is loaded; it stays loaded until the caller calls `give_back`.

        Raises Refused if the model cannot be loaded, if it is not loaded at `until` (of time.monotonic()), and if the
        server ends before; QueueFull without room in the queue, or if the server is ending.
        """
        if slot.offer.needed > self.limit:
            needs = f"needs {in_gb(slot.offer.needed)} GB, and the limit is {in_gb(self.limit)} GB (--max-memory, or "
            needs += "what was available at the server's start)"
            raise Refused(f"model={slot.offer.name!r} {needs}; choose a smaller model", param="model")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[RequestFailed | None] = loop.create_future()
        ticket = Ticket(slot, partial(_answer, loop, done))
        with self.lock:
            if self._stopping is not None or self.queued >= self.limits.queued:
                raise QueueFull
            self._tickets.append(ticket)
        self.signal.set()
        try:
            async with asyncio.timeout(None if until == float("inf") else until - time.monotonic()):
                failed = await done
        except BaseException as e:
            self._leave(ticket)
            if isinstance(e, TimeoutError):
                raise Refused(TIMED_OUT.message, status=TIMED_OUT.status) from None
            raise
        ready = slot.ready
        if failed or ready is None:  # the server may have ended since the model was granted
            failed = failed or ENDING
            raise Refused(failed.message, status=failed.status)
        return ready.info

    def _leave(self, ticket: Ticket) -> None:
        """Remove a request that no longer waits from the queue, or give its model back if it was granted already."""
        with self.lock:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            ticket.slot.pins -= ticket.granted
        self.signal.set()

    def give_back(self, slot: ModelSlot) -> None:
        """End the use of a model that `take` has granted; its queued and active jobs keep it loaded."""
        with self.lock:
            slot.pins -= 1
        self.signal.set()

    def submit(self, engine: Engine, jobs: list[Job]) -> None:
        """Queue all jobs of a request at their model's engine, or none.

        Raises QueueFull without room for all in the queue that all models share, or if the server is ending.
        """
        with self.lock:
            if self._stopping is not None or self.queued + len(jobs) > self.limits.queued:
                raise QueueFull
            engine.submit(jobs)

    def stop(self, grace: float) -> None:
        """End the thread once no job is active, or after `grace` seconds; return without waiting for its end.

        From now on `take` and `submit` raise QueueFull. At the end, remaining jobs and requests that still wait for a
        model fail (503).
        """
        with self.lock:
            self._stopping = time.monotonic() + grace
        self.signal.set()

    def _run(self) -> None:
        try:
            self._list()
            take_turns(lambda: self._turn())
        except BaseException as e:
            self.state, self.error = "failed", e
            log.exception("the engine ended")
        finally:
            with self.lock:
                self._stopping = self._stopping or 0.0
                waiting, self._tickets = self._tickets, []
            for ticket in waiting:
                ticket.resolve(ENDING)
            for slot in self._ready:
                slot.ready = None
                slot.engine.close()

    def _list(self) -> None:
        """Set `slots` and `skipped`; warn of each skipped model. Raises ValueError if no model can be served."""
        unused: Any = None
        offers, slots = self.find(), {}
        self.skipped = [offer for offer in offers if offer.problem]
        for offer in self.skipped:
            log.warning("%s is not served: %s", offer.name, offer.problem)
        for offer in offers:
            if not offer.problem:
                engine = Engine(unused, self.limits, store=self.store, state="unloaded", signal=self.signal)
                slots[offer.name] = ModelSlot(offer, engine)
        if not slots:
            problems = "; ".join(offer.problem for offer in offers)
            raise ValueError(f"no model can be served: {problems or 'none was found'}")
        self.slots = slots
        self.state = "ready"
        with dropped("the start was not reported"):
            self.ready()

    def _turn(self) -> bool:
        """Grant models, begin queued jobs and advance each active job by a chunk or a cycle; else background work.

        Returns False to end, after `stop`.
        """
        ending = self._stopping is not None
        if ending and (not self.running or time.monotonic() > (self._stopping or 0)):
            return False
        self._end_load()
        self._grant()
        for engine in self.engines:
            engine.end_due()
        while (waiting := [e for e in self.engines if e.queued]) and len(self.running) < self.limits.active:
            min(waiting, key=lambda engine: engine.oldest).begin()
        for slot in self._ready:
            if slot.is_busy:
                slot.used = time.monotonic()
                slot.engine.advance()
        if not any(engine.is_busy for engine in self.engines) and not ending:
            self._idle()
        return True

    def _grant(self) -> None:
        """Grant loaded models to the requests that wait for them, except claimed ones (see `_make_room`).

        Start the load for the first request of the others, if no load runs and there is room.
        """
        with self.lock:
            target = next((ticket.slot for ticket in self._tickets if not ticket.slot.ready), None)
            if target is None:
                self._claimed.clear()  # the requests for which models were claimed have left
            ready = [ticket for ticket in self._tickets if ticket.slot.ready and ticket.slot not in self._claimed]
            self._resolve(ready, None)
        if target and not self.loading and self._make_room(target):
            self.loading, target.engine.state = target, "loading"
            name = f"mlx-mtp load of {target.offer.name}"
            threading.Thread(target=self._load, args=(target,), name=name, daemon=True).start()

    def _resolve(self, tickets: list[Ticket], failed: RequestFailed | None) -> None:
        """Remove requests from the queue: grant them their model, or send a failure. The caller holds the lock."""
        for ticket in tickets:
            self._tickets.remove(ticket)
            if failed is None:
                ticket.granted = True
                ticket.slot.pins += 1
                ticket.slot.used = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it the connection
                ticket.resolve(failed)

    def _make_room(self, target: ModelSlot) -> bool:
        """Unload models without requests, the least recently used first, until `target` fits.

        Return True if it fits, or if no other model is loaded. If these models do not suffice, return False and claim
        models with requests: they get no new requests, so that a later call unloads them.
        """
        if self._claimed and all(slot.is_busy for slot in self._ready):
            return False  # memory is measured again once a model can be unloaded
        self._claimed.clear()
        for slot in sorted(self._ready, key=lambda slot: slot.used):
            if self._lacking(target) <= 0:
                return True
            self._unload(slot)
        if (lacking := self._lacking(target)) <= 0 or not self._ready:
            return True  # without another model the load itself checks the memory
        for slot in sorted(self._ready, key=lambda slot: slot.used):
            if lacking > 0:
                self._claimed.add(slot)
                lacking -= slot.nbytes
        return False

    def _lacking(self, target: ModelSlot) -> int:
        """Return the bytes that a load lacks within the limit and the memory available now; 0 or less if it fits."""
        lacking = target.offer.needed - (self.limit - mx.get_active_memory())
        return lacking if lacking > 0 else target.offer.needed - memory.available().bytes

    def _unload(self, slot: ModelSlot) -> None:
        """Unload a model, unless a request has been granted it or its engine has jobs."""
        with self.lock:
            if slot.is_busy:
                return
            slot.ready, slot.engine.idle_unload = None, self.limits.idle_unload
        slot.engine.unload()
        log.info("%s: unloaded; %s GB are in use", slot.offer.name, in_gb(mx.get_active_memory()))

    def _load(self, slot: ModelSlot) -> None:
        """Load a model, on a thread of its own; `_end_load` receives the result.

        Of an exception only the text is kept: its traceback would keep the weights that were read.
        """
        watcher.set(slot.show)
        try:
            with in_turn():
                found: Ready | RequestFailed = self.load(slot.offer)
        except BaseException as e:
            reason = first_line(e) if isinstance(e, ValueError) else with_type(e)
            with dropped("an error has no text"):
                line = printable(f"{slot.offer.name} was not loaded: {reason}")
                log.error("%s", line, exc_info=None if isinstance(e, ValueError) else e)
            reason = without_directories(reason.replace(UNTRUSTED, NOT_RUN), slot.offer.path.parent)
            found = RequestFailed(503, f"model={slot.offer.name!r} cannot be loaded: {reason}")
        self._loaded.append((slot, found))
        self.signal.set()

    def _end_load(self) -> None:
        """If the load has ended, open its model or note its error; grant or fail the requests that wait for it."""
        if not self._loaded:
            return
        slot, found = self._loaded.pop()
        self.loading = slot.progress = None
        slot.error = "" if isinstance(found, Ready) else found.message
        if isinstance(found, Ready):
            slot.engine.open(found.served)
            slot.ready, slot.loads = found, slot.loads + 1
            log.info("%s: loaded; %s GB are in use", slot.offer.name, in_gb(mx.get_active_memory()))
        else:
            slot.engine.unload()  # frees what the failed load has read
        with self.lock:
            waiting = [ticket for ticket in self._tickets if ticket.slot is slot]
            self._resolve(waiting, None if isinstance(found, Ready) else found)

    def _idle(self) -> None:
        """Unload models that have been idle for `idle_unload`, else do a step of background work, else wait.

        While no load runs, the least recently used of several loaded models is also unloaded if MLX has allocated
        more than the limit. A model that a request has been granted is not idle; `signal` ends the wait.
        """
        slots = sorted((slot for slot in self._ready if not slot.pins), key=lambda slot: slot.used)
        left = [slot.used + slot.engine.idle_unload - time.monotonic() for slot in slots]
        idle = [slot for slot, seconds in zip(slots, left, strict=True) if seconds <= 0]
        if not (idle or self.loading) and len(self._ready) > 1 and mx.get_active_memory() > self.limit:
            idle = slots[:1]
        for slot in idle:
            self._unload(slot)
        if not idle and not any(engine.background() for engine in self.engines):
            waits = self._tickets and not self.loading  # for a model that a request holds without a job
            self.signal.wait(QUIET if waits else min([*left, threading.TIMEOUT_MAX]))
            self.signal.clear()


def _answer(loop: asyncio.AbstractEventLoop, done: asyncio.Future, failed: RequestFailed | None) -> None:
    """Set the result of a future of another thread's event loop, unless the future is done."""
    loop.call_soon_threadsafe(lambda: done.done() or done.set_result(failed))
