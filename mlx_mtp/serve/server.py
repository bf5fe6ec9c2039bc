"""Run the server: load the model on the engine's thread, listen meanwhile, and end in order."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import uvicorn

from ..cache.prompt_cache import make_prompt_cache
from ..decoding.buffer_count import LEAST_CHUNK, count_buffers
from ..decoding.options import default_draft_tokens, default_step
from .app import Site, application
from .engine import Engine, Limits
from .fields import Door
from .frames import add_reasoning_marks, frames_of
from .guard import Rules
from .job import Served
from .metrics import Metrics
from .prefix_files import PrefixFiles
from .prefixes import Chunking, PrefixTree
from .prompts import marks_of
from .together import Together
from .tool_calls.table import format_of, unread_calls

log = logging.getLogger("mlx_mtp.serve")
STORING = 20.0  # seconds at the end in which what is remembered is written to files
CHUNK, CHUNK_ON_CPU = (512, LEAST_CHUNK), (64, 24)  # tokens at most and at least: read fast, and little of it twice


class Loaded(NamedTuple):
    """A model, its tokenizer, the sampling that the checkpoint advises, and arguments of `make_prompt_cache`."""

    model: Any
    tokenizer: Any
    advised: dict[str, Any]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How to serve.

    names:   that requests may call the model. options: keyword arguments of `stream_generate` for all answers.
    sampling: defaults of what a request may say itself. positions: most tokens of a text, None: the model's.
    max_tokens: of an answer where a request says nothing, None: what fits.
    cache_bytes: of remembered prompts, in memory and in `cache_files`. step: tokens of a chunk of a prompt.
    grace:   seconds that answers may go on for when the server is to end.
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
    limits: Limits = field(default_factory=Limits)
    timeout: float = float("inf")
    grace: float = 5.0
    root_path: str = ""


class Server(uvicorn.Server):
    """A uvicorn server that ends with exit code 0 when it is told to, at once when it is told again."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float):
        super().__init__(config)
        self.engine, self.grace = engine, grace

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End: what is being answered may go on for a while; a second signal ends the process, but for SIGHUP.

        A closed terminal sends that twice: its shell does, and the system when the shell has ended.
        """
        if self.should_exit and sig == signal.SIGHUP:
            return
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self.engine.stop(self.grace)

    async def on_tick(self, counter: int) -> bool:
        """Tell, ten times a second, whether to end: also when the engine has ended."""
        return await super().on_tick(counter) or not self.engine.thread.is_alive()


def serve(load: Callable[[], Loaded], settings: Settings, ready: Callable[[Site], None]) -> None:
    """Serve until a signal ends it. Raises what loading the model raised, and OSError for an address in use.

    load: is called on the engine's thread, and `ready` when requests are answered.
    """
    engine = Engine(lambda: opened(load(), settings, site), settings.limits, lambda: ready(site), _store)
    site = Site(engine, Metrics(engine), settings.rules, settings.timeout)
    config = uvicorn.Config(
        application(site, settings.root_path),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace) + 1,
        h11_max_incomplete_event_size=32 * 1024,
    )
    server, sockets = Server(config, engine, settings.grace), listening(settings.host, settings.port)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, server.handle_exit)  # its terminal is closed; nohup lets it go on
    engine.start()
    asyncio.run(server.serve(sockets))
    engine.stop(settings.grace)
    engine.thread.join(0 if engine.state == "loading" else settings.grace + STORING)
    if engine.thread.is_alive():  # nothing interrupts MLX while it reads weights or computes
        os._exit(0)
    if engine.error is not None:
        raise engine.error


def listening(host: str, port: int) -> list[socket.socket]:
    """Listen at an address, before seconds go into a model; raises OSError that names it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [socket.create_server(address[:2], family=family) for family, _, _, _, address in found]
    except OSError as e:
        why = (e.strerror or str(e)).partition(" (while")[0]  # Python repeats the address
        raise OSError(f"{host}:{port}: {why}") from None


def shared(loaded: Loaded, settings: Settings) -> Served:
    """Collect what all answers of a model that is loaded share."""
    model, tokenizer, _, layout = loaded
    k = settings.options.get("num_draft_tokens")
    k = default_draft_tokens(model) if k is None else k
    blank = make_prompt_cache(model, num_draft_tokens=min(k, len(model.head_windows())), **layout)
    most, least = CHUNK_ON_CPU if mx.default_device() == mx.cpu else CHUNK
    step, ranks = settings.step or min(most, default_step(model)), model.ranks
    tree = PrefixTree(blank, Chunking(step, least, frozenset(tokenizer.eos_token_ids)), settings.cache_bytes)
    if tree.limit and not ranks and not blank.is_mlx_lm:
        tree.decoded = None  # the engine compares rows when it is idle; ranks decide nothing by time
    options = {**settings.options, "num_draft_tokens": k}
    together = None if ranks else Together(model, tokenizer, options, step)
    add_reasoning_marks(tokenizer)
    files, frames = settings.cache_files, frames_of(tokenizer)
    return Served(model, tokenizer, tree, options, format_of(tokenizer), files, together, frames)


def opened(loaded: Loaded, settings: Settings, site: Site) -> Served:
    """Open the site's door for requests to a model that is loaded."""
    model, tokenizer, advised, _ = loaded
    served = shared(loaded, settings)
    site.metrics.counted = count_buffers(served.tree.blank)
    own = getattr(model.args, "max_position_embeddings", None) or tokenizer.model_max_length
    site.door = Door(
        names=settings.names,
        tokenizer=tokenizer,
        marks=marks_of(tokenizer),
        positions=int(min(own, settings.positions or own)),
        max_tokens=settings.max_tokens,
        defaults={**advised, **settings.sampling},
        template=settings.template,
        turns=not served.tree.every_moment,
        created=int(time.time()),
        unread_calls=unread_calls(tokenizer, served.tool_format),
        seeds=lambda: int.from_bytes(os.urandom(7)),
    )
    return served


def _store(served: Served) -> None:
    """Write what is remembered to files, if there is a directory for them."""
    if served.files:
        served.files.save(served.tree, until=time.monotonic() + STORING)
