"""Settings of clients in docs/serve.md can be parsed, and requests in the forms of these clients are answered."""

import json
import re
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/serve.md").read_text()
ADDRESS = "http://127.0.0.1:8080"
QUESTION = {"role": "user", "content": "What does len do?"}
ANSWER = "Return the number of items in a container."


def block(title):
    """Return the first indented block of a section, without the indentation."""
    section = re.search(rf"^### {title}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert section
    lines = re.search(r"(?:^    .*\n|^\n(?=    ))+", section[1], re.MULTILINE)
    assert lines
    return re.sub(r"^    ", "", lines[0], flags=re.MULTILINE)


def test_the_opencode_file_names_a_model_of_its_provider():
    config = json.loads(block("opencode"))
    ((name, provider),) = config["provider"].items()
    assert provider["options"]["baseURL"] == f"{ADDRESS}/v1"
    assert {config["model"], config["small_model"]} == {f"{name}/{model}" for model in provider["models"]}
    assert all({"context", "output"} == model["limit"].keys() for model in provider["models"].values())


def test_the_codex_file_names_its_provider():
    config = tomllib.loads(block("Codex"))
    assert config["model_providers"][config["model_provider"]]["base_url"] == f"{ADDRESS}/v1"


def test_other_files_have_the_address():
    assert json.loads(block("Zed"))["language_models"]["ollama"]["api_url"] == ADDRESS
    assert f"apiBase: {ADDRESS}\n" in block("Continue")
    assert f"api_base: {ADDRESS}/v1\n" in block("llm")
    assert "--allow-host host.docker.internal" in block("Open WebUI")


TOOL = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read", "parameters": {"type": "object"}},
}
PARTS = [{"type": "text", "text": "What does "}, {"type": "text", "text": "len do?"}]
REQUESTS = {
    "Xcode": {"messages": [QUESTION], "stream": True, "stream_options": {"include_usage": True}},
    "Xcode with parts": {"messages": [{"role": "user", "content": PARTS}], "stream": True, "temperature": 0},
    "Cursor": {
        "messages": [{"role": "system", "content": "Be brief."}, QUESTION],
        "stream": True,
        "temperature": 0,
        "user": "google-oauth2|1",
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    },
    "opencode": {
        "messages": [{"role": "system", "content": "You are"}, QUESTION],
        "stream": True,
        "max_tokens": 8192,
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    },
    "llm": {"messages": [QUESTION], "stream": True, "stream_options": {"include_usage": True}},
    "Open WebUI": {"messages": [QUESTION], "stream": True, "model": "demo", "max_tokens": 30, "stop": []},
    "Continue": {"messages": [QUESTION], "stream": True, "max_tokens": 2048, "temperature": 0.0, "stop": None},
}


@pytest.mark.parametrize("client", REQUESTS)
def test_chats_in_the_forms_of_clients(served, one_layer, client):
    """They ask for the list of models, then stream; the stream ends with a reason and [DONE]."""
    known = len(REQUESTS[client]["messages"]) == 1  # the demo's answer to it
    server = served if known else one_layer
    assert server.get("/v1/models", headers={"Authorization": "Bearer any"}).json()["data"][0]["id"] == "demo"
    body = {"model": "demo", "max_tokens": 30, **REQUESTS[client]} | ({} if known else {"max_tokens": 8})
    found = server.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    *events, last = (line[6:] for line in found.text.splitlines() if line.startswith("data: "))
    assert last == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls")
    assert text == ANSWER or (text and not known)


def test_codex(one_layer):
    """Its items, its fields, and tools of other types next to functions."""
    function = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}}
    content = [{"type": "input_text", "text": "What does len do?"}]
    body = {
        "model": "demo",
        "instructions": "",
        "input": [{"type": "message", "role": "user", "content": content}],
        "tools": [function, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "0",
        "max_output_tokens": 8,
    }
    found = one_layer.post("/v1/responses", json=body)
    assert found.status_code == 200, found.text
    assert "event: response.completed" in found.text or "event: response.incomplete" in found.text
