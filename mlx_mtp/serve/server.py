"""Run the HTTP server: listen while the engine's thread loads the model, and shut down after the active requests."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import uvicorn

from ..cache.make_cache import make_prompt_cache
from ..checkpoint.template_process import isolate, processes
from ..decoding.buffer_count import LEAST_CHUNK, count_buffers
from ..decoding.memory_needs import LONGEST, stated_positions
from ..decoding.options import default_chunk, default_draft_tokens
from ..grammar import vocabulary_of
from .app import Service, application
from .batch_decoder import BatchDecoder
from .catalog import ModelFacts
from .connection import Connection
from .engine import Engine, JobLimits
from .failures import dropped
from .fields import ModelInfo
from .frames import add_reasoning_marks, frames_of
from .guard import Rules
from .job import Served
from .metrics import Metrics
from .models import Models
from .prefix_files import PrefixFiles
from .prefixes import Chunking, PrefixTree
from .prompts import marks_of
from .slot import Ready
from .tool_calls.table import GENERIC, format_of, unread_calls

STORING = 20.0  # maximum seconds of writing the prefix cache to files at the end
SWITCH = 0.0005  # seconds after which a thread that prepares a request passes Python's lock to the engine's
CHUNK, CHUNK_ON_CPU = (512, LEAST_CHUNK), (64, 24)  # maximum and minimum tokens of a prefill chunk


class Loaded(NamedTuple):
    """A loaded model.

    advised: the checkpoint's sampling defaults. layout: keyword arguments of `make_prompt_cache`. path: the model's
    directory or GGUF file; Path() if it is unknown.
    """

    model: Any
    tokenizer: Any
    advised: dict[str, Any]
    layout: dict[str, Any]
    path: Path = Path()


@dataclass(frozen=True)
class Settings:
    """The server's settings.

    names:    model names that requests may use; with several models, further names of the first.
    options:  keyword arguments of `stream_generate` for all responses.
    sampling: defaults of request fields. template: variables of the chat template. step: size of a prefill chunk.
    positions: maximum tokens of prompt and answer; None: the model's. max_tokens: default; None: what fits.
    cache_bytes: maximum of the prefix cache in memory; 0: no prefix cache. cache_files: its files; None: none.
    timeout:  seconds of a request. grace: seconds that responses may take to finish at the end.
    fetch:    "host" or "host:port" from which pictures of requests may be fetched.
    features: maximum bytes of pictures' features that are stored in memory; None: the vision tower's default.
    max_memory: with several models, maximum bytes that MLX has allocated after a load; None: what is available at
        the start.
    """

    names: tuple[str, ...]
    host: str
    port: int
    rules: Rules
    options: dict[str, Any]
    sampling: dict[str, Any]
    template: dict[str, Any]
    step: int | None = None
    positions: int | None = None
    max_tokens: int | None = None
    cache_bytes: int = 0
    cache_files: PrefixFiles | None = None
    limits: JobLimits = field(default_factory=JobLimits)
    timeout: float = float("inf")
    grace: float = 5.0
    root_path: str = ""
    fetch: tuple[str, ...] = ()
    features: int | None = None
    max_memory: int | None = None


class Server(uvicorn.Server):
    """A uvicorn server; a first signal ends it with exit code 0 after its active requests, a second one at once.

    grace: maximum seconds for these requests.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine | Models, grace: float):
        super().__init__(config)
        self.engine, self.grace = engine, grace

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop the engine; on a second signal exit at once, except SIGHUP, which a closed terminal sends twice."""
        if self.should_exit and sig == signal.SIGHUP:
            return
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self.engine.stop(self.grace)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn calls this ten times per second. A dead engine ends the server."""
        return await super().on_tick(counter) or not self.engine.thread.is_alive()


def serve(load: Callable[[], Loaded], settings: Settings, ready: Callable[[Service], None]) -> None:
    """Serve until a signal, or the end of the engine's thread. Raises OSError as `listening` does.

    Also raises the exception that ended the engine, such as that of a failed first load.

    Ends the process, with exit code 0, if the engine's thread still loads or computes after the time for the end.

    load: called on the engine's thread, again after an idle unload. ready: called there after the first load.
    """
    engine = Engine(lambda: opened(load(), settings, service), settings.limits, lambda: ready(service), _store)
    service = Service(engine, Metrics(engine), settings.rules, settings.timeout)
    run(service, settings)


