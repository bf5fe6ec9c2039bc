"""Tools over HTTP: a model with a dictated answer calls one, every API returns the call, and accepts its result."""

import json

import pytest
from dictated import Dictated, dictated

CALL = 'Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
SHORT = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
WEATHER = {"name": "weather", "description": "Report the weather."}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with dictated(tmp_path_factory, drafts=0) as client:  # none would be accepted
        yield client


def chat(client, **body):
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [FUNCTION], **body}
    return client.post("/v1/chat/completions", json=body)


def data(response):
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_chat_completions_return_calls(client):
    Dictated.words = CALL
    choice = chat(client).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    deltas = [c["choices"][0]["delta"] for c in data(chat(client, stream=True))]
    pieces = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert pieces[0]["function"]["name"] == "weather"
    assert pieces[0]["id"].startswith("call_")
    assert "".join(p["function"]["arguments"] for p in pieces) == '{"city": "Bonn"}'
    assert "".join(d.get("content") or "" for d in deltas) == "Let me look."


def test_messages_return_calls(client):
    Dictated.words = CALL
    body = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 100}
    body["tools"] = [{**WEATHER, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
    whole = client.post("/v1/messages", json=body).json()
    assert whole["stop_reason"] == "tool_use"
    assert whole["content"][1]["input"] == {"city": "Bonn"}
    found = data(client.post("/v1/messages", json={**body, "stream": True}))
    starts = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    assert [e["index"] for e in found if e["type"] == "content_block_stop"] == [0, 1]
    given = [e["delta"].get("partial_json") for e in found if e["type"] == "content_block_delta"]
    assert json.loads(given[-1]) == {"city": "Bonn"}


def test_responses_return_calls(client):
    Dictated.words = CALL
    body = {"input": "Weather?", "tools": [{"type": "function", **WEATHER, "parameters": SCHEMA, "strict": True}]}
    whole = client.post("/v1/responses", json=body).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    found = data(client.post("/v1/responses", json={**body, "stream": True}))
    (done,) = [e for e in found if e["type"] == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == {"city": "Bonn"}
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["message", "function_call"]


def test_only_offered_tools_are_called(client):
    Dictated.words = SHORT
    for body in ({"tools": None}, {"tool_choice": "none"}):
        choice = chat(client, **body).json()["choices"][0]
        assert choice["message"]["content"] == SHORT
        assert "tool_calls" not in choice["message"]
    Dictated.words = SHORT + SHORT
    assert len(chat(client).json()["choices"][0]["message"]["tool_calls"]) == 2
    one = chat(client, parallel_tool_calls=False).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


def test_reasoning_is_separate(client):
    Dictated.words = "<think>\nhm, well</think>\n\nYes."
    message = chat(client).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, well", "Yes.")
    body = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 100}
    content = client.post("/v1/messages", json=body).json()["content"]
    assert [(b["type"], b.get("thinking") or b.get("text")) for b in content] == [
        ("thinking", "hm, well"),
        ("text", "Yes."),
    ]
    output = client.post("/v1/responses", json={"input": "Weather?"}).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    usage = chat(client).json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


GIVEN = {"name": "weather", "arguments": '{"city": "Bonn"}'}
HISTORY = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "hm",
     "tool_calls": [{"id": "c", "type": "function", "function": GIVEN}]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]  # fmt: skip
USE = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bonn"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "rain"}]}
BLOCKS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
    {"role": "user", "content": [RESULT]},
]
ITEMS = [
    {"role": "user", "content": "Weather?"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", **GIVEN},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
]


def test_tool_results_give_the_same_prompt_in_all_apis(client):
    Dictated.words = "Take an umbrella."
    tools = {"tools": [{**WEATHER, "input_schema": SCHEMA}]}
    counts = [
        chat(client, messages=HISTORY).json()["usage"]["prompt_tokens"],
        client.post("/v1/messages/count_tokens", json={"messages": BLOCKS, **tools}).json()["input_tokens"],
        client.post("/v1/responses", json={
            "input": ITEMS, "tools": [{"type": "function", **WEATHER, "parameters": SCHEMA}],
        }).json()["usage"]["input_tokens"],
    ]  # fmt: skip
    assert len(set(counts)) == 1


def test_variables_reach_the_template(client):
    Dictated.words = "Yes."
    plain = chat(client).json()["usage"]["prompt_tokens"]
    for more in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"effort": "high"}}):
        assert chat(client, **more).json()["usage"]["prompt_tokens"] > plain
