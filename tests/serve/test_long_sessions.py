"""The number of rows that a follow-up prefills after any kind of end; its text is that of a new server."""

import itertools
import threading
import time
import types
from functools import cache

import families
import pytest
import tiny
from letters import Letters
from prefix_requests import rows_alike
from sweep import sampled

import mlx_mtp
from mlx_mtp.serve import endings
from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.answer import TextPart, ToolCall
from mlx_mtp.serve.batch_decoder import BatchDecoder
from mlx_mtp.serve.chat import ChatRequest
from mlx_mtp.serve.engine import Engine
from mlx_mtp.serve.job import Begun, DecodeRequest, End, Job, RequestFailed, Served, answer, prefill_next
from mlx_mtp.serve.prefixes import Chunking, PrefixTree
from mlx_mtp.serve.prompts import EncodedPrompt

STEP, SHOWN, MOST = 4, 14, 20
FIRST, SECOND = [5 * i % 13 for i in range(23)], [(i * i + 3) % 13 for i in range(21)]
MORE = [1, 2, 3, 4, 5, 6]
SAMPLED = {"temp": 1.0, "seed": 3}
ENDINGS = ("length", "itself", "stop", "cancelled", "late", "failing")
# Keys and values; windows; recurrent states; latent attention.
KINDS = ("glm4_moe", "step3p5", "qwen3_5", "deepseek_v3")
CASES = [*itertools.product(KINDS, ENDINGS, (True, False), ((FIRST,), (FIRST, SECOND)), (True, False))]


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_models):
    """Return a function that loads the tiny model of a kind once."""

    @cache
    def load(kind):
        if kind == "step3p5":
            return tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
        return mlx_mtp.load_model(families.build(kind, tmp_path_factory.mktemp("family"))[0])

    return load


def served_of(model, *, decoded, stop_tokens=(), limit=1 << 30):
    """Return the model and its tree; decoded: store decoded rows if they pass the comparison."""
    options = {"num_draft_tokens": min(2, model.max_draft_tokens), "adaptive": False, "stop_tokens": stop_tokens}
    blank = mlx_mtp.make_prompt_cache(model, num_draft_tokens=options["num_draft_tokens"])
    tree = PrefixTree(blank, Chunking(STEP), limit)
    tree.decoded = decoded and rows_alike(model, blank, 2 * STEP)
    return Served(model, Letters(), tree, options, None, batch=BatchDecoder(model, Letters(), options, STEP))


@pytest.fixture
def start():
    begun = []

    def make(served):
        begun.append(Engine(load=lambda: served))
        begun[-1].thread.start()
        return begun[-1]

    yield make
    for engine in begun:
        engine.stop(0)
        engine.thread.join(10)
        assert not engine.thread.is_alive()


class Client:
    """A job and its events; at: called after SHOWN letters; then: called after the last event."""

    def __init__(self, engine, request, *, at=lambda job: None, then=lambda client: None):
        self.events, self.finished, self.at, self.then = [], threading.Event(), at, then
        self.job = Job(request, self.take)
        engine.submit([self.job])

    @property
    def text(self):
        return "".join(getattr(event, "text", "") for event in self.events)

    @property
    def cached(self):
        return next(event.cached for event in self.events if isinstance(event, Begun))

    def take(self, event):
        self.events.append(event)
        if len(self.text) == SHOWN:
            self.at(self.job)
        if isinstance(event, (End, RequestFailed)) or self.job.cancelled:
            self.finished.set()
            self.then(self)


def plain(model, prompt, n=MOST):
    return [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n, **SAMPLED)]


def until(found):
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


def broken(tokens, logits):
    if tokens.size >= len(FIRST) + SHOWN - 1:
        raise ZeroDivisionError
    return logits


