"""Let whatever the server calls raise: the process stays up, one request is lost at most, other answers are right.

The callables are found by watching a run (`raising.Calls`), so a new one is tested as soon as the server calls it.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from letters import Letters
from raising import Calls, RandomFailures
from served import start
from starlette.testclient import TestClient
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.answer import Said
from mlx_mtp.serve.app import application
from mlx_mtp.serve.engine import Engine, Limits
from mlx_mtp.serve.job import Ask, End, Failed, Job, Served
from mlx_mtp.serve.prefixes import Chunking, PrefixTree
from mlx_mtp.serve.together import Together

OPTIONS = {"num_draft_tokens": 2, "adaptive": False}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8], [9, 8, 7]]
ON_THE_ENGINE = ("engine", "job", "together", "failures", "answer", "prefixes")
IN_THE_APPLICATION = ("app", "guard", "chat", "exchange", "fields", "prompts", "metrics", "failures", "engine", "job")
CHAT = "/v1/chat/completions"
QUIET = "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
pytestmark = pytest.mark.filterwarnings(*QUIET, "ignore:coroutine")


class Client:
    """One request, and the events of its answer."""

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


def until(found, seconds=30) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.0005)


def run(load, asks, calls: Calls) -> list[Client]:
    """Answer two requests together, then one, and one more, for each of which the model is loaded again."""
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

    def broadcast(self, word):
        self.words.append(word)


@pytest.fixture
def stand_ins(monkeypatch):
    """What the engine is given, with answers that repeat their prompts."""

    def answer(served, job, crowded):
        for token in job.ask.prompt:
            job.tell(Said(chr(97 + token)))
            yield
        job.tell(End("stop", None, Stats(), 0, 0.0, 0))

    def compare(served):
        served.tree.decoded = True
        return iter((1, 2))

    for name in ("reread", "read_end"):
        monkeypatch.setattr(engines, name, lambda *_: iter((1, 2)))
    monkeypatch.setattr(engines, "compare_rows", compare)
    monkeypatch.setattr(engines, "answer", answer)
    monkeypatch.setattr(engines, "CALM", 0.0002)
    together = SimpleNamespace(step=lambda: None, close=lambda: None)
    return lambda: SimpleNamespace(ranks=Told(), together=together, tree=SimpleNamespace(decoded=None))


def watched(files, raises=None) -> Calls:
    return Calls(*(f"mlx_mtp.serve.{name}" for name in files), raises=raises)


def failures(seen: dict[str, int], calls_of_each: int = 5) -> list[tuple[str, int]]:
    """List the first calls of each callable."""
    return [(name, n) for name, times in seen.items() for n in range(1, min(calls_of_each, times) + 1)]


def test_every_callable_of_the_engine_raises(stand_ins):
    asks = [Ask(prompt, follows=lambda parts: [1, 2, 3]) for prompt in PROMPTS]
    texts = ["".join(chr(97 + token) for token in prompt) for prompt in PROMPTS]
    check(run(stand_ins, asks, calls := watched(["engine"])), texts, calls)
    assert len(calls.seen) > 50
    for raises in failures(calls.seen, 5 if SWEEP else 2):
        check(run(stand_ins, asks, calls := watched(["engine"], raises)), texts, calls)


@pytest.fixture
def real(tiny_models, monkeypatch):
    """Make what the engine serves of a model; requests, and the letters that each has alone."""
    model, asks, texts = tiny_models(vocab_size=40)[0], [], []
    for i, prompt in enumerate(PROMPTS):
        text = [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=3)]
        follows = [*prompt, *text, 1, 2, 3]
        more = {"penalties": {"logit_bias": {1: 0.0}}} if i == 1 else {"logprobs": 1} if i else {}
        asks.append(Ask(prompt, max_tokens=3, follows=lambda _, f=follows: f, **more))
        texts.append(Letters().decode(text))
    monkeypatch.setattr(engines, "CALM", 0.0002)

    def load():
        tree = PrefixTree(mlx_mtp.make_prompt_cache(model, num_draft_tokens=2), Chunking(4), 1 << 30)
        tree.decoded = None
        return Served(model, Letters(), tree, OPTIONS, None, together=Together(model, Letters(), OPTIONS, 4))

    return load, asks, texts


def test_callables_below_the_engine_raise(real):
    load, asks, texts = real
    check(run(load, asks, calls := watched(ON_THE_ENGINE)), texts, calls)
    assert len(calls.seen) > 200
    every = failures(calls.seen)
    for raises in sampled(every[7::197], every):
        check(run(load, asks, calls := watched(ON_THE_ENGINE, raises)), texts, calls)


def asked(**more) -> dict:
    return {"messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 4, **more}


def visit(site, calls: Calls) -> list:
    """Get an answer, a stream, metrics, a refusal, the models, and an answer that no failure concerns."""
    host = {"base_url": "http://localhost", "raise_server_exceptions": False}
    with calls.watched(), TestClient(application(site), **host) as client:
        client.get("/health")
        calls.armed = True
        found = [client.post(CHAT, json=asked()), client.post(CHAT, json=asked(stream=True)), client.get("/metrics")]
        found += [client.post(CHAT, json=asked(n=0)), client.get("/v1/models")]
        calls.armed = False
        return [*found, client.post(CHAT, json=asked())]


def number_lost(responses: list, text: str) -> int:
    """Count the responses that a failure has changed; answers are right, and a stream that is cut says so."""
    whole, stream, *_, last = responses
    events = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event).get("choices", ())]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    cut = stream.status_code == 200 and streamed != text
    assert text.startswith(streamed)
    assert '"error"' in stream.text or not cut
    for response in [last, *([whole] if whole.status_code == 200 else ())]:
        assert response.json()["choices"][0]["message"]["content"] == text
    statuses = [response.status_code for response in responses]
    return cut + sum(a != b for a, b in zip(statuses, [200, 200, 200, 400, 200, 200], strict=True))


def test_callables_of_the_application_raise(served):
    text = served.post(CHAT, json=asked()).json()["choices"][0]["message"]["content"]
    calls = watched(IN_THE_APPLICATION)
    assert not number_lost(visit(served.site, calls), text)
    assert len(calls.seen) > 200
    every = failures(calls.seen)
    for raises in sampled(every[7::197], every):
        assert number_lost(visit(served.site, watched(IN_THE_APPLICATION, raises)), text) <= 1, raises


DEEP = '{"messages": ' + "[" * 3000 + "]" * 3000 + "}"
HOSTILE = (
    "", "{", "[]", "null", '"text"', DEEP, '{"messages": []}', '{"messages": NaN}', '{"messages": {"role": "user"}}',
    json.dumps(asked(max_tokens="4")), json.dumps(asked(max_tokens=-7)), json.dumps(asked(n=10**9)),
    json.dumps(asked(temperature=1e309)), json.dumps(asked(stop=[""])), json.dumps(asked(logit_bias={"x": []})),
    json.dumps(asked(tools="write")), json.dumps(asked(tools=[{"type": "function", "function": {"name": {}}}])),
    json.dumps(asked(tools=[{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}])),
    json.dumps(asked(chat_template_kwargs={"messages": 1})), json.dumps(asked(model="other")),
    json.dumps(asked(messages=[{"role": "tool", "content": "x"}])), json.dumps(asked(seed=10**30)),
    json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}),
    json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}),
    json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
)  # fmt: skip
PATHS = (CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/v1/messages/count_tokens")


def ask(client, i: int, text: str) -> str:
    """Send the i-th request: two of three are hostile. Return what is wrong with the answer."""
    if i % 3:
        status = client.post(PATHS[i % len(PATHS)], content=HOSTILE[i % len(HOSTILE)]).status_code
        return "" if status < 600 else f"status {status}"
    response = client.post(CHAT, json=asked(stream=i % 2 == 0))
    if response.status_code != 200:
        return "" if response.status_code >= 500 else response.text
    if i % 2:
        return "" if (said := response.json()["choices"][0]["message"]["content"]) == text else said
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    said = "".join(choice["delta"].get("content") or "" for choice in choices)
    whole = any(choice.get("finish_reason") for choice in choices)
    return "" if said == text or (not whole and text.startswith(said)) else said


def test_hostile_requests_while_callables_raise_at_random(monkeypatch):
    """The process lives, and every answer that is completed is right."""
    modules = [f"mlx_mtp.serve.{name}" for name in sorted({*ON_THE_ENGINE, *IN_THE_APPLICATION})]
    failures = RandomFailures(monkeypatch, *modules, every=400, seed=0)
    site, app = start()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        until(lambda: site.engine.state != "loading", 60)
        text = client.post(CHAT, json=asked()).json()["choices"][0]["message"]["content"]
        failures.armed = True
        with ThreadPoolExecutor(6) as pool:
            wrong = list(pool.map(lambda i: ask(client, i, text), range(2000 if SWEEP else 60)))
        failures.armed = False
        assert [each for each in wrong if each] == []
        assert failures.count > 10
        assert site.engine.thread.is_alive()
        assert [ask(client, 3 * i, text) for i in (1, 3, 6)] == ["", "", ""]
    site.engine.stop(0)
    site.engine.thread.join(10)
    assert not site.engine.thread.is_alive()
