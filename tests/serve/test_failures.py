"""Any callable of the server raises: the process stays up, at most one request fails, other responses are right.

The callables are found by watching a run (`raising.Calls`), so a new one is tested as soon as the server calls it.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
from letters import Letters
from raising import Calls, RandomFailures
from served import start
from starlette.testclient import TestClient
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.answer import TextPart
from mlx_mtp.serve.app import ActiveRequest, application
from mlx_mtp.serve.batch_decoder import BatchDecoder
from mlx_mtp.serve.engine import Engine, JobLimits
from mlx_mtp.serve.job import DecodeRequest, End, Job, RequestFailed, Served
from mlx_mtp.serve.prefixes import Chunking, PrefixTree
from mlx_mtp.serve.preparation import Preparations
from mlx_mtp.serve.server import Loaded

OPTIONS = {"num_draft_tokens": 2, "adaptive": False}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8], [9, 8, 7]]
ON_THE_ENGINE = ("engine", "job", "batch_decoder", "failures", "answer", "prefixes")
IN_THE_APPLICATION = (
    "app",
    "guard",
    "service",
    "preparation",
    "body",
    "chat",
    "api_request",
    "fields",
    "prompts",
    "metrics",
    "failures",
    "engine",
    "job",
)
CHAT = "/v1/chat/completions"
QUIET = "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
pytestmark = pytest.mark.filterwarnings(*QUIET, "ignore:coroutine")


class Client:
    """A job and its events."""

    def __init__(self, request: DecodeRequest):
        self.events, self.job = [], Job(request, self.take)

    def take(self, event):
        self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextPart))

    @property
    def failed(self) -> bool:
        return not (self.events and isinstance(self.events[-1], End))


def until(found, seconds=30) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.0005)


def run(load, requests, calls: Calls) -> list[Client]:
    """Run two requests at once, then one, then one more; the model is loaded again for each group."""
    engine = Engine(load, JobLimits(idle_unload=0.001), store=lambda served: None)
    with calls.watched():
        engine.thread.start()
    until(lambda: engine.state != "loading")
    calls.armed, clients = True, []
    for some in (requests[:2], requests[2:3], requests[3:]):
        clients += (new := [Client(request) for request in some])
        for client in new:
            engine.submit([client.job])
        until(lambda new=new: all(client.job.finished for client in new))
        until(lambda: engine.state == "unloaded")
        assert engine.thread.is_alive()
    engine.stop(0)
    engine.thread.join(10)
    assert not engine.thread.is_alive()
    assert engine.error is None
    return clients


def check(clients: list[Client], texts: list[str], calls: Calls) -> None:
    """Check that texts are correct up to their end, and that only the failed requests are cut."""
    lost, stack = [client for client in clients if client.failed], calls.stack or []
    # A pass of several sequences, or a load for which several requests are queued.
    shared = any(name in stack for name in ("BatchDecoder.step", "Engine._fail_queued", "Engine._loaded"))
    background = "Engine._idle" in stack or not stack
    assert len(lost) <= (0 if background else 2 if shared else 1)
    for client, text in zip(clients, texts, strict=True):
        assert text.startswith(client.text) if client.failed else client.text == text
        assert not client.failed or not client.events or isinstance(client.events[-1], RequestFailed)


class OtherRanks:
    """Stands in for other ranks: records the instructions."""

    def __init__(self):
        self.instructions = []

    def broadcast(self, instruction):
        self.instructions.append(instruction)


@pytest.fixture
def stand_ins(monkeypatch):
    """Replace the model: every answer repeats its prompt."""

    def answer(served, job, crowded):
        for token in job.request.prompt:
            job.send(TextPart(chr(97 + token)))
            yield
        job.send(End("stop", None, Stats(), 0, 0.0, 0))

    def compare(served):
        served.tree.decoded = True
        return iter((1, 2))

    for name in ("prefill_next", "prefill_tail"):
        monkeypatch.setattr(engines, name, lambda *_: iter((1, 2)))
    monkeypatch.setattr(engines, "compare_rows", compare)
    monkeypatch.setattr(engines, "answer", answer)
    monkeypatch.setattr(engines, "QUIET", 0.0002)
    monkeypatch.setattr(engines, "gc", SimpleNamespace(collect=int))  # each unload's takes seconds in a suite's heap
    batch = SimpleNamespace(step=lambda: None, close=lambda: None)
    return lambda: SimpleNamespace(ranks=OtherRanks(), batch=batch, tree=SimpleNamespace(decoded=None))


def watched(files, raises=None) -> Calls:
    return Calls(*(f"mlx_mtp.serve.{name}" for name in files), raises=raises)


def failures(seen: dict[str, int], calls_of_each: int = 5) -> list[tuple[str, int]]:
    """List the first calls of each callable."""
    return [(name, n) for name, times in seen.items() for n in range(1, min(calls_of_each, times) + 1)]


def test_every_callable_of_the_engine_raises(stand_ins):
    requests = [DecodeRequest(prompt, follows=lambda parts: [1, 2, 3]) for prompt in PROMPTS]
    texts = ["".join(chr(97 + token) for token in prompt) for prompt in PROMPTS]
    check(run(stand_ins, requests, calls := watched(["engine"])), texts, calls)
    assert len(calls.seen) > 50
    every = failures(calls.seen)
    for raises in sampled(failures(calls.seen, 2)[::2], every):
        check(run(stand_ins, requests, calls := watched(["engine"], raises)), texts, calls)


@pytest.fixture
def real(tiny_models, monkeypatch):
    """Return a function that loads a model, requests, and the text of each decoded alone."""
    model, requests, texts = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0], [], []
    for i, prompt in enumerate(PROMPTS):
        text = [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=3)]
        follows = [*prompt, *text, 1, 2, 3]
        more = {"penalties": {"logit_bias": {1: 0.0}}} if i == 1 else {"logprobs": 1} if i else {}
        requests.append(DecodeRequest(prompt, max_tokens=3, follows=lambda _, f=follows: f, **more))
        texts.append(Letters().decode(text))
    monkeypatch.setattr(engines, "QUIET", 0.0002)
    monkeypatch.setattr(engines, "gc", SimpleNamespace(collect=int))

    def load():
        tree = PrefixTree(mlx_mtp.make_prompt_cache(model, num_draft_tokens=2), Chunking(4), 1 << 30)
        tree.decoded = None
        return Served(model, Letters(), tree, OPTIONS, None, batch=BatchDecoder(model, Letters(), OPTIONS, 4))

    return load, requests, texts


def test_every_callable_below_the_engine_raises(real):
    load, requests, texts = real
    check(run(load, requests, calls := watched(ON_THE_ENGINE)), texts, calls)
    assert len(calls.seen) > 200
    every = failures(calls.seen)
    for raises in sampled(every[7::397], every):
        check(run(load, requests, calls := watched(ON_THE_ENGINE, raises)), texts, calls)


def asked(**more) -> dict:
    return {"messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 4, **more}


def visit(service, calls: Calls) -> list:
    """Request a response, a stream, metrics, an error, the models, and a response after all failures."""
    host = {"base_url": "http://localhost", "raise_server_exceptions": False}
    service = replace(service, preparations=Preparations())  # whose threads start while they are watched
    with calls.watched(), TestClient(application(service), **host) as client:
        client.get("/health")
        calls.armed = True
        found = [client.post(CHAT, json=asked()), client.post(CHAT, json=asked(stream=True)), client.get("/metrics")]
        found += [client.post(CHAT, json=asked(n=0)), client.get("/v1/models")]
        calls.armed = False
        return [*found, client.post(CHAT, json=asked())]


def number_lost(responses: list, text: str) -> int:
    """Return the number of failed responses; the others must be right, and a cut stream must end in an error."""
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


def test_every_callable_of_the_application_raises(one_layer):
    text = one_layer.post(CHAT, json=asked()).json()["choices"][0]["message"]["content"]
    calls = watched(IN_THE_APPLICATION)
    assert not number_lost(visit(one_layer.service, calls), text)
    assert len(calls.seen) > 200
    every = failures(calls.seen)
    for raises in sampled(every[7::397], every):
        assert number_lost(visit(one_layer.service, watched(IN_THE_APPLICATION, raises)), text) <= 1, raises


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


def post(client, i: int, text: str) -> str:
    """Send request i, of which two in three are hostile; return what is wrong with the response, or ""."""
    if i % 3:
        status = client.post(PATHS[i % len(PATHS)], content=HOSTILE[i % len(HOSTILE)]).status_code
        return "" if status < 600 else f"status {status}"
    response = client.post(CHAT, json=asked(stream=i % 2 == 0))
    if response.status_code != 200:
        return "" if response.status_code >= 500 else response.text
    if i % 2:
        return "" if (received := response.json()["choices"][0]["message"]["content"]) == text else received
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    received = "".join(choice["delta"].get("content") or "" for choice in choices)
    whole = any(choice.get("finish_reason") for choice in choices)
    return "" if received == text or (not whole and text.startswith(received)) else received


def test_hostile_requests_while_callables_raise_at_random(load_one_layer, monkeypatch):
    """The process stays up, and every complete response is right."""
    modules = [f"mlx_mtp.serve.{name}" for name in sorted({*ON_THE_ENGINE, *IN_THE_APPLICATION})]
    failures = RandomFailures(monkeypatch, *modules, every=400, seed=0)
    service, app = start(lambda: Loaded(*load_one_layer(), {}, {}))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        until(lambda: service.engine.state != "loading", 60)
        text = client.post(CHAT, json=asked()).json()["choices"][0]["message"]["content"]
        failures.armed = True
        with ThreadPoolExecutor(6) as pool:
            wrong = list(pool.map(lambda i: post(client, i, text), range(2000 if SWEEP else 60)))
        failures.armed = False
        assert [each for each in wrong if each] == []
        assert failures.count > 10
        assert service.engine.thread.is_alive()
        assert [post(client, 3 * i, text) for i in (1, 3, 6)] == ["", "", ""]
    service.engine.stop(0)
    service.engine.thread.join(10)
    assert not service.engine.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_without_one_of_its_events_fails(load_one_layer, monkeypatch, stream):
    """The event loop only logs what a callback raises; the answer must not go on after a hole."""
    put, pieces = ActiveRequest._put, []

    def second_is_lost(self, number, choice, event):
        pieces.extend([event] * isinstance(event, TextPart))
        if len(pieces) == 2 and event is pieces[-1]:
            raise RuntimeError("a piece is lost")
        put(self, number, choice, event)

    monkeypatch.setattr(ActiveRequest, "_put", second_is_lost)
    service, app = start(lambda: Loaded(*load_one_layer(), {}, {}))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        until(lambda: service.engine.state != "loading", 60)
        response = client.post(CHAT, json=asked(stream=stream))
    assert len(pieces) > 1
    assert response.status_code == 500 or ('"error"' in response.text and 'finish_reason": "' not in response.text)
