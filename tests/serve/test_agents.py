"""Sessions of coding agents with tool calls: no request is refused, each prompt extends the previous one.

`agent_sessions.json` contains each session's first request, in the form that the named version of the program sent
(without a version: that the program's documentation states), with short texts. Later requests contain our answers.
"""

import json
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient
from sweep import SWEEP, paired, sampled
from templates import OWN, tokenizer_of

from mlx_mtp.cache.prompt_prefix import shared
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.serve import engine
from mlx_mtp.serve.answer import Splitter
from mlx_mtp.serve.app import WARNING, Service, application
from mlx_mtp.serve.engine import Engine, JobLimits
from mlx_mtp.serve.fields import ModelInfo
from mlx_mtp.serve.guard import Rules
from mlx_mtp.serve.job import Begun, End
from mlx_mtp.serve.metrics import Metrics
from mlx_mtp.serve.prompts import marks_of
from mlx_mtp.serve.tool_calls.table import format_of

SESSIONS = json.loads((Path(__file__).parents[1] / "support/fixtures/agent_sessions.json").read_text())
TEMPLATES = ("json", "members", "short ids", "one system turn", "alternates", "described")
CALLS = 10 if SWEEP else 4


def answer_of(tokenizer, number, session):
    """The model's answer at turn `number`: a tool call in each of the first CALLS turns."""
    if number >= CALLS:
        return "All done."
    text = f"Step {number}.\n"
    if tool := session.get("tool"):
        arguments = {session["arguments"]: f"  echo '{number}' </tool_call> \\n\n"}
        text += f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
    return text


class Scripted:
    """An application whose model answers with `answer_of`, and the prompts that it received."""

    def __init__(self, template, monkeypatch):
        self.tokenizer, self.prompts = tokenizer_of(OWN[template]), []
        self.format = format_of(tokenizer_of(OWN["json"]))
        monkeypatch.setattr(engine, "answer", self.answer)
        monkeypatch.setattr(engine, "QUIET", 1e9)  # no prefill between requests
        batch = SimpleNamespace(step=lambda: None, close=lambda: None)
        served = SimpleNamespace(ranks=None, batch=batch, tree=SimpleNamespace(decoded=True))
        self.engine = Engine(lambda: served, JobLimits(), store=lambda served: None)
        self.service = Service(self.engine, Metrics(self.engine), Rules())
        self.service.info = ModelInfo(
            ("demo",), self.tokenizer, marks_of(self.tokenizer), 1 << 20, None, {}, {}, turns=False, created=0
        )

    def answer(self, served, job, crowded):
        text = answer_of(self.tokenizer, len(self.prompts), self.session)
        self.prompts.append(job.request.prompt)
        job.send(Begun(0))
        job.prefilling = False
        splitter = Splitter(self.tokenizer, (), tool_format=self.format, tools=job.request.tools)
        for letter in text:
            for part in splitter.feed(letter):
                job.send(part)
            yield
        for part in splitter.end(cut=False):
            job.send(part)
        job.send(End("tool_calls" if splitter.called else "stop", None, Stats(), 0, 0.0, 0))


@pytest.fixture
def scripted(request, monkeypatch):
    app = Scripted(request.param, monkeypatch)
    app.engine.thread.start()
    while app.engine.state == "loading":
        time.sleep(0.001)
    with TestClient(application(app.service), base_url="http://localhost") as client:
        app.client = client
        yield app
    app.engine.stop(0)
    app.engine.thread.join(10)


def content_and_call(text):
    """The content, and the id, name and arguments of the call, in a stream of any of the three APIs."""
    content, call = "", {}
    for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")):
        for choice in event.get("choices", ()):
            content += choice["delta"].get("content") or ""
            for each in choice["delta"].get("tool_calls", ()):
                call["$ID"] = call.get("$ID", "") + each.get("id", "")
                call["$NAME"] = call.get("$NAME", "") + each["function"].get("name", "")
                call["$ARGUMENTS"] = call.get("$ARGUMENTS", "") + each["function"].get("arguments", "")
        if event.get("type") == "content_block_start" and event["content_block"]["type"] == "tool_use":
            call |= {"$ID": event["content_block"]["id"], "$NAME": event["content_block"]["name"], "$ARGUMENTS": ""}
        if event.get("type") == "content_block_delta":
            content += event["delta"].get("text", "")
            if "$ARGUMENTS" in call:
                call["$ARGUMENTS"] += event["delta"].get("partial_json", "")
        if event.get("type") == "response.completed":
            for item in event["response"]["output"]:
                content += "".join(part["text"] for part in item.get("content", ()))
                if item["type"] == "function_call":
                    call = {"$ID": item["call_id"], "$NAME": item["name"], "$ARGUMENTS": item["arguments"]}
    return content, call


def filled(shape, values):
    """A part of a request with the names of values replaced by the values."""
    if isinstance(shape, dict):
        return {key: filled(each, values) for key, each in shape.items()}
    if isinstance(shape, list):
        return [filled(each, values) for each in shape]
    if isinstance(shape, str) and shape in values:
        return values[shape]
    return shape.replace("$N", values["$N"]) if isinstance(shape, str) else shape


def without_cache_marks(value):
    """A part of a request without `cache_control`, which clients put on their newest messages only."""
    if isinstance(value, dict):
        return {key: without_cache_marks(each) for key, each in value.items() if key != "cache_control"}
    return [without_cache_marks(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("name", "scripted"),
    sampled(paired(SESSIONS, TEMPLATES), product(SESSIONS, TEMPLATES)),
    indirect=["scripted"],
)
def test_a_session_of_calls(scripted, name):
    session = scripted.session = SESSIONS[name]
    body, texts = json.loads(json.dumps(session["body"])), []
    for number in range(CALLS + 1):
        response = scripted.client.post(session["path"], params=session["query"], json=body)
        assert response.status_code == 200, response.text
        warned = response.headers.get(WARNING, "")
        assert warned.count(";") < 2 * len(session["warned"]) + 1
        assert all(each in warned for each in session["warned"])
        assert bool(warned) == bool(session["warned"]), warned
        content, call = content_and_call(response.text)
        texts.append(content.strip())
        if session.get("tool") and number < CALLS:
            expected = f"  echo '{number}' </tool_call> \\n\n"
            assert (call["$NAME"], json.loads(call["$ARGUMENTS"])) == (
                session["tool"],
                {session["arguments"]: expected},
            )
            call["$INPUT"] = json.loads(call["$ARGUMENTS"])
        values = {"$TEXT": content, "$N": str(number), **call}
        old = body[session["list"]]
        body[session["list"]] = [*without_cache_marks(old), *filled(session["turn"], values)]
    assert texts == [*(f"Step {number}." for number in range(CALLS)), "All done."]
    generation_prompt = len(scripted.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    for before, prompt in zip(scripted.prompts, scripted.prompts[1:], strict=False):
        assert shared(before, prompt) >= len(before) - generation_prompt, scripted.tokenizer.decode(prompt)[-600:]
