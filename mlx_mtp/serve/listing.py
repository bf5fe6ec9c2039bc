"""Serve the routes that describe the server and its models: `GET /health`, `/v1/models`, and Ollama's."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._version import __version__
from ..checkpoint.stored_template import default_template, stored_template
from .catalog import ModelFacts
from .fields import Refused, text
from .models import Models
from .service import Service

THINKS = ("enable_thinking", "<think>", "reasoning_content", "<|channel>")  # in chat templates
YEAR = 365 * 86400.0  # seconds


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
        states = {
            name: {"state": slot.engine.state, "loads": slot.loads, **({"error": slot.error} if slot.error else {})}
            for name, slot in models.slots.items()
        }
        found |= {"models": states, "skipped": skipped(models)}
    return found


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


def offer_of(service: Service, name: str) -> ModelFacts:
    """Return the facts of the model of this name. Refused: 404 for an unknown name, 503 before any is known."""
    if service.models:
        return service.models.offer_of(name)
    service.ready().called({"model": name})
    offers = service.offers()
    return replace(next((offer for offer in offers if offer.name == name), offers[0]), name=name)


def _model(offer: ModelFacts) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(offer.created))
    openai = {"id": offer.name, "object": "model", "created": offer.created, "owned_by": "mlx_mtp"}
    anthropic = {"type": "model", "display_name": offer.name, "created_at": created}
    modalities = ["text", "image"] if offer.sees else ["text"]
    return {**openai, **anthropic, "max_model_len": offer.context, "input_modalities": modalities}


async def listed(request: Request) -> Response:
    """Return {"models": an entry for each name of `Service.offers`}. Raises Refused (503) before they are known."""
    return JSONResponse({"models": [_tag(offer) for offer in request.app.state.service.offers()]})


async def running(request: Request) -> Response:
    """Return {"models": an entry for each loaded model, with the time at which it is unloaded if it stays idle}."""
    service: Service = request.app.state.service
    if models := service.models:
        slots = [slot for slot in [*models.slots.values()] if slot.ready]
        loaded = [(models.offer_of(slot.offer.name), slot.engine.idle_unload, slot.used) for slot in slots]
    else:
        engine: Any = service.engine
        now = time.monotonic()
        loaded = [(service.offers()[0], engine.idle_unload, now)] if engine.state == "ready" else []
    return JSONResponse({"models": [{**_tag(offer), **_in_use(offer, *times)} for offer, *times in loaded]})


async def version(request: Request) -> Response:
    """Return {"version": that of mlx_mtp}."""
    return JSONResponse({"version": __version__})


async def show(request: Request) -> Response:
    """Return the facts about a model, without loading it. Raises Refused: 400 without a name, else as `offer_of`."""
    service: Service = request.app.state.service
    async with service.read(request) as (body, _):
        name = text(body, "model") or text(body, "name")
    if not name:
        raise Refused("model: missing; GET /api/tags lists the names", param="model")
    offer = offer_of(service, name)
    template = _template(service, offer)
    has = {"thinking": any(mark in template for mark in THINKS), "vision": offer.sees}
    capabilities = ["completion", "tools", *(name for name in has if has[name])]
    architecture = offer.family or "unknown"
    info = {"general.architecture": architecture, f"{architecture}.context_length": offer.context}
    parameters = f"num_ctx {offer.context}"  # Continue reads the context here
    more = {"modelfile": "", "parameters": parameters, "license": "", "capabilities": capabilities}
    return JSONResponse(
        {**more, "template": template, "details": _details(offer), "model_info": info, **_time(offer)}
    )


def _in_use(offer: ModelFacts, idle_unload: float, used: float) -> dict[str, Any]:
    """Return the fields that only a loaded model has. used: time.monotonic() at which it was last in use.

    idle_unload: seconds from then on after which it is unloaded.
    """
    left = used + idle_unload - time.monotonic()
    expires = _utc(time.time() + left) if left < YEAR else "9999-12-31T23:59:59Z"
    return {"expires_at": expires, "size_vram": offer.size, "context_length": offer.context}


def _tag(offer: ModelFacts) -> dict[str, Any]:
    names = {"name": offer.name, "model": offer.name, "size": offer.size, "digest": offer.digest}
    return {**names, **_time(offer), "details": _details(offer)}


def _time(offer: ModelFacts) -> dict[str, str]:
    return {"modified_at": _utc(offer.created)}


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _details(offer: ModelFacts) -> dict[str, Any]:
    """Return a model's family and formats; parameter_size is "", as packed weights do not show it."""
    family = {"family": offer.family, "families": [offer.family] if offer.family else []}
    kind = "gguf" if offer.path.suffix == ".gguf" else "safetensors"
    return {"parent_model": "", "format": kind, **family, "parameter_size": "", "quantization_level": offer.stored}


def _template(service: Service, offer: ModelFacts) -> str:
    """Return a model's chat template, "" if it has none."""
    if service.models is None:
        return default_template(getattr(service.ready().tokenizer, "chat_template", None))
    return stored_template(Path(offer.path))
