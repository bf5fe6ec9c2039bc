"""Forced and strict tool calls over HTTP: the demo calls in the generic format, a dictated model in its own."""

import json

import pytest
from dictated import Dictated, dictated
from sweep import sampled

from mlx_mtp.serve.api_request import prompt_of

CITY = {"type": "string", "enum": ["Bonn", "Köln"]}
SCHEMA = {
    "type": "object", "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
NOW = {"name": "now", "description": "Report the time.", "parameters": {"type": "object", "properties": {}}}
WEATHER = {"name": "weather", "description": "Report the weather.", "parameters": SCHEMA}
HI = [{"role": "user", "content": "Weather?"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def body_of(path, strict=None, **more):
    """A request of an API with the tools WEATHER, which may be strict, and NOW."""
    more = {"max_tokens": 120, **more} if path != RESPONSES else {"max_output_tokens": 120, **more}
    extra = {} if strict is None else {"strict": strict}
    if path == CHAT:
        tools = [{"type": "function", "function": each} for each in ({**WEATHER, **extra}, NOW)]
    elif path == RESPONSES:
        tools = [{"type": "function", **each} for each in ({**WEATHER, **extra}, NOW)]
    else:
        tools = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"], **given}
            for each, given in ((WEATHER, extra), (NOW, {}))
        ]
    return {"input" if path == RESPONSES else "messages": HI, "tools": tools, **more}


def calls_in(path, response):
    """The calls in a response that is not streamed, as (name, arguments), and its reason to end."""
    if path == CHAT:
        (choice,) = response["choices"]
        made = [each["function"] for each in choice["message"].get("tool_calls", ())]
        return [(each["name"], json.loads(each["arguments"])) for each in made], choice["finish_reason"]
    if path == RESPONSES:
        made = [each for each in response["output"] if each["type"] == "function_call"]
        return [(each["name"], json.loads(each["arguments"])) for each in made], response["status"]
    made = [each for each in response["content"] if each["type"] == "tool_use"]
    return [(each["name"], each["input"]) for each in made], response["stop_reason"]


def streamed_calls(path, text):
    """The same of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        return calls_in(path, events[-1]["response"])
    names, pieces = [], []
    for event in events:
        if path == CHAT:
            for choice in event["choices"]:
                for each in choice["delta"].get("tool_calls", ()):
                    names += [each["function"]["name"]] if "name" in each["function"] else []
                    pieces += [each["function"]["arguments"]] if each["function"]["arguments"] else []
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names.append(event["content_block"]["name"])
        elif event.get("delta", {}).get("type") == "input_json_delta":
            pieces.append(event["delta"]["partial_json"])
    last = [each for each in events if each.get("type") == "message_delta" or each.get("choices")][-1]
    reason = last["choices"][0]["finish_reason"] if path == CHAT else last["delta"]["stop_reason"]
    return list(zip(names, map(json.loads, pieces), strict=True)), reason


def fits(name, arguments):
    if name == "now":
        return arguments == {}
    return arguments["city"] in CITY["enum"] and arguments["days"] in range(1, 10) and len(arguments) == 2


FORCED = [
    (CHAT, "required", None), (CHAT, {"type": "function", "function": {"name": "weather"}}, "weather"),
    (CHAT, {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}}, "now"),
    (RESPONSES, "required", None), (RESPONSES, {"type": "function", "name": "weather"}, "weather"),
    (MESSAGES, {"type": "any"}, None), (MESSAGES, {"type": "tool", "name": "weather"}, "weather"),
]  # fmt: skip
REASON = {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}


@pytest.mark.parametrize(("path", "choice", "name"), sampled([FORCED[0], FORCED[4]], FORCED))
def test_the_demo_calls_if_it_must(served, path, choice, name):
    more = {"temperature": 1.0, "seed": 5} if name == "weather" else {}
    response = served.post(path, json=body_of(path, tool_choice=choice, **more))
    found, reason = calls_in(path, response.json())
    assert reason == REASON[path]
    assert [(name or each, fits(each, given)) for each, given in found] == [(found[0][0], True)]
    assert "generic format" in response.headers["X-MLX-MTP-Warning"]
    if not name:
        streamed = served.post(path, json=body_of(path, tool_choice=choice, stream=True))
        assert streamed_calls(path, streamed.text) == (found, reason)


def test_the_prompt_describes_tools_and_has_earlier_calls_in_the_same_format(served):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    turns, tools = [{"role": "system", "content": "Be brief."}, *HI, answer, result], body_of(CHAT)["tools"]
    info = served.service.info
    text = info.tokenizer.decode(prompt_of(info, turns, tools, {}, turns=False).tokens)
    assert text.index("Be brief.") < text.index("Report the weather.") < text.index("<tool_call>")
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text
    assert "Report" not in info.tokenizer.decode(prompt_of(info, turns, None, {}, turns=False).tokens)


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"tools": None, "tool_choice": "required"}, "offers no tools"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        (CHAT, {"tool_choice": "any"}, "required"), (RESPONSES, {"tool_choice": {"type": "file_search"}}, "required"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
        (MESSAGES, {"tool_choice": "any"}, "any, tool"),
    ],
)  # fmt: skip
def test_a_choice_that_is_impossible_is_refused(served, path, change, named):
    response = served.post(path, json={**body_of(path), **change})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_a_schema_that_cannot_be_honoured_is_refused_with_the_tool_and_the_keyword(served):
    tool = {**WEATHER, "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}
    for more in ({"tool_choice": "required"}, {}):
        tools = [{"type": "function", "function": {**tool, "strict": not more}}]
        error = served.post(CHAT, json=body_of(CHAT, **more) | {"tools": tools}).json()["error"]
        assert (error["param"], "'weather'" in error["message"], "uniqueItems" in error["message"]) == (
            "tools",
            True,
            True,
        )


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with dictated(tmp_path_factory) as client:
        yield client


def dictate(city, days):
    arguments = f'{{"city": {city}, "days": {days}}}'
    return f'Let me see.<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(("path", "choice", "name"), FORCED)
def test_a_forced_call_replaces_what_the_model_would_write(client, path, choice, name):
    Dictated.words = dictate('"Rome"', 12)
    found, reason = calls_in(path, client.post(path, json=body_of(path, tool_choice=choice)).json())
    assert reason == REASON[path]
    assert found
    assert all(fits(*each) for each in found), found
    assert {each for each, _ in found} == {name or found[0][0]}
    if not name:
        streamed = client.post(path, json=body_of(path, tool_choice=choice, stream=True))
        assert streamed_calls(path, streamed.text) == (found, reason)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_arguments_of_a_strict_tool_fit_its_schema(client, path):
    Dictated.words = dictate('"Bonn"', 12)
    ((name, strict),), reason = calls_in(path, client.post(path, json=body_of(path, strict=True)).json())
    assert (name, strict["city"], fits(name, strict), reason) == ("weather", "Bonn", True, REASON[path])


def test_a_strict_call_instead_of_structured_content_fits_its_schema(client):
    """Also behind reasoning; content keeps its format."""
    city = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    body = body_of(CHAT, strict=True, response_format=city)
    Dictated.words = "<think>So</think>" + dictate('"Bonn"', 12)[11:]
    ((_, given),), reason = calls_in(CHAT, client.post(CHAT, json=body).json())
    assert (given["city"], fits("weather", given), reason) == ("Bonn", True, "tool_calls")
    Dictated.words = '"Bonn" it is'
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('"Bonn"', "stop")


def test_text_and_tools_that_are_not_strict_stay_free(client):
    Dictated.words = dictate('"Bonn"', 12)
    ((_, loose),), _ = calls_in(CHAT, client.post(CHAT, json=body_of(CHAT)).json())
    assert loose == {"city": "Bonn", "days": 12}
    Dictated.words = "There is no <tool> to call."
    (choice,) = client.post(CHAT, json=body_of(CHAT, strict=True)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (Dictated.words, "stop")


def test_a_strict_tool_leaves_calls_of_others_and_the_number_of_calls_free(client):
    Dictated.words = (
        '<tool_call>\n{"name": "now", "arguments": {"zone": [1, 2]}}\n</tool_call>\n' + dictate('"Köln"', 3)[11:]
    )
    found, _ = calls_in(CHAT, client.post(CHAT, json=body_of(CHAT, strict=True, max_tokens=100)).json())
    assert found == [("now", {"zone": [1, 2]}), ("weather", {"city": "Köln", "days": 3})]
    body = body_of(CHAT, strict=True, max_tokens=100, parallel_tool_calls=False)
    assert calls_in(CHAT, client.post(CHAT, json=body).json())[0] == found[:1]
    for more in ({}, {"parallel_tool_calls": False}):
        body = body_of(CHAT, tool_choice="required", max_tokens=100, **more)
        Dictated.words = (dictate('"Köln"', 3)[11:] + "\n") * 2
        found, _ = calls_in(CHAT, client.post(CHAT, json=body).json())
        assert found == [("weather", {"city": "Köln", "days": 3})] * (1 if more else 2)


def test_a_forced_call_follows_reasoning(client):
    Dictated.words = "<think>Where?</think>\n\n" + dictate('"Bonn"', 3)[11:]
    response = client.post(CHAT, json=body_of(CHAT, tool_choice="required", max_tokens=100)).json()
    assert calls_in(CHAT, response) == ([("weather", {"city": "Bonn", "days": 3})], "tool_calls")
    assert response["choices"][0]["message"]["reasoning_content"] == "Where?"


def test_a_cut_call_is_text(client):
    Dictated.words = dictate('"Bonn"', 3)[11:]
    (choice,) = client.post(CHAT, json=body_of(CHAT, tool_choice="required", max_tokens=12)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert Dictated.words.startswith(choice["message"]["content"])