def asked(model, prompt, ending):
    """Return a request, its action after SHOWN letters, and the tokens of its answer."""
    tokens, more = plain(model, prompt), {"max_tokens": SHOWN if ending == "length" else MOST}
    if ending == "stop":
        more["stops"] = (Letters().decode(tokens)[SHOWN : SHOWN + 2],)
    if ending == "failing":
        more["penalties"] = {"any": 1}

    def follows(parts):
        return [*prompt, *tokens[: sum(len(part.text) for part in parts)], MORE[0]]

    def act(job):
        job.cancelled = ending == "cancelled"
        job.deadline = 0 if ending == "late" else job.deadline

    return DecodeRequest(prompt, follows=follows, sampling=dict(SAMPLED), **more), act, tokens


def reused(tree, ending, read, known, at_once):
    """Return the minimum and maximum of reused rows. read: tokens of the prompt; known: with those of the answer."""
    last, further = (read - 1) // STEP * STEP, known // STEP * STEP
    if ending == "failing":
        return last, last if at_once or not tree.decoded else read - 1
    if tree.decoded and (tree.blank.is_trimmable() or ending in ("length", "itself")):
        return known - 1, known
    if tree.decoded:  # a state has one position, which may be after the received text
        return last if at_once else further, known
    return (last, last) if at_once else (further, further)


@pytest.mark.parametrize(("kind", "ending", "decoded", "prompts", "at_once"), sampled(CASES[::37], CASES))
def test_a_follow_up_prefills_only_tokens_without_rows(
    models, start, monkeypatch, kind, ending, decoded, prompts, at_once
):
    """Immediately and after idle time; the previous answer was decoded alone or with another one."""
    monkeypatch.setattr("mlx_mtp.serve.job.LogitRules", lambda **_: broken)
    model, later = models(kind), {}
    requests = [asked(model, [*prompt], ending) for prompt in prompts]
    stop_tokens = requests[0][2][SHOWN : SHOWN + 1] if ending == "itself" else ()
    engine = start(served_of(model, decoded=decoded, stop_tokens=stop_tokens))

    def follow(client):
        if client not in later:
            prompt = [*client.job.request.follows(client.job.parts), *MORE[1:]]
            later[client] = Client(engine, DecodeRequest(prompt, max_tokens=3, sampling=dict(SAMPLED)))

    then = follow if at_once else lambda client: None
    clients = [Client(engine, request, at=act, then=then) for request, act, _ in requests]
    assert all(client.finished.wait(20) for client in clients)
    if not at_once:
        until(lambda: all(client.job.finished for client in clients) and engine._unsaved is None)
        for client in clients:
            follow(client)
    for client in clients:
        after = later[client]
        assert after.finished.wait(20)
        prompt = after.job.request.prompt
        fresh = [*itertools.takewhile(lambda token: token not in stop_tokens, plain(model, prompt, 3))]
        assert after.text[: len(fresh)] == Letters().decode(fresh)  # the stand-in repeats a last letter
        known = len(prompt) - len(MORE)
        least, most = reused(engine.served.tree, ending, len(client.job.request.prompt), known, at_once)
        assert least <= after.cached <= most


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_prefill_keeps_its_complete_chunks(models, kind):
    """The client has disconnected, or a request continues a prefill of the background."""
    for begin in (
        prefill_next,
        lambda served, prompt: answer(served, Job(DecodeRequest(prompt), lambda event: None), bool),
    ):
        served = served_of(models(kind), decoded=False)
        reading = begin(served, FIRST)
        for _ in range(3):
            next(reading)
        reading.close()
        assert served.tree.covered(FIRST) == 3 * STEP


def test_answers_that_end_while_the_server_is_busy_are_stored(models, start, monkeypatch):
    """When the queue of finished jobs is full, the rows of the oldest are stored without a pass."""
    monkeypatch.setattr(endings, "MAX_FINISHED", 1)
    monkeypatch.setattr(Engine, "_idle", lambda self: time.sleep(0.001))
    engine = start(served_of(models("glm4_moe"), decoded=True))
    prompts = [[i, *FIRST] for i in range(3)]
    for prompt in prompts:
        assert Client(engine, DecodeRequest(prompt, max_tokens=SHOWN, sampling=dict(SAMPLED))).finished.wait(20)
    tree = engine.served.tree
    lengths = [tree.covered([*prompt, *plain(models("glm4_moe"), prompt)]) for prompt in prompts]
    assert lengths == [len(FIRST) + SHOWN] * 2 * tree.decoded + [20] * (3 - 2 * tree.decoded)


