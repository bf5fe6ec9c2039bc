"""Conversations render through chat templates of all kinds, and nothing in them is lost or changed."""

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import SWEEP
from templates import CONVERSATIONS, OFFERED, OWN, A, U, all_templates, call, result, tokenizer_of, turn

from mlx_mtp.serve.answer import Splitter, calls_of, text_of
from mlx_mtp.serve.api_request import CallIds
from mlx_mtp.serve.chat import messages_of
from mlx_mtp.serve.contents import MessageContents
from mlx_mtp.serve.prompts import encode_chat, marks_of
from mlx_mtp.serve.template_traits import traits_of
from mlx_mtp.serve.tool_calls.table import format_of

TEMPLATES = all_templates()
TOKENIZERS = {}
# Released templates that omit a part of a conversation in every form, as (template, conversation).
OMITS = {
    ("Mistral-Small-3.2-24B-Instruct-2506", "a call and content"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "a call and content"),
    *((name, "a result without a call") for name in TEMPLATES if "gemma" in name),
}
# Released templates that render none of the conversations here, and why.
BROKEN = {
    "MiroThinker": "reads a variable that is not set",
    "fireworks-ai-llama-3-firefunction-v2": "needs a variable `functions`",
    "llama-cpp-deepseek-r1": "writes a generator as JSON",
}


def tokenizer_named(name):
    if name not in TOKENIZERS:
        TOKENIZERS[name] = tokenizer_of(TEMPLATES[name])
    return TOKENIZERS[name]


def rendered(name, messages, tools=OFFERED, **options):
    tokenizer = tokenizer_named(name)
    found = messages_of({"messages": messages}, MessageContents())
    prompt = encode_chat(tokenizer, marks_of(tokenizer), found, tools, options, turns=True)
    return tokenizer.decode(prompt.tokens)


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_render_whole(name, kind):
    if name in BROKEN or (name, kind) in OMITS:
        pytest.skip(BROKEN.get(name, "omits a part"))
    messages, tools = CONVERSATIONS[kind]
    text = rendered(name, messages, tools)
    assert [m["content"] for m in messages if m["content"] not in text] == [], text
    for written in (each["function"]["arguments"] for m in messages for each in m.get("tool_calls", ())):
        form = written if isinstance(written, str) and "x" not in written else "x"
        assert form in text or json.dumps(form)[1:-1] in text, text


COMPACT, SPREAD = '{"text":"a<b>é","list":[1,2]}', '{ "text" : "\\u00e9",\n"where": {"a":  1e5} }'


@pytest.mark.parametrize("arguments", [COMPACT, SPREAD])
@pytest.mark.parametrize("name", OWN)
def test_arguments_are_as_the_client_wrote_them(name, arguments):
    text = rendered(name, [U, turn("assistant", "", call(arguments=arguments)), result("RESULT"), U])
    if traits_of(tokenizer_named(name)).arguments != "members":
        assert arguments in text
    else:
        assert all(member in text for member in re.findall(r"\[1,2\]|\{\"a\":  1e5\}", arguments)), text


def test_the_reason_of_a_template_that_refuses_every_form_is_raised():
    TEMPLATES["never"] = "{{ raise_exception('only on Sundays') }}"
    with pytest.raises(ValueError, match="only on Sundays"):
        rendered("never", [U])


def test_ids_take_the_form_of_the_template_in_calls_and_results():
    printed = "{% for c in m.tool_calls or [] %}{{ '(' ~ c.id ~ ')' }}{% endfor %}"
    printed += "{% if m.role == 'tool' %}{{ '(' ~ m.tool_call_id ~ ')' }}{% endif %}"
    ids = "{% for m in messages %}" + printed + "{% endfor %}"
    forms = {"short ids": "[A-Za-z0-9]{9}", "numbered ids": r"functions\.(?:write:0|run:1)", "json": ".*"}
    calls = [call(id="toolu_01"), call("run", id="call_2")]
    messages = [U, turn("assistant", "", *calls), result("RB", "call_2"), result("RA", "toolu_01"), A, U]
    for name, form in forms.items():
        TEMPLATES[f"{name}, printed"] = TEMPLATES[name] + ids
        found = re.findall(r"\(([^()]*)\)", rendered(f"{name}, printed", messages))
        assert len(found) == 4, found
        assert found[:2] == found[2:], "results in the order of the calls, with their ids"
        assert all(re.fullmatch(form, each) for each in found), found


def test_results_have_the_names_of_their_calls():
    TEMPLATES["names"] = TEMPLATES["json"].replace("m.content or ''", "(m.name or '') + ':' + (m.content or '')")
    messages = [U, turn("assistant", "", call(id="a"), call("run", id="b")), result("RB", "b"), result("RA", "a")]
    text = rendered("names", messages)
    assert "write:RA" in text
    assert "run:RB" in text


WORDS = st.text("ab<>é\n\"\\{}'", max_size=6)
ANSWERS = st.lists(
    st.one_of(WORDS, st.fixed_dictionaries({"text": WORDS, "count": st.integers(0, 9)})), min_size=1, max_size=3
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(parts=ANSWERS, cut=st.integers(0, 400), thinks=st.booleans(), whole=st.booleans())
@settings(max_examples=1000 if SWEEP else 2, deadline=None)
def test_every_answer_can_be_sent_back(name, parts, cut, thinks, whole):
    if name in BROKEN:
        pytest.skip(BROKEN[name])
    tokenizer = tokenizer_named(name)
    written = "".join(part if isinstance(part, str) else _hermes(part) for part in parts)
    written = f"<think>{written}</think>{written}" if thinks else written
    tokenizer_of_answer = type("Thinks", (), {"think_start": "<think>", "think_end": "</think>"})
    splitter = Splitter(
        tokenizer_of_answer, (), thinking=True, tool_format=format_of(tokenizer_named("json")), tools=OFFERED
    )
    parts = splitter.feed(written if whole else written[:cut]) + splitter.end(cut=not whole)
    calls = [call(*each, f"id{i}") for i, each in enumerate(calls_of(parts))]
    answer = turn("assistant", text_of(parts), *calls, reasoning_content=text_of(parts, reasoning=True))
    results = [result(f"RESULT{i}", each["id"]) for i, each in enumerate(calls)]
    text = rendered(name, [U, answer, *results, turn("user", "MORE")])
    assert "MORE" in text
    assert all(each["content"] in text for each in results)
    assert tokenizer is tokenizer_named(name)


def _hermes(arguments):
    return f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': arguments})}\n</tool_call>"


def test_new_ids_take_the_form_of_the_template():
    for name, form in (("short ids", "[A-Za-z0-9]{9}"), ("json", "call_[0-9a-f]{24}")):
        ids = CallIds(SimpleNamespace(tokenizer=tokenizer_named(name)), "call_")
        found = [ids.of(choice, index) for choice in range(2) for index in range(2)]
        assert len(set(found)) == 4
        assert all(re.fullmatch(form, each) for each in found), found
        text = rendered(name, [U, turn("assistant", "", call(id=found[0])), result("RESULT", found[0])])
        assert "RESULT" in text


FIELDS = ("reasoning_content", "thinking", "reasoning", "thought")


@pytest.mark.parametrize("field", FIELDS)
def test_reasoning_is_in_the_field_that_the_template_reads(field):
    printed = f"(m.{field} or '') ~ (m.content or '')"
    TEMPLATES[f"reads {field}"] = TEMPLATES["json"].replace("(m.content or '')", f"({printed})")
    answer = turn("assistant", "", call(), reasoning_content="THOUGHT")
    assert "THOUGHT" in rendered(f"reads {field}", [U, answer, result("RESULT")])
