"""The HTTP APIs: every answer is the one of `mlx_mtp.generate`, and what is not supported is refused by its name."""

import functools
import json
import threading

import pytest

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.serve.answer import TextPart
from mlx_mtp.serve.api_request import data
from mlx_mtp.serve.history import parsed
from mlx_mtp.serve.job import Begun, DecodeRequest, End, Job
from mlx_mtp.serve.token_rules import _bytes


def events(response):
    """The data of a stream's events, whose names agree with their types."""
    found = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines and lines["data"] != "[DONE]":
            data = json.loads(lines["data"])
            assert lines.get("event", data.get("type")) == data.get("type")
            found.append(data)
    return found


def answers(model, tokenizer):
    """Return a function that returns a model's answer to a question by the Python API."""

    @functools.cache
    def answer(question, n=30, **options):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        return mlx_mtp.generate(model, tokenizer, prompt, max_tokens=n, kv_group_size=32, **options)

    return answer


@pytest.fixture(scope="module")
def truth():
    """The demo's answer by the Python API, from a second copy of the model."""
    return answers(*mlx_mtp.load(demo_path()))


@pytest.fixture(scope="module")
def random_truth(load_one_layer):
    """The same of the model of `one_layer`."""
    return answers(*load_one_layer())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}], ids=["greedy", "seeded"])
def test_the_answer_is_that_of_generate(chat, truth, options):
    ours = {"temp" if name == "temperature" else name: value for name, value in options.items()}
    want = truth("Write a function that sorts.", 12, **ours)
    options = {"max_tokens": 12, **options}
    whole = chat("Write a function that sorts.", **options).json()
    assert whole["choices"][0]["message"]["content"] == want
    streamed = chat("Write a function that sorts.", stream=True, **options)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == want
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert len({c["id"] for c in chunks}) == 1


