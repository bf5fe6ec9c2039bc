"""Serve Ollama's routes about models: `GET /api/tags`, `/api/ps` and `/api/version`, and `POST /api/show`."""

import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._version import __version__
from ..checkpoint.stored_template import default_template, stored_template
from .catalog import Offer
from .fields import Refused, text
from .listing import offer_of
from .service import Service

THINKS = ("enable_thinking", "<think>", "reasoning_content", "<|channel>")  # in chat templates
YEAR = 365 * 86400.0  # seconds


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


def _in_use(offer: Offer, idle_unload: float, used: float) -> dict[str, Any]:
    """Return the fields that only a loaded model has. used: time.monotonic() at which it was last in use.

    idle_unload: seconds from then on after which it is unloaded.
    """
    left = used + idle_unload - time.monotonic()
    expires = _utc(time.time() + left) if left < YEAR else "9999-12-31T23:59:59Z"
    return {"expires_at": expires, "size_vram": offer.size, "context_length": offer.context}


def _tag(offer: Offer) -> dict[str, Any]:
    names = {"name": offer.name, "model": offer.name, "size": offer.size, "digest": offer.digest}
    return {**names, **_time(offer), "details": _details(offer)}


def _time(offer: Offer) -> dict[str, str]:
    return {"modified_at": _utc(offer.created)}


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _details(offer: Offer) -> dict[str, Any]:
    """Return a model's family and formats; parameter_size is "", as packed weights do not show it."""
    family = {"family": offer.family, "families": [offer.family] if offer.family else []}
    kind = "gguf" if offer.path.suffix == ".gguf" else "safetensors"
    return {"parent_model": "", "format": kind, **family, "parameter_size": "", "quantization_level": offer.stored}


def _template(service: Service, offer: Offer) -> str:
    """Return a model's chat template, "" if it has none."""
    if service.models is None:
        return default_template(getattr(service.ready().tokenizer, "chat_template", None))
    return stored_template(Path(offer.path))
