"""A field that a header or the table calls ignored changes nothing; one that changes something is not called so."""

import re

import pytest
from api_bodies import APIS, HI
from sweep import sampled

from mlx_mtp.serve.api_request import ApiRequest
from mlx_mtp.serve.chat import ChatRequest
from mlx_mtp.serve.field_table import FIELDS
from mlx_mtp.serve.fields import Refused
from mlx_mtp.serve.ollama_fields import CHAT, GENERATE, REFUSED, SAMPLING, SYSTEM

FUNCTION = {"name": "roll", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FLAT = {"type": "function", **FUNCTION}
TOOLS = {
    "chat": {"tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {"tools": [FLAT]},
    "messages": {"tools": [{"name": "roll", "input_schema": FUNCTION["parameters"]}]},
    "ollama chat": {"tools": [{"type": "function", "function": FUNCTION}]},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Values with which a field has an effect in an API that honours it.
TELLING = {
    "max_tokens": [3], "max_completion_tokens": [3], "max_output_tokens": [3], "n_predict": [3], "n": [2],
    "stop": ["x"], "stop_sequences": [["x"]], "logprobs": [True, 2], "top_logprobs": [2], "guided_json": [SCHEMA],
    "response_format": [{"type": "json_object"}], "format": ["json", SCHEMA], "guided_regex": ["a+"],
    "text": [{"format": {"type": "json_schema", "schema": SCHEMA}}], "guided_choice": [["a", "b"]],
    "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}], "structured_outputs": [{"regex": "a"}],
    "output_format": [{"type": "json_schema", "schema": SCHEMA}], "guided_grammar": ['start: "a"'],
    "tool_choice": ["required", {"type": "function", "name": "roll"}, {"type": "any"}],
    "tool_choice.name": ["roll"], "tool_choice.function": [{"name": "roll"}], "tool_choice.tools": [[FLAT]],
    "tool_choice.allowed_tools": [{"mode": "required", "tools": [FLAT]}], "tool_choice.mode": ["required"],
    "parallel_tool_calls": [False], "tool_choice.disable_parallel_tool_use": [True], "system": ["Be short."],
    "instructions": ["Be short."], "messages": [HI * 2], "input": ["x"], "prompt": ["x"], "tools": [[FLAT]],
    "reasoning": [{"effort": "low"}], "return_progress": [True, "x"], "chat_template": ["{{ 1 }}"],
}  # fmt: skip
ANY = [True, "x", {"a": 1}]
# What precedes a member of `tool_choice`, so that it may have an effect.
KINDS = {"name": "function", "function": "function", "allowed_tools": "allowed_tools", "tools": "allowed_tools"}
SHOWN = ("stream", "choices", "shows_prefill", "idle", "_counts", "model")


@pytest.fixture(scope="module")
def info(one_layer):
    return one_layer.service.info


def treatment_of(api, name):
    if not api.startswith("ollama"):
        return FIELDS[name].treatment(api) if name in FIELDS else "unknown"
    known = CHAT if api == "ollama chat" else GENERATE
    outer, _, inner = name.partition(".")
    if name in ("context", "truncate", "shift") or (outer == "options" and inner not in (*SAMPLING, "num_predict")):
        return "ignored hint" if name in known or inner in SYSTEM else "unknown"
    if outer in REFUSED:
        return "refused"
    return "honoured" if outer in known else "unknown"


def parsed(api, info, body):
    """Return (what the request asks of the decoder and of the writer, or its error; its warnings)."""
    parse, plain = APIS[api]
    seeded = {"options": {"seed": 1, **body.pop("options", {})}} if api.startswith("ollama") else {"seed": 1}
    try:
        made: ApiRequest = parse({**plain, **seeded, **TOOLS.get(api, {}), **body}, info)
    except Refused as e:
        return e, []
    requests = [{**vars(r), "follows": None, "grammar": r.grammar and r.grammar.text} for r in made.requests]
    return [requests, {name: getattr(made, name, None) for name in SHOWN}], made.warnings


def body_with(name, value):
    outer, _, inner = name.partition(".")
    if not inner:
        return {name: value}
    more = {"type": KINDS[inner]} if outer == "tool_choice" and inner in KINDS else {}
    return {outer: {**more, inner: value}}


@pytest.mark.parametrize("api", sampled(["chat", "ollama generate"], [*APIS]))
def test_what_is_called_ignored_changes_nothing(info, api):
    plain, before = parsed(api, info, {})
    for name in [*FIELDS, *(f"options.{name}" for name in (*SYSTEM, "adapter", "max_tokens", "grammar")), "context"]:
        treatment = treatment_of(api, name)
        if treatment in ("honoured", "refused") or treatment_of(api, name.partition(".")[0]) == "refused":
            continue
        values = TELLING.get(name, ANY)
        for value in values if name not in TELLING else [*values, "zqx"]:
            outer = name.partition(".")[0]
            found, warnings = parsed(api, info, body_with(name, value))
            if isinstance(found, Refused):  # the outer field needs other members
                assert outer in str(found), (name, value)
                assert outer != name, (name, value)
                continue
            named = outer if treatment_of(api, outer) == "unknown" else name
            named = named.removeprefix("options.")
            assert found == plain, (name, value)
            new = [each for each in warnings if each not in before]
            silent = not any(re.search(rf"\b{re.escape(named)}\b", each) for each in new)
            assert silent == (treatment == "ignored hint" and name != "context"), (name, value, warnings)


HONOURED = {
    "tool_choice": [{"type": "function", "name": "roll"}, {"type": "function", "function": {"name": "roll"}},
                    {"type": "allowed_tools", "mode": "required", "tools": [FLAT]},
                    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FLAT]}}],
    "parallel_tool_calls": [False], "n_predict": [3], "stop_token_ids": [[5]], "bad_words": [["x"]],
    "min_tokens": [2], "guided_regex": ["a+"], "structured_outputs": [{"choice": ["a"]}], "guided_json": [SCHEMA],
}  # fmt: skip


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("name", HONOURED)
def test_both_forms_of_openai_are_honoured_without_a_warning(info, api, name):
    plain, before = parsed(api, info, {})
    for value in HONOURED[name]:
        found, warnings = parsed(api, info, {name: value})
        assert found != plain, value
        assert warnings == before, value


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tool_choice": {"type": "function", "name": "roll", "function": {"name": "other"}}}, "tool_choice"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"schema": SCHEMA}}, "response_format.schema"),
        ({"stream_options": {"include_usage": "x"}}, "include_usage"),
        ({"stream_options": "x"}, "stream_options"),
    ],
)
def test_what_would_be_ignored_next_to_another_value_is_refused(info, wrong, named):
    with pytest.raises(Refused, match=re.escape(named)):
        ChatRequest({"messages": HI, **TOOLS["chat"], **wrong}, info)
