"""Let whatever the server calls raise: the process stays up, one request is lost at most, other answers are right."""

import threading
import time

import pytest
from letters import Letters
from raising import Broken, Calls
from sweep import SWEEP

import mlx_mtp
from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.engine import Engine, Limits
from mlx_mtp.serve.job import Ask, End, Failed, Job, Served
from mlx_mtp.serve.prefixes import Chunking, PrefixTree
from mlx_mtp.serve.together import Together

OPTIONS = {"num_draft_tokens": 2, "adaptive": False}
ENGINE = ("mlx_mtp.serve.engine",)
ALL = ("engine", "job", "together", "failures", "answer", "prefixes")


class Client:
    """One answer: its events, and whether the engine has finished with it."""

    def __init__(self, ask: Ask):
        self.events, self._over = [], threading.Event()
        self.job = Job(ask, self.take)

    def take(self, event):
        self.events.append(event)
        if isinstance(event, (End, Failed)):
            self._over.set()

    @property
    def text(self) -> str:
        return "".join(getattr(event, "text", "") for event in self.events)

    @property
    def failed(self) -> bool:
        return not (self.events and isinstance(self.events[-1], End))

    def wait(self) -> None:
        until = time.monotonic() + 10
        while not self._over.wait(0.01) and not self.job.over:
            assert time.monotonic() < until, "no end"


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(vocab_size=40)[0]


@pytest.fixture(scope="module")
def asks(model):
    """Four requests, each with the text that it has alone."""
    found = []
    for i, prompt in enumerate(([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8, 13], [9, 8, 7])):
        text = [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=5)]
        follows = [*prompt, *text, 1, 2, 3]
        found.append((Ask(prompt, max_tokens=5, logprobs=1 if i else None, follows=lambda _, f=follows: f), text))
    return found


def run(model, asks, calls: Calls) -> tuple[Engine, list[Client]]:
    """Two answers together, one for which the model is loaded again, and one more."""

    def load():
        tree = PrefixTree(mlx_mtp.make_prompt_cache(model, num_draft_tokens=2), Chunking(4), 1 << 30)
        return Served(model, Letters(), tree, OPTIONS, None, together=Together(model, Letters(), OPTIONS, 4))

    engine, clients = Engine(load, Limits(idle_unload=0.001), store=lambda served: None), []
    with calls.watched():
        engine.start()
    for together in (asks[:2], asks[2:3], asks[3:]):
        new = [Client(ask) for ask, _ in together]
        if engine.thread.is_alive():
            for client in new:
                engine.submit([client.job])
            for client in new:
                client.wait()
        clients += new
        until = time.monotonic() + 10
        while engine.state not in ("unloaded", "failed"):
            assert time.monotonic() < until, engine.state
            time.sleep(0.001)
    engine.stop(0)
    engine.thread.join(10)
    assert not engine.thread.is_alive()
    return engine, clients


def test_it(model, asks, monkeypatch):
    monkeypatch.setattr(engines, "CALM", 0.001)
    files = [f"mlx_mtp.serve.{name}" for name in ALL]
    calls = Calls(*files)
    t=time.time()
    engine, clients = run(model, asks, calls)
    print(time.time()-t)
    for c, (a, text) in zip(clients, asks):
        print(c.text, Letters().decode(text), c.events[-1])
    print(len(calls.seen), *calls.seen.items(), sep="\n")
    assert 0