def serve_several(
    find: Callable[[], list[ModelFacts]],
    load: Callable[[ModelFacts], Loaded],
    settings: Settings,
    ready: Callable[[Service], None],
) -> None:
    """Serve the models that `find` lists, each loaded on demand, as `serve` serves one; raises the same.

    find, ready: called on the thread that runs the models, ready once they are listed. load: called on another one.
    """
    models = models_of(find, load, settings, lambda: ready(service))
    service = Service(models, Metrics(models), settings.rules, settings.timeout)
    run(service, settings)


def models_of(
    find: Callable[[], list[ModelFacts]],
    load: Callable[[ModelFacts], Loaded],
    settings: Settings,
    ready: Callable[[], None] = lambda: None,
) -> Models:
    """Return the `Models` of a server, from arguments as of `serve_several`; its thread is not started.

    The first model has the settings' names in addition to its own. ready: called once the models are listed.
    """
    more: Any = {"limits": settings.limits, "ready": ready, "store": _store, "most": settings.max_memory}
    opens = partial(_opened_offer, load, settings)
    return Models(find, opens, aliases=settings.names, **more)


def _opened_offer(load: Callable[[ModelFacts], Loaded], settings: Settings, offer: ModelFacts) -> Ready:
    """Load one of several models and return it; its facts have its own name, then the settings' names.

    Its prefix files are in the settings' directory, with the same limit, in an object of their own.
    """
    files = settings.cache_files and PrefixFiles(settings.cache_files.directory, settings.cache_files.limit)
    own = replace(settings, names=(offer.name, *settings.names), cache_files=files)
    loaded = load(offer)
    served = _counted(shared(loaded, own))
    return Ready(served, described(loaded, served, own))


def run(service: Service, settings: Settings) -> None:
    """Serve until a signal or the end of the engine's thread; raises as `serve`."""
    engine = service.engine
    more = {"log_level": "warning", "timeout_graceful_shutdown": int(settings.grace) + 1}
    config = config_of(application(service, settings.root_path), settings.limits, **more)
    server, sockets = Server(config, engine, settings.grace), listening(settings.host, settings.port)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, server.handle_exit)  # a closed terminal; nohup ignores it
    processes()  # the rendering process starts while the model is loaded
    sys.setswitchinterval(SWITCH)
    engine.thread.start()
    asyncio.run(server.serve(sockets))
    engine.stop(settings.grace)
    engine.thread.join(0 if engine.state == "loading" else settings.grace + STORING)
    loading = isinstance(engine, Models) and engine.loading
    if engine.thread.is_alive() or loading:  # MLX cannot be interrupted while it loads or computes
        os._exit(0)
    if engine.error is not None:
        raise engine.error


