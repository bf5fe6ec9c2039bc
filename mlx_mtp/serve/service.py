"""Hold the state that all routes share, and choose the model of a request."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from .catalog import Offer
from .engine import Engine
from .fields import ModelInfo, Refused
from .guard import Rules
from .job import Job
from .metrics import Metrics
from .models import Models

T = TypeVar("T")


@dataclass
class Service:
    """The state that all routes share. timeout: seconds of a request.

    engine: of the one model, or of several. info: of the one model, None until it is first loaded; of several None.
    """

    engine: Engine | Models
    metrics: Metrics
    rules: Rules
    timeout: float = float("inf")
    info: ModelInfo | None = None

    @property
    def models(self) -> Models | None:
        """The models of a server for several; None for a server of one model."""
        return self.engine if isinstance(self.engine, Models) else None

    def ready(self) -> ModelInfo:
        """Return the one model's facts; raises Refused (503) before its first load or after a failure."""
        if self.info is None or self.engine.state == "failed":
            raise Refused("the model is still loading, or has failed; repeat the request later", status=503)
        return self.info

    @contextlib.asynccontextmanager
    async def model_of(self, body: dict[str, Any], request: Request) -> AsyncIterator[tuple[ModelInfo, Engine]]:
        """Yield the facts and the engine of the model that a request names, which stays loaded within the block.

        With several models the block begins once the model is loaded. Raises Refused for an unknown or unusable one,
        QueueFull without room in the queue, and ClientDisconnect if the client disconnects before.
        """
        if not isinstance(self.engine, Models):
            yield self.ready(), self.engine
            return
        models, slot = self.engine, self.engine.named(body)
        info = await unless_gone(request, models.take(slot, time.monotonic() + self.timeout))
        try:
            yield info, slot.engine
        finally:
            models.give_back(slot)

    def submit(self, engine: Engine, jobs: list[Job]) -> None:
        """Queue all jobs of a request at an engine, or none. Raises QueueFull as `Engine.submit`."""
        if isinstance(self.engine, Models):
            self.engine.submit(engine, jobs)
        else:
            engine.submit(jobs)

    def offers(self) -> list[Offer]:
        """Return the models under each of their names, those of one model with its adapters too.

        Raises Refused (503) before they are known.
        """
        models = self.models
        if models is None:
            info = self.ready()
            facts: Any = {"context": info.positions, "size": info.size, "family": info.family, "stored": info.stored}
            facts |= {"created": info.created, "sees": info.vision is not None}
            return [Offer(name, **facts) for name in info.listed]
        models.named({})  # may raise
        return [models.offer_of(name) for name in models.names]


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects before, cancel it and raise ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task,))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
