"""Define the ASGI application: it routes requests to their API, and sends the engine's events to the clients."""

import asyncio
import contextlib
import html
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from ..checkpoint.template_limits import TemplateStopped
from .answer import AnswerPart
from .api_request import Answer, ApiRequest, openai_error
from .chat import ChatRequest
from .completions import CompletionRequest
from .failures import dropped, log, printable
from .fields import Refused
from .guard import SAFE_HEADERS, RequestGuard, RootPath, SafeHeaders
from .job import LOST, Begun, End, Event, Job, Prefilled, RequestFailed
from .limits import QueueFull
from .listing import health, listed, model, models, running, show, version
from .messages import MessagesRequest, anthropic_error, count_tokens
from .ollama import OllamaChat, OllamaGenerate, ollama_error
from .preparation import unless_gone
from .responses import ResponsesRequest
from .service import Service

PATIENCE = 2.0  # seconds before the stream of a queued request begins with a comment
SILENCE = 10.0  # seconds without an event after which a stream sends a keep-alive
WARNING, MAX_WARNING = "X-MLX-MTP-Warning", 2000  # a header, and its maximum number of characters
EMBEDDINGS = "this server generates text; it has no embeddings. Use another server for them"
FIXED = "the models of this server are chosen at its start; add one with `mlx-mtp pull NAME`, then restart the server"
UNSUPPORTED = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings"), EMBEDDINGS),
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), FIXED),
}
MOST_UNSENT = 10_000  # events of a stream that its client has not read
SLOW = RequestFailed(408, "the client reads the stream too slowly")
FULL = "the queue is full or the server is ending; try again later"
PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'"
)


