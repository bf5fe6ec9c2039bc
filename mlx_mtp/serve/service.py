"""Hold the state that all routes share, and choose the model of a request."""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from .body import parsed_body
from .catalog import ModelFacts
from .engine import Engine
from .fields import ModelInfo, Refused
from .guard import Rules
from .job import Job
from .metrics import Metrics
from .models import Models
from .preparation import Preparations, Work, unless_gone


@dataclass
class Service:
    """The state that all routes share. timeout: maximum seconds of a request.

    engine: the `Engine` of the one model, or the `Models` of several. info: facts about the one model, None until its
    first load; of several models always None.
    """

    engine: Engine | Models
    metrics: Metrics
    rules: Rules
    timeout: float = float("inf")
    info: ModelInfo | None = None
    preparations: Preparations = field(default_factory=Preparations)

    @property
    def models(self) -> Models | None:
        """The `Models` of a server of several models; None on a server of one model."""
        return self.engine if isinstance(self.engine, Models) else None

    def ready(self) -> ModelInfo:
        """Return the facts about the one model; Refused (503) before its first load, or if its engine has failed."""
        if self.info is None or self.engine.state == "failed":
            raise Refused("the model is still loading, or has failed; repeat the request later", status=503)
        return self.info

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[tuple[dict[str, Any], Work]]:
        """Yield the JSON object in a request's body, and the work on the request, which the block may continue.

        Raises Refused as `Preparations.body` and `parsed_body`, QueueFull if requests in preparation and queued jobs
        leave no room, and ClientDisconnect.
        """
        engines = self.models.engines if self.models else [self.engine]
        async with self.preparations.body(request, self.rules.body) as content:
            queued = sum(engine.queued for engine in engines)
            with self.preparations.place(request, len(content), queued, self.engine.limits.queued) as work:
                yield await work.run(parsed_body, content), work

    @contextlib.asynccontextmanager
    async def model_of(self, body: dict[str, Any], request: Request) -> AsyncIterator[tuple[ModelInfo, Engine]]:
        """Yield (facts, engine) of the model for a request.

        On a server of one model: that model, whatever name is in `body`; raises Refused as `ready`. With several: the
        model that `body` names, which is loaded first and stays loaded within the block; raises Refused for an
        unknown model or one that cannot be loaded, QueueFull without room in the queue, and ClientDisconnect if the
        client disconnects before the load ends.
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
        """Queue all jobs of a request at its model's engine, or none; raises QueueFull as `Engine.submit`."""
        if isinstance(self.engine, Models):
            self.engine.submit(engine, jobs)
        else:
            engine.submit(jobs)

    def offers(self) -> list[ModelFacts]:
        """Return an `ModelFacts` for each name that requests may use, except "*".

        Of one model these are `ModelInfo.listed`, of several `Models.names`. Raises Refused (503) before the first
        load of one model, and before several are listed.
        """
        models = self.models
        if models is None:
            info = self.ready()
            facts: Any = {"context": info.positions, "size": info.size, "family": info.family, "stored": info.stored}
            facts |= {"path": info.path, "created": info.created, "sees": info.vision is not None}
            return [ModelFacts(name, adapter=info.adapter_of({"model": name}) or "", **facts) for name in info.listed]
        models.named({})  # may raise
        return [models.offer_of(name) for name in models.names]
