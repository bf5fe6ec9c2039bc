"""Ollama's API: lines of JSON, options by their names there, tools, formats, and requests as clients send them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from served import KEY

from mlx_mtp.serve.answer import TextPart
from mlx_mtp.serve.chat import messages_of
from mlx_mtp.serve.contents import MessageContents
from mlx_mtp.serve.fields import Refused
from mlx_mtp.serve.history import linked
from mlx_mtp.serve.ollama import OllamaChat, OllamaGenerate
from mlx_mtp.serve.ollama_fields import CHAT, as_openai, chat_messages, idle_seconds, most_predicted
from mlx_mtp.serve.template_traits import Traits
from mlx_mtp.serve.tool_calls.call_format import ToolCall

QUESTION = [{"role": "user", "content": "What does len do?"}]
ANSWER = "Return the number of items in a container."
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


def lines(response):
    assert response.headers["content-type"].startswith("application/x-ndjson"), response.text
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def chat(served, **more):
    return served.post("/api/chat", json={"model": "demo", "messages": QUESTION, **more})


def generate(served, **more):
    return served.post("/api/generate", json={"model": "demo", "prompt": "What does len do?", **more})


def test_a_chat_is_streamed_as_lines_of_json(served):
    *parts, last = lines(chat(served))
    assert "".join(part["message"]["content"] for part in parts) == ANSWER
    assert len(parts) > 3
    for part in (*parts, last):
        assert part["model"] == "demo"
        assert part["created_at"].endswith("Z")
        assert part["message"]["role"] == "assistant"
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")


def test_a_whole_chat_has_counts_and_times(served):
    body = chat(served, stream=False, options={"num_predict": 5}).json()
    assert ANSWER.startswith(body["message"]["content"])
    assert (body["done_reason"], body["eval_count"], body["prompt_eval_count"]) == ("length", 5, 13)
    total, *parts = (body[name] for name in TIMES)
    assert 0 < total < 60e9
    assert abs(total - sum(parts)) <= 3
    assert all(type(body[name]) is int for name in TIMES)


@pytest.mark.parametrize("stream", [False, True])
def test_generate_uses_the_chat_template_unless_raw(served, stream):
    found = [generate(served, stream=stream), generate(served, stream=stream, raw=True, options={"num_predict": 4})]
    bodies = [lines(each) if stream else [each.json()] for each in found]
    texts = ["".join(line["response"] for line in body) for body in bodies]
    plain = served.post("/v1/completions", json={"prompt": "What does len do?", "max_tokens": 4}).json()
    assert texts == [ANSWER, plain["choices"][0]["text"]]
    assert [body[-1]["prompt_eval_count"] for body in bodies] == [13, plain["usage"]["prompt_tokens"]]
    system = generate(served, stream=False, system="Be brief.", options={"num_predict": 1}).json()
    assert system["prompt_eval_count"] > 13


@pytest.mark.parametrize("post", [chat, generate])
def test_an_empty_request_loads_the_model(one_layer, post, monkeypatch):
    """It also ends the engine's wait for the seconds of an earlier request."""
    empty, engine, woken = {"messages": []} if post is chat else {"prompt": ""}, one_layer.service.engine, []
    wake = engine.signal.set
    monkeypatch.setattr(engine.signal, "set", lambda: woken.append(engine.idle_unload) or wake())
    for keep, seconds in (("5m", 300), (None, float("inf"))):
        body = post(one_layer, keep_alive=keep, **empty).json()
        assert (body["done"], body["done_reason"], woken[-1]) == (True, "load", seconds)
    request = (OllamaChat if post is chat else OllamaGenerate)({**empty, "keep_alive": 0}, one_layer.service.info)
    assert (request.idle, request.whole([])["done_reason"]) == (0, "unload")
    assert post(one_layer, options={"num_predict": 1}, keep_alive=-1, stream=False).json()["done"]
    assert one_layer.service.engine.idle_unload == float("inf")


