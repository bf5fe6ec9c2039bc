"""Start services of the demo, each with its own engine thread."""

import asyncio
import threading
import time
from contextlib import contextmanager

import mlx.core as mx
import uvicorn
from compile_mode import NO_FUSE, set_mode
from starlette.testclient import TestClient

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.serve.app import Service, application
from mlx_mtp.serve.catalog import offers
from mlx_mtp.serve.engine import Engine, JobLimits
from mlx_mtp.serve.guard import Rules
from mlx_mtp.serve.metrics import Metrics
from mlx_mtp.serve.server import Loaded, Settings, config_of, models_of, opened

KEY = {"Authorization": "Bearer secret"}


def settings(**changes):
    defaults = {
        "names": ("demo",),
        "host": "localhost",
        "port": 1,
        "rules": Rules(),
        "options": {"adaptive": False},
    }
    return Settings(**{**defaults, "sampling": {}, "template": {}, "cache_bytes": 1 << 28, **changes})


def checkpoint(path):
    """Load a checkpoint for a server."""
    set_mode(NO_FUSE)
    with mx.stream(mx.cpu):
        return Loaded(*mlx_mtp.load(path), {}, {"kv_group_size": 32})


def demo():
    return checkpoint(demo_path())


def demo_at(offer):
    return checkpoint(offer.path)


def start(load=demo, limits=None, **changes):
    """Return the service and the application of an engine that is loading."""
    engine = Engine(lambda: opened(load(), settings(**changes), service), limits or JobLimits())
    service = Service(engine, Metrics(engine), changes.get("rules", Rules()))
    engine.thread.start()
    return service, application(service)


@contextmanager
def serving_several(folder, load=demo_at, limits=None, **changes):
    """Yield a client, with its `models`, of a server of all models in a folder; stop it at the end.

    changes: of `settings`.
    """
    given = settings(**{"names": (), "limits": limits or JobLimits(), **changes})
    models = models_of(lambda: offers([], folder), load, given)
    service = Service(models, Metrics(models), given.rules, given.timeout)
    models.thread.start()
    try:
        with TestClient(application(service), base_url="http://localhost") as client:
            while models.state == "loading":
                time.sleep(0.01)
            client.models = models
            yield client
    finally:
        models.stop(0)
        models.thread.join()


@contextmanager
def listening(app, limits=None):
    """Yield the address of a real server of an application, on a free port, until the block ends."""
    server = uvicorn.Server(config_of(app, limits or JobLimits(), port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(*how, raises=True, **changes):
    """Yield a client, with its `service`, of a server that is ready; stop it at the end. how, changes: of `start`."""
    service, app = start(*how, **changes)
    try:
        with TestClient(app, base_url="http://localhost", raise_server_exceptions=raises) as client:
            while service.engine.state == "loading":
                time.sleep(0.01)
            client.service = service
            yield client
    finally:
        service.engine.stop(0)
        service.engine.thread.join()