def test_usage_counts(random_chat):
    whole = random_chat(max_tokens=8).json()["usage"]
    chunks = events(random_chat(max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    for usage in (whole, chunks[-1]["usage"]):
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
        assert usage["mlx_mtp"]["tokens_per_cycle"] >= 1


def test_choices_differ_by_their_seeds(random_chat, random_truth):
    choices = random_chat(n=2, temperature=1.5, seed=7, max_tokens=16).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    assert [c["message"]["content"] for c in choices] == [
        random_truth("What does len do?", 16, temp=1.5, seed=seed) for seed in (7, 8)
    ]


def test_length_and_stop_strings(chat, truth):
    full = truth("What does len do?")
    assert chat(max_tokens=3).json()["choices"][0]["finish_reason"] == "length"
    stop = full.split()[3]
    choice = chat(stop=[stop]).json()["choices"][0]
    assert choice["message"]["content"] == full[: full.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert "".join(
        c["choices"][0]["delta"].get("content") or "" for c in events(chat(stop=stop, stream=True))
    ) == full[: full.index(stop)]  # fmt: skip


def test_logprobs(chat):
    choice = chat(logprobs=True, top_logprobs=3, max_tokens=5).json()["choices"][0]
    logprobs = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in logprobs) == choice["message"]["content"]
    for each in logprobs:
        assert each["logprob"] == each["top_logprobs"][0]["logprob"]
        assert len(each["top_logprobs"]) == 3
        assert bytes(each["bytes"]).decode() == each["token"]
    streamed = events(chat(logprobs=True, max_tokens=5, stream=True))
    assert [e["token"] for c in streamed for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]] == [
        each["token"] for each in logprobs
    ]


def test_bytes_of_a_token_that_is_a_part_of_a_character(one_layer, random_chat):
    tokenizer = one_layer.service.info.tokenizer
    first, *_ = tokenizer.encode("\U0001f600", add_special_tokens=False)
    choice = random_chat(logprobs=True, logit_bias={str(first): 100}, max_tokens=1).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["bytes"] == [0xF0]
    assert {pieces: _bytes(Pieces(pieces), 0, "\ufffd") for pieces in ("<0xE2>", "\ufffd", "Ġð")} == {
        "<0xE2>": b"\xe2", "\ufffd": "\ufffd".encode(), "Ġð": b" \xf0",
    }  # fmt: skip


class Pieces(str):
    """A fake tokenizer with one token."""

    def convert_ids_to_tokens(self, token):
        return str(self)


def test_prefill_sends_no_events(one_layer):
    """A stream sends keep-alive lines only while there are no events; without them clients disconnect."""
    events, finished = [], threading.Event()
    prompt = one_layer.service.info.tokenizer.encode("read this " * 100)
    request = DecodeRequest(prompt, max_tokens=1, sampling={"seed": 1})
    one_layer.service.engine.submit(
        [Job(request, lambda event: (events.append(event), isinstance(event, End) and finished.set()))]
    )
    assert finished.wait(60)
    assert len(prompt) > 2 * one_layer.service.engine.served.tree.chunking.step
    assert [type(event) for event in events] == [Begun, TextPart, End]


def test_penalties_and_bias_change_the_answer(chat, truth):
    question = "Write a function that sorts."
    plain, chat = truth(question, 12), functools.partial(chat, max_tokens=12)
    for options in ({"logit_bias": {"5": 100}}, {"repetition_penalty": 5.0}, {"presence_penalty": 2.0}):
        assert chat(question, **options).json()["choices"][0]["message"]["content"] != plain, options
    assert chat(question, repetition_penalty=1.0).json()["choices"][0]["message"]["content"] == plain


def test_completions(one_layer, random_truth):
    body = {"prompt": "def read_lines(path):", "max_tokens": 12}
    whole = one_layer.post("/v1/completions", json={**body, "logprobs": 2}).json()
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["choices"][0]["text"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 12
    chunks = events(one_layer.post("/v1/completions", json={**body, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    several = one_layer.post("/v1/completions", json={**body, "prompt": [body["prompt"], [5, 6, 7]], "n": 2}).json()
    assert [c["text"] for c in several["choices"][:2]] == [whole["choices"][0]["text"]] * 2
    assert len(several["choices"]) == 4


def test_messages(served, truth):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What does len do?"}]}]}
    body |= {"max_tokens": 30, "metadata": {"user_id": "x"}, "context_management": {"edits": []}}
    want = truth("What does len do?")
    whole = served.post("/v1/messages?beta=true", json=body).json()
    assert [(b["type"], b["text"]) for b in whole["content"]] == [("text", want)]
    assert whole["stop_reason"] == "end_turn"
    found = events(served.post("/v1/messages", json={**body, "stream": True}))
    names = [e["type"] for e in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta") == want
    counted = served.post("/v1/messages/count_tokens", json={**body, "max_tokens": None}).json()["input_tokens"]
    usage = found[-2]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    stop = want.split()[2]
    ended = served.post("/v1/messages", json={**body, "stop_sequences": [stop]}).json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)


def test_claude_code_s_first_line_is_no_part_of_the_prompt(served):
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "skills"}], "max_tokens": 1}
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123;"}
    counts = [
        served.post("/v1/messages/count_tokens", json={**body, "system": system}).json()["input_tokens"]
        for system in (blocks, [billing, *blocks], "Be brief.")
    ]
    assert len(set(counts)) == 1


def test_responses(served, truth):
    want = truth("What does len do?")
    body = {"input": "What does len do?", "max_output_tokens": 30}
    whole = served.post("/v1/responses", json=body).json()
    assert whole["output"][0]["content"][0]["text"] == want
    assert whole["status"] == "completed"
    found = events(served.post("/v1/responses", json={**body, "stream": True, "max_output_tokens": 3}))
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    assert [e["type"] for e in found[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["status"] == "incomplete"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What does len do?"}]}]
    assert (
        served.post("/v1/responses", json={**body, "input": items}).json()["output"][0]["content"][0]["text"] == want
    )


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG = [{"role": "user", "content": "hello " * 2100}]


@pytest.mark.parametrize(
    ("path", "change", "name"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"functions": [{}]}, "functions"),
        (CHAT, {"n": 0}, "n=0"),
        (CHAT, {"temperature": "hot"}, "temperature='hot'"),
        (CHAT, {"temperature": True}, "temperature=True"),
        (CHAT, {"top_p": 2}, "top_p=2"),
        (CHAT, {"seed": 1.5}, "seed"),
        (CHAT, {"stop": [""]}, "stop"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logit_bias": {"-1": 2}}, "logit_bias"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: role 'robot'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        (CHAT, {"messages": LONG}, "prompt is too long"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "empty"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"messages": LONG}, "prompt is too long"),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        (RESPONSES, {"input": "x", "text": ["format"]}, "text"),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (RESPONSES, {"input": 7}, "input=7: allowed is a text or a list of objects"),
        (RESPONSES, {"input": "x", "metadata": {"note": "\ud800"}}, "Unicode"),
        (RESPONSES, {"input": "x", "metadata": {"note": 1e999}}, "metadata"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": "\ud800"}]}, "tools"),
        (CHAT, {"modalities": 1}, "modalities"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_unsupported_values_are_refused_by_name(one_layer, path, change, name):
    body = json.dumps({**HI, **change}).replace("Infinity", "1e999")
    response = one_layer.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]


def test_hints_are_ignored(one_layer):
    hints = {"store": True, "user": "u", "metadata": {}, "service_tier": "auto", "prediction": {}, "parallel": 1}
    assert one_layer.post(CHAT, json={**HI, **hints}).status_code == 200
    hints = {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}, "service_tier": "auto"}
    assert one_layer.post(MESSAGES, json={**HI, **hints}).status_code == 200


def test_more_tokens_than_fit_are_cut(chat):
    assert chat(max_tokens=32000, stop=["."]).status_code == 200


def test_prompts_are_reused(random_chat):
    long = " ".join(f"word{i}" for i in range(60))
    first, second = (random_chat(long, max_tokens=1).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > 100


def test_an_event_is_one_line_to_every_client():
    event = {"text": "a\u2028b\u2029c\x85d\re\U0001f600"}
    (line,) = data(event).strip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == event


def test_arguments_of_calls():
    assert parsed('{"x": 1}') == {"x": 1}
    assert parsed("[1") == "[1"
    assert parsed({"x": 1}) == {"x": 1}


def test_progress_of_a_prefill_is_streamed_on_request(one_layer):
    body = {"max_tokens": 1, "stream": True}
    for asked in (False, True):
        question = {"role": "user", "content": f"{asked} " + "word " * 120}
        response = one_layer.post(
            "/v1/chat/completions", json={**body, "messages": [question], "return_progress": asked}
        )
        found = [event["prompt_progress"] for event in events(response) if "prompt_progress" in event]
        done = [each["processed"] for each in found]
        assert bool(done) == asked
        assert done == sorted(set(done))
        assert all(0 < each["processed"] <= each["total"] and each["choice"] == 0 for each in found)
