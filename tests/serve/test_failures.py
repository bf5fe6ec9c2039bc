"""Let whatever the server calls raise: the process stays up, one request is lost at most, other answers are right."""

import threading
import time
from types import SimpleNamespace

import pytest
from letters import Letters
from raising import Calls
from sweep import SWEEP

import mlx_mtp
from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.answer import Said
from mlx_mtp.serve.engine import Engine, Limits
from mlx_mtp.serve.job import Ask, End, Failed, Job, Served
from mlx_mtp.serve.prefixes import Chunking, PrefixTree
from mlx_mtp.serve.together import Together
from mlx_mtp.decoding.stats import Stats

OPTIONS = {"num_draft_tokens": 2, "adaptive": False}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8], [9, 8, 7]]
FILES = ("engine", "job", "together", "failures", "answer", "prefixes")


class Client:
    """One answer: its events, and whether the engine has finished with it."""

    def __init__(self, ask: Ask):
        self.events, self.job = [], Job(ask, self.take)

    def take(self, event):
        self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Said))

    @property
    def failed(self) -> bool:
        return not (self.events and isinstance(self.events[-1], End))


def until(found, seconds=10) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.0005)


def run(load, asks, calls: Calls) -> list[Client]:
    """Answer two requests together, one for which the model is loaded again, and one more, while a call raises."""
    engine = Engine(load, Limits(idle_unload=0.001), store=lambda served: None)
    with calls.watched():
        engine.start()
    until(lambda: engine.state != "loading")
    calls.armed, clients = True, []
    for some in (asks[:2], asks[2:3], asks[3:]):
        clients += (new := [Client(ask) for ask in some])
        for client in new:
            engine.submit([client.job])
        until(lambda new=new: all(client.job.over for client in new))
        until(lambda: engine.state == "unloaded")
        assert engine.thread.is_alive()
    engine.stop(0)
    engine.thread.join(10)
    assert not engine.thread.is_alive()
    assert engine.error is None
    return clients


def check(clients: list[Client], texts: list[str], calls: Calls) -> None:
    """Answers are right as far as they came, and only those are cut that the failure concerned."""
    lost, stack = [client for client in clients if client.failed], calls.stack or []
    together = "Together.step" in stack or "Engine._refuse_waiting" in stack
    background = "Engine._idle" in stack or not stack
    assert len(lost) <= (0 if background else 2 if together else 1)
    for client, text in zip(clients, texts, strict=True):
        assert text.startswith(client.text) if client.failed else client.text == text
        assert not client.failed or not client.events or isinstance(client.events[-1], Failed)


class Told:
    """Stands in for other ranks: takes down the words."""

    def __init__(self):
        self.words = []

    def told(self, word):
        self.words.append(word)


@pytest.fixture
def stand_ins(monkeypatch):
    """What the engine is given, with answers that repeat their prompts."""

    def answer(served, job, crowded):
        for token in job.ask.prompt:
            job.tell(Said(chr(97 + token)))
            yield
        job.tell(End("stop", None, Stats(), 0, 0.0, 0))

    for name in ("compare_rows", "reread", "read_end"):
        monkeypatch.setattr(engines, name, lambda *_: iter((1, 2)))
    monkeypatch.setattr(engines, "answer", answer)
    monkeypatch.setattr(engines, "CALM", 0.0002)
    together = SimpleNamespace(step=lambda: None, close=lambda: None)
    return lambda: SimpleNamespace(ranks=Told(), together=together, tree=SimpleNamespace(decoded=True))


def test_every_callable_of_the_engine_raises(stand_ins):
    asks = [Ask(prompt, follows=lambda parts: [1, 2, 3]) for prompt in PROMPTS]
    texts = ["".join(chr(97 + token) for token in prompt) for prompt in PROMPTS]
    calls = Calls("mlx_mtp.serve.engine")
    check(run(stand_ins, asks, calls), texts, calls)
    raised = 0
    for name, times in calls.seen.items():
        for n in range(1, min(5, times) + 1):
            calls = Calls("mlx_mtp.serve.engine", raises=(name, n))
            try:
                check(run(stand_ins, asks, calls), texts, calls)
            except AssertionError as e:
                print(name, n, repr(str(e))[:300], calls.stack and calls.stack[:6])
                raised+=1
    assert raised == 0


@pytest.fixture(scope="module")
def asks(tiny_models):
    """Four requests, each with the letters that it has alone."""
    model, found = tiny_models(vocab_size=40)[0], []
    for i, prompt in enumerate(PROMPTS):
        text = [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=3)]
        follows = [*prompt, *text, 1, 2, 3]
        more = {"penalties": {"logit_bias": {1: 0.0}}} if i == 1 else {"logprobs": 1} if i else {}
        found.append(Ask(prompt, max_tokens=3, follows=lambda _, f=follows: f, **more))
        found[-1] = found[-1], Letters().decode(text)
    return found


def test_real(tiny_models, asks, monkeypatch):
    monkeypatch.setattr(engines, "CALM", 0.0002)
    model = tiny_models(vocab_size=40)[0]

    def load():
        tree = PrefixTree(mlx_mtp.make_prompt_cache(model, num_draft_tokens=2), Chunking(4), 1 << 30)
        return Served(model, Letters(), tree, OPTIONS, None, together=Together(model, Letters(), OPTIONS, 4))

    files = [f"mlx_mtp.serve.{name}" for name in FILES]
    calls = Calls(*files)
    asks, texts = zip(*asks)
    t = time.time()
    check(run(load, asks, calls), texts, calls)
    print(time.time() - t)
    bad = 0
    for name, times in calls.seen.items():
        for n in range(1, min(5, times) + 1):
            calls = Calls(*files, raises=(name, n))
            try:
                check(run(load, asks, calls), texts, calls)
            except AssertionError as e:
                print(name, n, repr(str(e))[:300], calls.stack and calls.stack[:6], flush=True)
                bad += 1
    assert not bad