def application(service: Service, root: str = "") -> Starlette:
    """Return the ASGI application. root: a prefix of all paths, which a reverse proxy may strip or keep."""
    posts: dict[str, type[ApiRequest]] = {"/chat/completions": ChatRequest, "/completions": CompletionRequest}
    posts |= {f"/v1{path}": api for path, api in posts.items()}
    posts |= {"/v1/responses": ResponsesRequest, "/v1/messages": MessagesRequest}
    posts |= {"/api/chat": OllamaChat, "/api/generate": OllamaGenerate}
    gets = {"/health": health, "/metrics": metrics, "/v1/models": models, "/models": models, "/": page}
    gets |= {"/api/tags": listed, "/api/ps": running, "/api/version": version}
    handlers: dict[Any, Any] = {Refused: refused}
    handlers[Exception] = lambda request, error: _error(request, 500, f"unexpected {type(error).__name__}")
    handlers[HTTPException] = lambda request, error: _error(
        request, error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    )
    handlers[TemplateStopped] = lambda request, error: refused(request, Refused(str(error), param="messages"))
    handlers[QueueFull] = lambda request, error: refused(request, Refused(FULL, status=503))
    handlers[ClientDisconnect] = lambda request, error: Response(status_code=499)
    cors: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "allow_private_network": True}
    app = Starlette(
        routes=[
            *(Route(path, partial(respond, api=api), methods=["POST"]) for path, api in posts.items()),
            Route("/v1/messages/count_tokens", counted, methods=["POST"]),
            Route("/api/show", show, methods=["POST"]),
            *(Route(path, unsupported, methods=["GET", "POST", "DELETE"]) for path in UNSUPPORTED),
            *(Route(path, get) for path, get in gets.items()),
            Route("/v1/models/{name:path}", model),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[
            Middleware(SafeHeaders),
            Middleware(RootPath, root=root),
            Middleware(CORSMiddleware, allow_origins=service.rules.origins, expose_headers=[WARNING], **cors),
            Middleware(RequestGuard, rules=service.rules, refused=refused),
        ],
        exception_handlers=handlers,
    )
    app.state.service = service
    return app


def refused(request: Request, error: Refused) -> Response:
    """Log a refused request; return the error response in the form of its API."""
    log.info("%s", printable(f"{request.url.path[:80]} {error.status}: {error}"))
    return _error(request, error.status, str(error), error.param, error.code)


def _error(
    request: Request, status: int, message: str, param: str | None = None, code: str | None = None
) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if path.startswith("/v1/messages"):
        body = anthropic_error(status, message)
    else:
        body = ollama_error(message) if path.startswith("/api/") else openai_error(status, message, param, code)
    headers = {**SAFE_HEADERS, **({"retry-after": "1"} if status == 503 else {})}
    return JSONResponse(body, status, headers)


async def unsupported(request: Request) -> Response:
    """Raise Refused (404) for a path in UNSUPPORTED, with the reason."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    raise Refused(f"{path}: {UNSUPPORTED[path]}", status=404)


async def page(request: Request) -> Response:
    """Return the chat page's HTML; the addresses of its scripts and styles begin with the server's root path."""
    text = (PAGE / "index.html").read_text("utf-8").replace("{root}", html.escape(request.scope.get("root_path", "")))
    return HTMLResponse(text, headers={"content-security-policy": POLICY, "cache-control": "no-cache"})


async def metrics(request: Request) -> Response:
    text = await run_in_threadpool(request.app.state.service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def counted(request: Request) -> Response:
    service: Service = request.app.state.service
    async with service.read(request) as (body, work), service.model_of(body, request) as (info, _):
        found, warnings = await work.run(count_tokens, body, info)
    return JSONResponse(found, headers=_warned(request, warnings))


def _warned(request: Request, warnings: list[str]) -> dict[str, str]:
    """Log the warnings of a request; return them as a header of the response, {} if there are none."""
    line = "; ".join(dict.fromkeys(warnings))
    line = (line if line.isprintable() and line.isascii() else ascii(line)[1:-1])[:MAX_WARNING]
    if line:
        log.warning("%s: %s", request.url.path[:80], line)
    return {WARNING: line} if line else {}


async def respond(request: Request, api: type[ApiRequest]) -> Response:
    """Submit a request to its model's engine; return its response, a stream if the client requests one.

    Raises Refused, QueueFull without room in the queue, and ClientDisconnect if the client disconnects before. A
    failure after that is an error response. Of a stream it is one only if it is the first event and arrives within
    PATIENCE seconds; otherwise the stream ends with it. A request without choices only loads the model.
    """
    active, warned = await _submitted(request, api)
    if not active.jobs:
        return JSONResponse(active.api_request.whole([]), headers=warned)
    try:
        if active.api_request.stream:
            first = await active.next(PATIENCE)
            if isinstance(first, RequestFailed):
                return _error(request, first.status, first.message)
            return Stream(active, first, warned)
        found = await unless_gone(request, active.whole())
        if isinstance(found, RequestFailed):
            return _error(request, found.status, found.message)
        return JSONResponse(active.api_request.whole(found), headers=warned)
    except BaseException:
        active.cancel()
        raise


async def _submitted(request: Request, api: type[ApiRequest]) -> tuple["ActiveRequest", dict[str, str]]:
    """Read a request and submit it to its model's engine; return it and the header of its warnings."""
    service: Service = request.app.state.service
    async with service.read(request) as (body, work):
        begun = time.monotonic()
        async with service.model_of(body, request) as (info, engine):
            loaded = time.monotonic()
            api_request = await work.run(api, body, info)
            api_request.begun, api_request.load_seconds = begun, loaded - begun
            warned = _warned(request, api_request.warnings)
            active = ActiveRequest(service, api_request, request.url.path, begun)
            if len(api_request.requests) > (limit := engine.limits.queued):
                raise Refused(
                    f"n: at most {limit} choices are allowed, of all prompts (--queue plus --parallel)", param="n"
                )
            service.submit(engine, active.jobs)
            engine.idle_unload = engine.limits.idle_unload if api_request.idle is None else api_request.idle
            engine.signal.set()  # the engine may wait for the seconds of an earlier request
    return active, warned


class Stream(StreamingResponse):
    """A response as a stream, in the media type of its API; its jobs are cancelled however the stream ends."""

    def __init__(self, active: "ActiveRequest", first: tuple[int, Event] | None, headers: dict[str, str]):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(active.stream(first), media_type=active.api_request.media_type, headers=headers)
        self.active = active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the generator's own `finally` does not run if it has not started
            self.active.cancel()


class ActiveRequest:
    """The jobs of one HTTP request, and the queue of events that the engine's thread sends for them."""

    def __init__(self, service: Service, api_request: ApiRequest, path: str, begun: float):
        self.service, self.api_request, self.path = service, api_request, path
        self._events: asyncio.Queue[tuple[int, int, Event]] = asyncio.Queue()  # number, choice, event
        self._sent, self._taken = [0] * len(api_request.requests), [0] * len(api_request.requests)
        self._loop = asyncio.get_running_loop()
        more: Any = {"deadline": begun + service.timeout, "begun": begun}
        self.jobs = [Job(each, partial(self._emit, i), **more) for i, each in enumerate(api_request.requests)]
        self._begun, self._is_slow, self._ends = False, False, dict[int, End]()

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancelled = True

    def _emit(self, choice: int, event: Event) -> None:
        self._sent[choice] += 1
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it the connection
            self._loop.call_soon_threadsafe(self._put, self._sent[choice], choice, event)

    def _put(self, number: int, choice: int, event: Event) -> None:
        if self._events.qsize() >= MOST_UNSENT and not isinstance(event, End | RequestFailed):
            self.cancel()
            event = SLOW
        if not self._is_slow:
            self._events.put_nowait((number, choice, event))
        self._is_slow = self._is_slow or event is SLOW

    async def next(self, seconds: float) -> tuple[int, Event] | RequestFailed | None:
        """Return (choice, event), or None after `seconds` without an event.

        A failure of one job cancels all and is returned alone. It is LOST if an event is missing; if that is the last
        one, after `seconds`. Counts ends and failures in the metrics.
        """
        complete = all(job.finished for job in self.jobs)  # then their events are in the queue
        try:
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 may lose a cancellation
                number, choice, event = await self._events.get()
            self._taken[choice] += 1
            event = event if number == self._taken[choice] else LOST
        except TimeoutError:
            if not complete:
                return None
            choice, event = 0, LOST
        if isinstance(event, RequestFailed):
            self.cancel()
            with dropped("a failure was not counted"):
                self.service.metrics.requests.labels("error").inc()
                log.warning("%s", printable(f"{self.path} {event.status}: {event.message}"))
            return event
        if isinstance(event, End):
            self._ends[choice] = event
            with dropped("a response was not counted"):
                self._count(self.jobs[choice], event)
        return choice, event

    @property
    def finished(self) -> bool:
        return len(self._ends) == len(self.jobs)

    async def whole(self) -> list[Answer] | RequestFailed:
        """Return a list of the answers, at each choice's index, once all have ended; or the first failure."""
        while not self.finished:
            if isinstance(found := await self.next(SILENCE), RequestFailed):
                return found
        return [Answer(job.parts, self._ends[i]) for i, job in enumerate(self.jobs)]

    async def stream(self, found: tuple[int, Event] | RequestFailed | None) -> AsyncIterator[str]:
        """Yield the stream's lines, also of an error. found: its first event; None if it is still awaited."""
        if found is None and self.api_request.waiting:
            yield self.api_request.waiting
        try:
            while not isinstance(found, RequestFailed):
                for line in self._lines(*found) if found else ():
                    yield line
                if self.finished:
                    for line in self.api_request.close():
                        yield line
                    return
                if (found := await self.next(SILENCE)) is None:
                    yield self.api_request.keep_alive
            yield self.api_request.failed(found)
        except Exception as e:
            log.error("a stream failed", exc_info=e)
            yield self.api_request.failed(LOST)
        finally:
            self.cancel()

    def _lines(self, choice: int, event: Event) -> Iterable[str]:
        if isinstance(event, End):
            return self.api_request.finish(choice, event)
        if isinstance(event, AnswerPart):
            return self.api_request.part(choice, event)
        if isinstance(event, Prefilled):
            return self.api_request.prefilled(choice, event)
        begun, self._begun = self._begun, True
        return self.api_request.begin(event) if isinstance(event, Begun) and not begun else ()

    def _count(self, job: Job, end: End) -> None:
        """Count an answer in the metrics and log it."""
        seconds, prompt = time.monotonic() - job.begun, len(job.request.prompt)
        self.service.metrics.answered(end, job.request, seconds)
        log.info(
            "%s: prompt %d tokens, %d of them cached; %d tokens in %.2f s, first after %.2f s; %s; %s",
            *(self.path, prompt, end.cached, end.stats.generation_tokens, seconds, end.first_token),
            *(end.stats.summary, end.reason),
        )
