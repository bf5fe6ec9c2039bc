"""Every request field is honoured, an ignored hint, or refused by name; a header lists fields without effect."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from thinking import plain_tokenizer, thinks

from mlx_mtp.serve import field_table, messages, responses, thinking
from mlx_mtp.serve.chat import messages_of
from mlx_mtp.serve.contents import ENCRYPTED as ENCRYPTED_TEXT
from mlx_mtp.serve.contents import MessageContents
from mlx_mtp.serve.field_table import APIS, FIELDS, TREATMENTS, UNKNOWN, check_fields
from mlx_mtp.serve.fields import Refused
from mlx_mtp.serve.template_traits import renders_tools
from mlx_mtp.serve.thinking import template_of

ROOT = Path(__file__).parents[2]
DECLARED = json.loads((ROOT / "tests/support/fixtures/api_fields.json").read_text())["fields"]
WARNING = "X-MLX-MTP-Warning"
LETTERS = {treatment: letter for letter, treatment in TREATMENTS.items()}
BODIES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
}


@pytest.fixture(scope="module")
def served(one_layer):
    return one_layer


def post(served, api, **more):
    path, body = BODIES[api]
    return served.post(path, json={**body, **more})


def treated(api, treatment):
    return [name for name, field in FIELDS.items() if field.treatment(api) == treatment]


@pytest.mark.parametrize("api", APIS)
def test_every_field_of_the_client_packages_is_in_the_table(api):
    assert [name for name in DECLARED[api] if FIELDS.get(name, UNKNOWN).treatment(api) == "unknown"] == []
    assert check_fields(api, dict.fromkeys(name for name in DECLARED[api] if "." not in name)) == []


def test_the_page_lists_the_table():
    page = (ROOT / "docs/serve.md").read_text()
    found = {}
    for names, *treatments, note in re.findall(r"^\| (`.*?`) \|" + r" (.*?) \|" * 5 + "$", page, re.MULTILINE):
        letters = "".join(LETTERS.get(treatment, "?") for treatment in treatments)
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), (letters, note))
    assert found == {name: (field.letters, field.note) for name, field in FIELDS.items()}


def test_every_honoured_field_is_read_somewhere():
    room = ROOT / "mlx_mtp/serve"
    source = "".join(file.read_text() for file in room.rglob("*.py") if file.name != "field_table.py")
    for api in APIS:
        for name in treated(api, "honoured"):
            assert f'"{name.rpartition(".")[2]}"' in source, name


@pytest.mark.parametrize("api", APIS)
def test_refused_fields_are_named_unless_their_value_is_neutral(api):
    for name in treated(api, "refused"):
        parent, _, inner = name.rpartition(".")
        for value in (None, False, [], {}, "", *FIELDS[name].neutral):
            assert check_fields(api, {parent: {inner: value}} if parent else {name: value}) == []
        with pytest.raises(Refused, match=re.escape(name)) as error:
            check_fields(api, {parent: {inner: "x"}} if parent else {name: "x"})
        assert error.value.param == (parent or name)


@pytest.mark.parametrize(
    ("api", "wrong", "near"),
    [
        ("chat", "temprature", "temperature"),
        ("chat", "max_token", "max_tokens"),
        ("chat", "maxTokens", "max_tokens"),
        ("chat", "stop-token-ids", "stop_token_ids"),
        ("chat", "enable_thinkng", "enable_thinking"),
        ("chat", "stream_options.include_usge", "stream_options.include_usage"),
        ("responses", "max_output_token", "max_output_tokens"),
        ("messages", "stop", "stop_sequences"),
        ("chat", "zzz", None),
    ],
)
def test_an_unknown_field_is_named_with_a_similar_one(api, wrong, near):
    parent, _, inner = wrong.rpartition(".")
    (warning,) = check_fields(api, {parent: {inner: 1}} if parent else {wrong: 1})
    assert repr(wrong) in warning
    assert (f"did you mean {near!r}?" in warning) if near else "mean" not in warning


@pytest.mark.parametrize("api", APIS)
def test_warnings_are_in_a_header_of_whole_answers_and_of_streams(served, api):
    for stream in (False, True):
        found = post(served, api, stream=stream, **{"tempärature\n": 1})
        assert found.status_code == 200
        assert "did you mean 'temperature'?" in found.headers[WARNING]
        assert WARNING not in post(served, api, stream=stream, temperature=0.5).headers


def test_headers_stay_short_and_are_logged(served, caplog):
    found = post(served, "chat", **{f"f{i}\u2028": i for i in range(500)})
    assert found.status_code == 200
    assert 100 < len(found.headers[WARNING]) <= 2000
    assert "f0" in caplog.text
    count = served.post("/v1/messages/count_tokens", json={"messages": BODIES["chat"][1]["messages"], "sistem": "x"})
    assert "'system'" in count.headers[WARNING]


# Thinking


PRINTS = "{% if reasoning_effort %}{{ 'effort ' + reasoning_effort }}{% endif %}"
TEMPLATES = {
    "enable_thinking": "{% if enable_thinking is defined and not enable_thinking %}OFF{% endif %}",
    "thinking": "{% if thinking is defined and thinking %}ON{% else %}OFF{% endif %}",
    "reasoning": "{% if reasoning is defined and not reasoning %}OFF{% endif %}",
    "reasoning_effort": "{% if reasoning_effort == 'none' %}OFF{% endif %}" + PRINTS,
    "thinking_budget": "{% if thinking_budget is defined and thinking_budget == 0 %}OFF{% endif %}",
    "thinking_mode": "{% if thinking_mode == 'disabled' %}OFF{% endif %}",
    "strict": "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('effort') }}{% endif %}"
    "{% if reasoning_effort == 'none' %}OFF{% endif %}",
}
NO_SWITCH = {"plain": "", "prints": PRINTS}
OFF = [
    {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}}, {"thinking": {"type": "disabled"}}, {"thinking": False},
    {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}}, {"reasoning": {"enabled": False}}, {"reasoning": {"max_tokens": 0}},
    {"think": False}, {"think": "none"}, {"thinking_budget": 0}, {"reasoning_budget": 0},
    {"thinking_budget_tokens": 0}, {"thinking_token_budget": 0},
]  # fmt: skip
ON = [{"enable_thinking": True}, {"thinking": {"type": "enabled", "budget_tokens": -1}}, {"think": True}]


@pytest.fixture
def info():
    plain = plain_tokenizer()
    tokenizer = TokenizerWrapper(plain)
    thinks(tokenizer)

    def use(template, options=None):
        plain.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + template
        return SimpleNamespace(tokenizer=tokenizer, template=options or {})

    return use


def prompt_of(info, body):
    warnings = []
    options = template_of(body, info, warnings)
    question = [{"role": "user", "content": "hi"}]
    return info.tokenizer.apply_chat_template(question, tokenize=False, **options), warnings


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_spelling_sets_the_variable_that_the_template_reads(info, name):
    used = info(TEMPLATES[name], {"reasoning_effort": "high"} if name == "strict" else None)
    for body in OFF:
        text, warnings = prompt_of(used, body)
        assert "OFF" in text, body
        assert warnings == [], body
    for body in ON:
        text, warnings = prompt_of(used, body)
        assert "OFF" not in text, body
        assert warnings == [], body


@pytest.mark.parametrize("name", NO_SWITCH)
def test_thinking_that_cannot_be_switched_off_is_a_warning(info, name):
    for body in OFF:
        if body != {"chat_template_kwargs": {"thinking": False}}:
            _, warnings = prompt_of(info(NO_SWITCH[name]), body)
            assert len(warnings) == 1, body
            assert "cannot be switched off" in warnings[0]
    assert prompt_of(info(NO_SWITCH[name]), {"thinking": {"type": "adaptive"}, "enable_thinking": None})[1] == []


def test_efforts_and_variables_reach_the_template(info):
    for body in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}, {"think": "low"}):
        assert prompt_of(info(PRINTS), body) == ("hieffort low", [])
    assert prompt_of(info(TEMPLATES["strict"], {"reasoning_effort": "high"}), {"reasoning_effort": "low"})[1] == [
        "reasoning_effort='low' is ignored: the chat template refuses it"
    ]
    text, warnings = prompt_of(info(PRINTS), {"chat_template_kwargs": {"reasoning_efort": "low"}})
    assert (text, len(warnings)) == ("hi", 1)
    assert "chat_template_kwargs.reasoning_efort" in warnings[0]


BUDGETS = [
    {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": {"budget_tokens": 9}},
    {"reasoning": {"max_tokens": 9}}, *({name: 9} for name in thinking.BUDGETS),
    {"chat_template_kwargs": {"thinking_budget": 9}}, {"chat_template_kwargs": {"reasoning_budget": 9}},
]  # fmt: skip


@pytest.mark.parametrize("template", [*TEMPLATES, *NO_SWITCH])
def test_a_budget_for_reasoning_is_named_unless_the_template_reads_it(info, template):
    used = info({**TEMPLATES, **NO_SWITCH}[template], {"reasoning_effort": "high"} if template == "strict" else None)
    for body in BUDGETS:
        outer, value = next(iter(body.items()))
        name = next((n for n in value if n != "type"), "") if isinstance(value, dict) else outer
        passed = outer == "chat_template_kwargs" and name == template
        warnings = [each for each in prompt_of(used, body)[1] if name in each]
        assert len(warnings) == (0 if passed else 1), body
        for other in (-1, None):
            unlimited = {outer: {**value, name: other} if isinstance(value, dict) else other}
            assert not any(name in each for each in prompt_of(used, unlimited)[1]), unlimited
    for wrong in ({"thinking_budget": -2}, {"thinking": {"budget_tokens": 2**40}}, {"max_thinking_tokens": "9"}):
        with pytest.raises(Refused, match=r"budget|max_thinking"):
            prompt_of(used, wrong)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_budget_is_in_the_header(served, api):
    assert "budget_tokens=9" in post(served, api, thinking={"type": "enabled", "budget_tokens": 9}).headers[WARNING]
    assert "thinking_budget=9" in post(served, api, thinking_budget=9).headers[WARNING]


@pytest.mark.parametrize(
    "wrong", [{"thinking": "off"}, {"thinking": {"type": "never"}}, {"enable_thinking": "false"}, {"reasoning": 5}]
)
def test_invalid_thinking_fields_are_refused(info, wrong):
    with pytest.raises(Refused, match=next(iter(wrong))):
        prompt_of(info(PRINTS), wrong)


# Tools and pictures


FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
OTHERS = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "namespace", "name": "n"}]
CHAT_FUNCTION = {"type": "function", "function": {"name": "shell"}}
CLIENT_TOOL = {"name": "shell", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("api", "tool", "other"),
    [
        *(("responses", FUNCTION, other) for other in OTHERS),
        ("chat", CHAT_FUNCTION, {"type": "custom", "custom": {"name": "c"}}),
        ("messages", CLIENT_TOOL, {"type": "web_search_20250305", "name": "web_search"}),
    ],
)
def test_tools_other_than_functions_are_ignored_with_a_warning(served, api, tool, other):
    found, plain = (post(served, api, tools=tools) for tools in ([tool, other], [tool]))
    assert found.status_code == plain.status_code == 200
    assert repr(other["type"]) in found.headers[WARNING]
    assert "web_search" not in plain.headers.get(WARNING, "")
    alone = post(served, api, tools=[other])
    assert alone.status_code == 400
    assert other["type"] in alone.json()["error"]["message"]


def test_tools_that_the_template_does_not_print_are_a_warning(served, info, caplog):
    assert "no place" in post(served, "chat", tools=[CHAT_FUNCTION]).headers[WARNING]
    assert "no place" in caplog.text
    assert not renders_tools(info("").tokenizer, {})
    assert renders_tools(info("{% if tools %}{{ tools | tojson }}{% endif %}").tokenizer, {})


PNG = {"type": "base64", "media_type": "image/png", "data": ""}
CALL = {"type": "function", "id": "c", "function": {"name": "read", "arguments": "{}"}}
URL = "data:image/png;base64,"


def results(picture):
    """Return a conversation with a picture in a tool result, per API."""
    words = {"type": "text", "text": "a.png"}
    use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [words, *picture("messages")]}
    output = {"type": "function_call_output", "call_id": "c", "output": [words, *picture("responses")]}
    return {
        "messages": {"messages": [
            {"role": "user", "content": "Read."}, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]},
        "chat": {"messages": [
            {"role": "user", "content": "Read."}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [words, *picture("chat")]},
        ]},
        "responses": {"input": [
            {"role": "user", "content": "Read."},
            {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}, output,
        ]},
    }  # fmt: skip


PICTURES = {
    "messages": {"type": "image", "source": PNG},
    "chat": {"type": "image_url", "image_url": {"url": URL}},
    "responses": {"type": "input_image", "image_url": URL},
}


@pytest.mark.parametrize("api", ["messages", "chat", "responses"])
def test_a_picture_of_a_tool_becomes_text_and_one_of_a_user_is_refused(served, api):
    found = post(served, api, **results(lambda api: [PICTURES[api]])[api])
    plain = post(served, api, **results(lambda api: [])[api])
    assert found.status_code == plain.status_code == 200
    assert "picture" in found.headers[WARNING]
    name = "prompt_tokens" if api == "chat" else "input_tokens"
    tokens = [r.json()["usage"][name] + r.json()["usage"].get("cache_read_input_tokens", 0) for r in (found, plain)]
    assert tokens[0] > tokens[1]
    messages = [{"role": "user", "content": [PICTURES[api]]}]
    refused = post(served, api, **{"input" if api == "responses" else "messages": messages})
    assert refused.status_code == 400
    assert "pictures are not read here" in refused.json()["error"]["message"]


def test_the_table_is_the_only_list():
    assert set(TREATMENTS) == {"h", "i", "w", "r", "-"}
    for name, field in FIELDS.items():
        assert len(field.letters) == len(APIS), name
        assert set(field.letters) <= set(TREATMENTS), name
        assert set(field.letters) != {"-"}, name
    assert FIELDS.keys() >= field_table.PARENTS


FOREIGN = {"role": "tool", "content": "ok"}
SESSIONS = {
    "responses": [
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "d", "output": "ok"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
    ],
    "chat": [
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}]},
        {**FOREIGN, "tool_call_id": "c"},
        {"role": "assistant", "content": None, "function_call": {"name": "local_shell", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "local_shell", "content": "ok"},
    ],
    "messages": [
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "Found."}]},
    ],
}  # fmt: skip


READABLE = {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Yes."}
ENCRYPTED = {
    "redacted": {"type": "redacted_thinking", "data": "x"},
    "only a signature": {"type": "thinking", "thinking": "", "signature": "s"},
}


@pytest.mark.parametrize("name", ENCRYPTED)
def test_encrypted_reasoning_is_left_out_with_a_warning(name):
    user, warnings = {"role": "user", "content": "hi"}, []
    blocks = [[*READABLE], [ENCRYPTED[name], *READABLE]]
    bodies = [{"messages": [user, {"role": "assistant", "content": each}, user]} for each in blocks]
    found = [messages.conversation_of(body, MessageContents(None, warnings)) for body in bodies]
    assert found[0] == found[1]
    kind = ENCRYPTED[name]["type"]
    assert warnings == [f"messages[1].content[0]: a block of type {kind!r} was left out; {ENCRYPTED_TEXT}"]


def test_encrypted_reasoning_of_responses_is_left_out_with_a_warning():
    content = [{"type": "reasoning_text", "text": "hm"}]
    for item, count in (
        ({"encrypted_content": "x"}, 1),
        ({"encrypted_content": "x", "content": content}, 0),
        ({}, 0),
    ):
        warnings = []
        given = [{"type": "reasoning", "summary": [], **item}]
        responses.conversation_of({"input": given}, MessageContents(None, warnings))
        assert len(warnings) == count
        assert all("was left out" in warning for warning in warnings)


@pytest.mark.parametrize("api", SESSIONS)
def test_a_session_with_another_server_can_be_continued(served, api):
    """Tool calls of other types become function calls; items without a counterpart become lines, with a warning."""
    user = {"role": "user", "content": "hi"}
    name = "input" if api == "responses" else "messages"
    response = post(served, api, **{name: [user, *SESSIONS[api], user]})
    assert response.status_code == 200, response.text
    assert ("left out" in response.headers.get(WARNING, "")) == (api != "chat")
    if api != "messages":
        convert = messages_of if api == "chat" else responses.conversation_of
        found = convert({name: [user, *SESSIONS[api], user]}, MessageContents())
        calls = [call["function"] for message in found for call in message.get("tool_calls", ())]
        assert [call["name"] for call in calls] == ["apply_patch", "local_shell"]
        assert calls[0]["arguments"] == {"input": "*** Begin"}