@pytest.mark.parametrize(("prompt", "closed"), [([1, 2, 3, 4, 9], True), ([1, 2, 9], False), ([8], False)])
def test_a_request_ends_the_background_prefill_that_it_continues(start, monkeypatch, prompt, closed):
    """The prefill of another conversation continues later."""
    order, hold = [], threading.Event()

    def ahead(served, prompt, cache):
        try:
            yield 4
            hold.wait(5)
            yield 4
            order.append("read")
        finally:
            order.append("ended")

    def stand_in(served, job, crowded):
        order.append(job.request.prompt)
        job.send(End("stop", None, None, 0, 0.0, 0))
        yield

    monkeypatch.setattr(engines, "prefill_next", ahead)
    monkeypatch.setattr(engines, "answer", stand_in)
    tree = types.SimpleNamespace(decoded=False)
    engine = start(types.SimpleNamespace(ranks=None, batch=None, files=None, tree=tree))
    Client(engine, DecodeRequest([1, 2], follows=lambda parts: [1, 2, 3, 4, 5, 6]))
    until(lambda: engine._prefilled == 4)
    Client(engine, DecodeRequest(prompt))
    hold.set()
    until(lambda: "ended" in order and prompt in order)
    assert order == ([[1, 2], "ended", prompt] if closed else [[1, 2], prompt, "read", "ended"])


def test_nothing_is_prefilled_ahead_without_a_prefix_cache(models):
    assert list(prefill_next(served_of(models("glm4_moe"), decoded=False, limit=0), FIRST)) == []


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = {"role": "user", "content": "What does f return?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
TIMED = "mlx_mtp:time_to_first_token_after_tool_result_seconds_count"


def count(served):
    lines = served.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(TIMED))


def test_the_time_from_a_tool_result_to_the_next_first_token_is_reported(one_layer):
    conversations = [
        ([QUESTION], 0),
        ([QUESTION, CALL, RESULT], 1),
        ([QUESTION, CALL, RESULT, {"role": "user", "content": "Well?"}], 1),
        ([QUESTION, CALL, RESULT, {"role": "assistant", "content": "It is 3."}, QUESTION], 0),
    ]
    for messages, more in conversations:
        before = count(one_layer)
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 2}
        assert one_layer.post("/v1/chat/completions", json=body).status_code == 200
        assert count(one_layer) == before + more


def test_the_next_prompt_after_calls_has_their_results(served, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "mlx_mtp.serve.api_request.encode_chat", lambda *given, **how: seen.append(given[2]) or EncodedPrompt([1])
    )
    (request,) = ChatRequest({"messages": [QUESTION], "tools": TOOLS}, served.service.info).requests
    calls = [ToolCall("f", "{}"), ToolCall("f", "{}")]
    for parts in ([TextPart("It is 3.")], [TextPart("I call f."), *calls]):
        request.follows(parts)
        roles = [message["role"] for message in seen[-1] if message["role"] != "system"]  # which describes the tools
        assert roles == ["user", "assistant", *(["tool", "tool"] if len(parts) > 1 else ["user"])]


def test_conversations_with_only_the_first_mark_in_common_share_nothing(models, start, monkeypatch):
    """They share fewer tokens than the minimum of a chunk."""
    monkeypatch.setattr(Engine, "_idle", lambda self: time.sleep(0.001))
    served = served_of(models("glm4_moe"), decoded=True)
    served.tree.chunking = Chunking(8, 4)
    engine = start(served)
    assert Client(engine, DecodeRequest(FIRST, max_tokens=3)).finished.wait(20)
    for same in (3, 5):
        other = Client(engine, DecodeRequest([*FIRST[:same], 11, 11, 11], max_tokens=3))
        assert other.finished.wait(20)
        assert other.cached == (same if same > 4 and served.tree.decoded else 0)
