"""Serve the routes that describe the server: `GET /health`, `/v1/models` and `/v1/models/NAME`."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .catalog import Offer
from .fields import unknown_model
from .models import Models
from .service import Service


async def health(request: Request) -> Response:
    """Return status 200 and "ok", or 503 and "loading" or "failed", as the member `status` of a JSON object.

    Of one model: "loading" during any load; "ok" while it is unloaded, since a request loads it. Of several:
    "loading" until they are listed; the body also has the members of `_states`, with models' names if the request
    has the API key or none is required.
    """
    service: Service = request.app.state.service
    engine, states = service.engine, {}
    waits = engine.state in ("loading", "failed")
    if isinstance(engine, Models):
        states = _states(engine, named=service.rules.has_key(request.headers))
    else:
        waits = waits or service.info is None
    return JSONResponse({"status": engine.state if waits else "ok", **states}, 503 if waits else 200)


def _states(models: Models, *, named: bool) -> dict[str, Any]:
    """Return {"queued": number of queued requests and jobs} and, during a load, "loading": its stage, done and total.

    named: also with the name of the model that is loading, "models": the state of each by its name, and "skipped".
    """
    found: dict[str, Any] = {"queued": models.queued}
    if slot := models.loading:
        stage, done, total = slot.progress or ("Opening files", 0, 0)
        found["loading"] = {
            "stage": stage,
            "done": done,
            "total": total,
            **({"model": slot.offer.name} if named else {}),
        }
    if named:
        states = {name: _state(slot) for name, slot in models.slots.items()}
        found |= {"models": states, "skipped": skipped(models)}
    return found


def _state(slot: Any) -> dict[str, Any]:
    return {"state": slot.state, "loads": slot.loads, **({"error": slot.error} if slot.error else {})}


def skipped(models: Models) -> list[dict[str, str]]:
    """Return {"id": name, "reason": ...} for each model that cannot be served."""
    return [{"id": each.name, "reason": each.shown_problem} for each in models.skipped]


async def models(request: Request) -> Response:
    """Return a list of all names of models, with the fields of OpenAI's and Anthropic's APIs.

    Of several models also "skipped": those that cannot be served. Raises Refused (503) before the models are known.
    """
    service: Service = request.app.state.service
    found = [_model(offer) for offer in service.offers()]
    ends = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
    more = {"skipped": skipped(service.models)} if service.models else {}
    return JSONResponse({"object": "list", "data": found, **ends, **more})


async def model(request: Request) -> Response:
    """Return the entry of one model, by the name in the path. Raises Refused as `offer_of`."""
    service, name = request.app.state.service, request.path_params["name"]
    return JSONResponse(_model(offer_of(service, name)))


def offer_of(service: Service, name: str) -> Offer:
    """Return the `Offer` of a model under this name. Refused: 404 for an unknown name, 503 before any is known."""
    if service.models:
        service.models.named({"model": name})
        return service.models.offer_of(name)
    if not service.ready().has_name(name):
        raise unknown_model(name, service.ready().listed)
    offers = service.offers()
    return next((offer for offer in offers if offer.name == name), offers[0]).called(name)


def _model(offer: Offer) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(offer.created))
    openai = {"id": offer.name, "object": "model", "created": offer.created, "owned_by": "mlx_mtp"}
    anthropic = {"type": "model", "display_name": offer.name, "created_at": created}
    modalities = ["text", "image"] if offer.sees else ["text"]
    return {**openai, **anthropic, "max_model_len": offer.context, "input_modalities": modalities}