def config_of(app: Any, limits: JobLimits, **more: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for an application, with the limits of `Connection`. more: further options."""
    connection: Any = partial(Connection, most=64 + 2 * limits.queued)
    return uvicorn.Config(app, http=connection, ws="none", access_log=False, server_header=False, **more)


def listening(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at a host's addresses, one for each; raises OSError that names host and port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [socket.create_server(address[:2], family=family) for family, _, _, _, address in found]
    except OSError as e:
        reason = (e.strerror or str(e)).partition(" (while")[0].lower()  # Python repeats the address
        other = "; --port N listens on another port" if e.errno == errno.EADDRINUSE else ""
        raise OSError(f"{host}:{port}: {reason}{other}") from None


def shared(loaded: Loaded, settings: Settings) -> Served:
    """Return a loaded model as `Served`, with a prefix cache, batch decoder (None on several ranks) and formats.

    From now on the tokenizer renders its chat template in another process; marks around reasoning that mlx-lm does
    not detect are set on it.
    """
    model, tokenizer, layout = loaded.model, loaded.tokenizer, loaded.layout
    adapters = model.runtime.adapters
    asked = settings.options.get("num_draft_tokens")
    k = default_draft_tokens(model) if asked is None else asked
    blank = make_prompt_cache(model, num_draft_tokens=k, **layout)
    largest, least = CHUNK_ON_CPU if mx.default_device() == mx.cpu else CHUNK
    step, ranks = settings.step or min(largest, default_chunk(model)), model.ranks
    chunking, options = Chunking(step, least, frozenset(tokenizer.eos_token_ids)), {**settings.options}
    # Without a drafter the default is None: 0 would be plain decoding, without prompt lookup.
    tree, options["num_draft_tokens"] = PrefixTree(blank, chunking, settings.cache_bytes), k or asked
    batch = None if ranks else BatchDecoder(model, tokenizer, options, step)
    isolate(tokenizer)
    add_reasoning_marks(tokenizer)
    files, frames = settings.cache_files, frames_of(tokenizer)
    apart: dict[str, Served] = {}
    format = format_of(tokenizer) or GENERIC
    served = Served(model, tokenizer, tree, options, format, files, batch, frames, apart)
    for name in adapters.names if adapters.selected is None else ():
        with adapters.using(name):
            own = PrefixTree(blank.like_new(), chunking, tree.limit, other=tree)
            more = BatchDecoder(model, tokenizer, options, step, other=batch)
        apart[name] = served._replace(tree=own, batch=more)
    for each in tree.trees if tree.limit and not ranks and not blank.is_mlx_lm else ():
        each.decoded = None  # not with ranks: their engines are not idle at the same time
    return served


def opened(loaded: Loaded, settings: Settings, service: Service) -> Served:
    """Return `shared(loaded, settings)`; set the `info` of `service`, after which it accepts requests."""
    served = _counted(shared(loaded, settings))
    service.info = described(loaded, served, settings)
    return served


def _counted(served: Served) -> Served:
    return served._replace(buffers=count_buffers(served.tree.blank))


def described(loaded: Loaded, served: Served, settings: Settings) -> ModelInfo:
    """Return the facts about a loaded model for requests.

    Also makes the tokenizer's vocabulary for grammars, and sets the limit of the vision tower's stored features.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    with dropped("grammars cannot be used"), contextlib.suppress(ValueError):  # requests state the reason
        vocabulary_of(tokenizer, model.vocab_size)  # at the load, because it holds Python's lock
    vision = model.vision
    if vision and settings.features is not None:
        vision.keep_at_most(settings.features)
    limit = stated_positions(model) or min(tokenizer.model_max_length, LONGEST)
    report = getattr(model, "report", None)
    return ModelInfo(
        names=settings.names,
        tokenizer=tokenizer,
        marks=marks_of(tokenizer, vision and vision.mark),
        positions=int(min(limit, settings.positions or limit)),
        max_tokens=settings.max_tokens,
        defaults={**loaded.advised, **settings.sampling},
        template=settings.template,
        turns=not served.tree.is_stateless,
        created=int(time.time()),
        unread_calls=unread_calls(tokenizer, format_of(tokenizer)),
        adapters=model.runtime.adapters.names,
        vocab_size=model.vocab_size,
        tool_format=served.tool_format,
        frames=served.frames,
        vision=vision,
        blind=_without_path(model.runtime.blind, settings.names[0]),
        fetch=settings.fetch,
        path=loaded.path,
        family=report.family if report else "",
        stored=report.target_quantization if report else "",
        size=report.target_bytes + report.head_bytes if report else 0,
        seeds=lambda: int.from_bytes(os.urandom(7)),
    )


def _without_path(reason: str, name: str) -> str:
    """Return a reason for clients: the checkpoint's path, with which `reason` may begin, is replaced by the name."""
    path, _, rest = reason.partition(": ")
    return reason.replace(path, name) if rest and os.path.exists(path) else reason


def _store(served: Served) -> None:
    """Write the prefix cache to files, for at most STORING seconds, if there is a directory for them."""
    if served.files:
        served.files.save(served.tree, until=time.monotonic() + STORING)