def same(served, options, **ours):
    """Return whether an answer with Ollama's options is that of chat completions with `ours`."""
    theirs = chat(served, stream=False, options={"num_predict": 12, **options}).json()
    body = {"messages": QUESTION, "max_tokens": 12, **ours}
    choice = served.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert theirs["message"]["content"] == choice["message"]["content"]
    return theirs["message"]["content"]


def test_options_are_those_of_chat_completions(served, one_layer):
    plain = same(one_layer, {})
    options = {"temperature": 1.5, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.0001}
    assert same(one_layer, options, **options) != plain
    assert same(one_layer, {"repeat_penalty": 0.01, "repeat_last_n": -1}, repetition_penalty=0.01,
                repetition_context_size=-1) != plain  # fmt: skip
    assert same(served, {"stop": [" of"]}, stop=" of") == "Return the number"
    neutral = {"num_ctx": 4096, "num_keep": 4, "mirostat": 0, "typical_p": 1.0, "num_gpu": 1, "use_mmap": None}
    assert same(one_layer, neutral) == plain


REFUSED = {
    "an unknown field": ({"templates": "x"}, None, "unknown field 'templates'"),
    "an unknown option": ({"options": {"temprature": 1}}, None, "unknown option 'temprature'"),
    "no object": ({"options": 1}, "options=1", None),
    "a wrong number": ({"options": {"num_predict": 0}}, "num_predict=0", None),
    "a wrong temperature": ({"options": {"temperature": "hot"}}, "temperature='hot'", None),
    "mirostat": ({"options": {"mirostat": 2}}, "mirostat", None),
    "a template": ({"template": "{{ .Prompt }}"}, "template", None),
    "a format": ({"format": "yaml"}, "format='yaml'", None),
    "a schema": (
        {"format": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}},
        "format.properties.a",
        None,
    ),
    "a duration": ({"keep_alive": "5 minutes"}, "keep_alive='5 minutes'", None),
    "a picture": ({"images": ["iVBORw0KGgo="]}, "pictures are not read", None),
    "a picture of a raw prompt": ({"images": ["iVBORw0KGgo="], "raw": True}, "leave out raw", None),
    "no message": ({"messages": "hi"}, "messages='hi'", None),
    "a role": ({"messages": [{"role": "robot", "content": ""}]}, "role 'robot'", None),
    "a long prompt": ({"prompt": "hello " * 2100}, "prompt is too long", None),
    "long messages": ({"messages": [{"role": "user", "content": "hello " * 2100}]}, "prompt is too long", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_are_refused_or_have_no_effect(served, case):
    """An error is one line in Ollama's form; a warning is a header."""
    change, error, warning = REFUSED[case]
    post = generate if {"images", "prompt"} & change.keys() else chat
    found = post(served, stream=False, **{"options": {"num_predict": 1}, **change})
    if warning:
        assert warning in found.headers["X-MLX-MTP-Warning"]
        return
    assert found.status_code == 400
    assert found.json().keys() == {"error"}
    assert error in found.json()["error"]
    assert "\n" not in found.json()["error"]


def test_formats(served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    found = chat(served, stream=False, format=schema, options={"num_predict": 40}).json()
    assert json.loads(found["message"]["content"]).keys() == {"a"}
    found = generate(served, stream=False, format="json", options={"num_predict": 40}).json()
    assert found["response"].lstrip().startswith("{")
    assert chat(served, stream=False, format="", options={"num_predict": 3}).json()["message"]["content"] in ANSWER


def test_a_session_with_tools(one_layer):
    """A call has arguments as an object and no id; its result is linked by the tool's name."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    messages += [{"role": "tool", "tool_name": "f", "content": "3"}, {"role": "user", "content": "and?"}]
    found = chat(one_layer, messages=messages, tools=[tool], stream=False, options={"num_predict": 2})
    assert found.status_code == 200, found.text


def test_calls_and_reasoning_in_answers(served):
    info, body = served.service.info, {"messages": QUESTION, "prompt": "hi"}
    parts = [TextPart("hm", True), TextPart("ok"), ToolCall("f", '{"a":1}'), ToolCall("g", "[1")]
    calls = [
        {"function": {"index": 0, "name": "f", "arguments": {"a": 1}}},
        {"function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    whole = {"role": "assistant", "content": "ok", "thinking": "hm", "tool_calls": calls}
    assert OllamaChat(body, info).answer(parts) == {"message": whole}
    request = OllamaChat(body, info)
    streamed = [json.loads(line)["message"] for part in parts for line in request.part(0, part)]
    assert streamed == [
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "assistant", "content": "ok"},
        *({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls),
    ]
    assert OllamaGenerate(body, info).answer(parts[:2]) == {"response": "ok", "thinking": "hm"}
    assert json.loads(request.keep_alive)["message"]["content"] == ""


def test_messages_become_those_of_chat_completions():
    call = {"function": {"name": "g", "arguments": {}}}
    given = [
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALL, call]},
        {"role": "tool", "tool_name": "g", "content": "second"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "none"},
        {"role": "assistant", "tool_calls": [{"id": "own", **CALL}, call]},
        {"role": "tool", "tool_call_id": "own", "content": "x"},
    ]
    found = linked(messages_of({"messages": chat_messages({"messages": given})}, MessageContents()), Traits())
    assert found[0]["reasoning_content"] == "hm"
    assert [[each["id"] for each in found[i]["tool_calls"]] for i in (0, 4)] == [
        ["call_0", "call_1"],
        ["own", "call_3"],
    ]
    assert [message.get("tool_call_id") for message in found] == [None, "call_0", None, "call_1", None, "own"]
    assert [message["content"] for message in found if message["role"] == "tool"] == ["first", "none", "second", "x"]
    assert not any("tool_name" in message for message in found)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (0, 0), (30, 30), ("5m", 300), ("1h30m", 5400), ("90", 90), ("500ms", 0.5), ("-1", float("inf")),
     (-1, float("inf")), ("-1m", float("inf")), ("0", 0), ("", None)],
)  # fmt: skip
def test_durations(value, seconds):
    assert idle_seconds({"keep_alive": value}) == seconds


def test_numbers_of_tokens_and_defaults():
    assert [most_predicted({"options": {"num_predict": n}}) for n in (7, -1, -2, None)] == [7, -1, -1, None]
    assert as_openai({"model": "x"}, CHAT, []) == {"model": "x", "stream": True}
    assert as_openai({"stream": False, "think": "low"}, CHAT, []) == {"stream": False, "think": "low"}
    for value in (True, "x", [1]):
        with pytest.raises(Refused, match="keep_alive"):
            idle_seconds({"keep_alive": value})


def test_a_tag_has_the_format_of_the_models_file_and_each_adapter_a_digest_of_its_own(served, monkeypatch):
    own = replace(served.service.info, names=("demo", "alias"), adapters=("a", "b"), path=Path("x.gguf"))
    monkeypatch.setattr(served.service, "info", own)
    tags = {tag["name"]: tag for tag in served.get("/api/tags").json()["models"]}
    assert {tag["details"]["format"] for tag in tags.values()} == {"gguf"}
    digests = [tags[name]["digest"] for name in ("demo", "demo:a", "demo:b")]
    assert len(set(digests)) == 3
    assert [tags[f"alias{end}"]["digest"] for end in ("", ":a", ":b")] == digests
    monkeypatch.setattr(served.service, "info", replace(own, path=Path("x")))
    assert served.get("/api/tags").json()["models"][0]["details"]["format"] == "safetensors"


def test_a_digest_changes_with_the_files_and_not_with_the_load(served, monkeypatch, tmp_path):
    def digest(path, created):
        info = replace(served.service.info, path=path, created=created)
        monkeypatch.setattr(served.service, "info", info)
        return served.get("/api/tags").json()["models"][0]["digest"]

    first = digest(tmp_path, 1)
    assert digest(tmp_path, 2) == first
    os.utime(tmp_path, ns=(0, 1))
    assert digest(tmp_path, 2) != first
    assert digest(tmp_path / "removed", 1) == digest(tmp_path / "removed", 2) != first


# Requests as clients send them


def test_open_webui(one_layer):
    """Its check of a connection, its list of models, and a chat; in Docker the Host is host.docker.internal."""
    assert one_layer.get("/api/version").json().keys() == {"version"}
    (tag,) = one_layer.get("/api/tags", headers={"Content-Type": "application/json"}).json()["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= tag.keys()
    assert one_layer.get("/api/ps").json()["models"][0]["name"] == "demo"
    body = {"model": tag["model"], "messages": QUESTION, "options": {"num_predict": 4}, "stream": True}
    headers = {**KEY, "X-OpenWebUI-User-Name": "a", "Content-Type": "application/json"}
    assert lines(one_layer.post("/api/chat", content=json.dumps(body), headers=headers))[-1]["done"]
    title = {**body, "stream": False, "think": False, "messages": [{"role": "user", "content": "### Task:\nA title"}]}
    assert one_layer.post("/api/chat", json=title).json()["done"]
    refused = one_layer.get("/api/tags", headers={"Host": "host.docker.internal:8080"})
    assert refused.status_code == 403
    assert "--allow-host" in refused.json()["error"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_other_content_types_are_allowed_unless_a_page_sends_them(one_layer, kind):
    """Those of litellm and of `curl -d`; a browser sends the Origin of the page with every POST."""
    content, headers = json.dumps({"model": "demo", "messages": []}), {"Content-Type": kind} if kind else {}
    assert one_layer.post("/api/chat", content=content, headers=headers).json()["done"]
    assert (
        one_layer.post("/api/chat", content=content, headers={**headers, "Origin": "http://localhost"}).status_code
        == 415
    )
    assert one_layer.post("/v1/chat/completions", content=content, headers=headers).status_code == 415


def test_continue(one_layer):
    """It reads the context from `parameters`; completions of code are raw prompts."""
    shown = one_layer.post("/api/show", json={"name": "demo"}).json()
    assert shown["parameters"] == "num_ctx 2048"
    assert ".Suffix" not in shown["template"]
    options = {"temperature": 0.0, "num_predict": 4, "stop": ["\n\n"], "num_ctx": 2048}
    more = {"model": "demo", "options": options, "keep_alive": 1800}
    prompt = "<fim_prefix>def f(<fim_suffix>)<fim_middle>"
    assert lines(one_layer.post("/api/generate", json={"prompt": prompt, "raw": True, "stream": True, **more}))
    message = {"role": "user", "content": "hi", "images": None}
    assert one_layer.post("/api/chat", json={"messages": [message], "stream": False, **more}).json()["done"]


def test_zed(one_layer):
    """Its options, null for what is unset, and tool results without ids."""
    shown = one_layer.post("/api/show", json={"model": "demo"}).json()
    assert {"completion", "tools"} <= {*shown["capabilities"]}
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 2048
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": None}
    messages = [
        {"role": "system", "content": "s"},
        *QUESTION,
        answer,
        {"role": "tool", "tool_name": "f", "content": "1"},
    ]
    options = {"num_ctx": 2048, "num_predict": 4, "stop": [], "temperature": 1.0, "top_p": None}
    body = {"model": "demo", "messages": messages, "stream": True, "keep_alive": -1, "options": options}
    for line in lines(one_layer.post("/api/chat", json={**body, "tools": [tool], "think": None})):
        assert {"model", "created_at", "message", "done"} <= line.keys()
        assert type(line["message"]["content"]) is str
    assert lines(one_layer.post("/api/chat", json={**body, "messages": QUESTION, "tools": []}))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings", "/api/pull"])
def test_what_the_server_does_not_do_is_a_404_with_the_reason(served, path):
    found = served.post(path, json={"model": "demo", "input": "x"})
    assert found.status_code == 404
    error = found.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert ("mlx-mtp pull" if path == "/api/pull" else "no embeddings") in message
