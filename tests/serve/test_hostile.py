"""Hostile requests harm neither the server nor another client: a few of each kind, in a sweep a thousand."""

import logging
import os
import sys
import threading
import time

import hostile
import pytest
import served
from hostile_run import Honest, Run
from hostile_server import Server
from sweep import sweep

from mlx_mtp.serve.server import serve

FEW = 5  # attacks of each kind
SCALE = 0.002  # of their sizes
POSITIONS = 128  # of the model, so that a prompt which fits costs little
SECONDS = 0.3  # for which the client of an attack stays connected if it is not to wait for a certain response
LOGS = ("mlx_mtp.serve", "uvicorn.error", "asyncio")


class Inside(Server):
    """The demo's server on threads of this process, with the limits of the command's server."""

    def start(self, seconds: float = 60) -> None:
        self.handler = logging.FileHandler(self.log)
        for name in LOGS:
            logging.getLogger(name).addHandler(self.handler)
        self.port, self.pid, self.services = self.free_port(), os.getpid(), []
        settings = served.settings(host="127.0.0.1", port=self.port, grace=60.0, positions=POSITIONS)
        self.thread = threading.Thread(target=serve, args=(served.demo, settings, self.services.append))
        self.thread.start()
        until = time.monotonic() + seconds
        while not (self.services and self.answers(1)):
            assert time.monotonic() < until
            time.sleep(0.05)

    def stop(self) -> str:
        self.services[0].engine.stop(0)
        self.thread.join()
        for name in LOGS:
            logging.getLogger(name).removeHandler(self.handler)
        self.handler.close()
        return ""


@pytest.fixture(scope="module")
def honest():
    server = Inside("demo")
    server.start()
    try:
        yield Honest(server, tokens=4)
    finally:
        server.close()


def small(kind):
    """Yield (kind, number, attack) for a few attacks of a kind, without those that a server may not survive."""
    numbers = range(0, len(hostile.KINDS[kind]) or FEW, max(1, len(hostile.KINDS[kind]) // FEW))
    for number in numbers:
        given = hostile.attack(kind, number, scale=SCALE)
        if not given.hangs:
            waits = given.leave is None or given.answers
            yield kind, number, given if waits else given._replace(leave=SECONDS)


@pytest.mark.parametrize("kind", [kind for kind in hostile.KINDS if kind not in hostile.MODELS])
def test_small_attacks(honest, kind):
    run = Run(honest.server, honest, timed=False)
    with honest.asking():
        run.several(small(kind), 4)
    assert len(run.records) >= FEW - 1
    assert not run.found


@pytest.mark.parametrize("kind", ["sockets", "options", "grammars", "histories", "departures"])
def test_an_attack_can_be_repeated(kind):
    first, second = ([hostile.attack(kind, i, 1, SCALE) for i in range(5)] for _ in range(2))
    assert first == second
    assert first != [hostile.attack(kind, i, 2, SCALE) for i in range(5)]


@sweep
@pytest.mark.skipif(sys.platform != "linux", reason="memory and CPU time are read from /proc")
@pytest.mark.parametrize(("requests", "attackers"), [(1000, 1), (300, 4)])
def test_a_thousand_attacks(requests, attackers):
    runs = hostile.campaign(requests, seed=1, attackers=attackers, minutes=120)
    assert sum(len(run.records) for run in runs) > 0.9 * requests
    assert not [found for run in runs for found in run.found]
