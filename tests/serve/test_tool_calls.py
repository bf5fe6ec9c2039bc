"""Tool calls are read as their templates render them, whatever they contain; text without a call is unchanged."""

import json
import re
from types import SimpleNamespace

import pytest
from call_renderers import M3, RENDERERS, minimax_m3
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import SWEEP

from mlx_mtp.serve.answer import MOST_READ, Splitter, calls_of, text_of
from mlx_mtp.serve.tool_calls.schema import types_of, untyped_as_json
from mlx_mtp.serve.tool_calls.table import BY_PARSER, format_of

EXAMPLES = 20_000 if SWEEP else 7
THINKING = SimpleNamespace(has_thinking=True, think_start="<think>", think_end="</think>")
PARAMETERS = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "now": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "where": {"type": "object"},
    "list": {"type": ["array", "null"]}, "size": {"enum": ["s", "m"]}, "other": {"$ref": "#/$defs/name"},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": PARAMETERS, "$defs": {"name": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "write", "description": "", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "write_all"}},
]
TAGS = re.compile(r"\]<\]minimax\[>\[|<[^<>]*>|\[[A-Z_]+\]|[{}\":,\n\\]+|call:")
RENDERED = sorted(RENDERERS, key=lambda renderer: renderer.__name__)


def format_named(name):
    plain = SimpleNamespace(has_tool_calling=False, chat_template=name, get_vocab=dict)
    return BY_PARSER.get(name) or BY_PARSER.get(name.rpartition("_")[2]) or format_of(plain)


def marks(renderer):
    """The marks and punctuation in the format's rendering of a call."""
    return sorted({*TAGS.findall(renderer("write", {"text": "x"})), "<think>", "</think>"})


@st.composite
def texts(draw, pieces):
    """Text that contains the format's marks."""
    return "".join(draw(st.lists(st.sampled_from([*pieces, "a", " ", "\n", "é", "`", "'", "0"]), max_size=12)))


def split(text, cuts, format, *, cut=False, thinking=True, **options):
    """The content, reasoning and calls of an answer that arrives in pieces, cut at these positions."""
    splitter = Splitter(THINKING, (), tool_format=format, tools=TOOLS, thinking=thinking, **options)
    parts, start = [], 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        parts += splitter.feed(text[start:end])
        start = end
    parts += splitter.end(cut=cut)
    calls = [(call.name, json.loads(call.arguments)) for call in calls_of(parts)]
    return text_of(parts), text_of(parts, reasoning=True), calls


CUTS = st.lists(st.integers(0, 10_000), max_size=6)


# Formats with line breaks between arguments, so not MiniMax-M3's.
SPACED = [r for r in RENDERED if "\n" in r("write", {"text": "x"}) and r.__name__ != "minimax_m3"]


@pytest.mark.parametrize("renderer", SPACED, ids=lambda renderer: renderer.__name__)
def test_another_call_without_the_templates_line_breaks_is_part_of_a_value(renderer):
    before, after = renderer("write", {"text": "\0"}).replace("\\u0000", "\0").split("\0")
    arguments = {"text": "a" + (after + before).replace("\n", "") + "b"}
    calls = split(renderer("write", arguments), [], format_named(RENDERERS[renderer]))[2]
    assert calls == [("write", arguments)]


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_rendered_call_is_read_back(renderer, data):
    text = texts(marks(renderer))
    if RENDERERS[renderer] in ("minicpm5", "gemma4", "function_gemma"):  # strings that their templates do not escape
        text = text.map(lambda value: value.replace("]]>", "").strip())
    values = {
        "text": text, "count": st.integers(), "share": st.floats(-1e6, 1e6), "now": st.booleans(),
        "maybe": st.none(),
        "where": st.dictionaries(st.sampled_from("ab"), st.text("xyz<>/", max_size=4), max_size=2),
        "list": st.lists(st.integers(), max_size=3) | st.none(),
        "size": st.sampled_from("sm"), "other": st.just("<x>"),
    }  # fmt: skip
    if renderer.__name__ == "minimax_m3":  # its template leaves out null
        values |= {"maybe": text, "list": st.lists(st.integers(), max_size=3)}
    chosen = data.draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=4))
    arguments = {name: data.draw(values[name]) for name in chosen}
    before, rendered = data.draw(st.sampled_from(["", "\n", "I write.\n\n"])), renderer("write", arguments)
    content, reasoning, calls = split(before + rendered, data.draw(CUTS), format_named(RENDERERS[renderer]))
    assert calls == [("write", arguments)], rendered
    assert (content, reasoning) == (before.lstrip("\n"), "")


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_text_without_a_call_is_unchanged(renderer, data):
    pieces = [*marks(renderer), "write", "unknown"]
    text = data.draw(texts(pieces).filter(lambda text: not text.lstrip().startswith("<think>")))
    content, reasoning, calls = split(
        text, data.draw(CUTS), format_named(RENDERERS[renderer]), cut=data.draw(st.booleans())
    )
    assert calls or (content, reasoning) == (text, "")


class Counted:
    """A format that counts the characters in which it searches calls."""

    def __init__(self, format):
        self.format, self.marks, self.opening, self.count = format, format.marks, format.opening, 0

    def read(self, text, tools, *, complete):
        self.count += len(text)
        return self.format.read(text, tools, complete=complete)


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
def test_a_hostile_answer_is_read_a_bounded_number_of_times(renderer):
    format = Counted(format_named(RENDERERS[renderer]))
    begun = renderer("write", {"text": "x"}).partition("x")[0]
    text = begun * (20_000 // len(begun))
    content, reasoning, calls = split(text, [], format)
    assert calls or content + reasoning == text
    assert format.count <= MOST_READ + len(text)


NODE = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "next": {"$ref": "#"}, "first": {"$ref": "#/prefixItems/0"}},
    "$defs": {"a/b %": {"type": "integer"}},
    "prefixItems": [{"type": "boolean"}, {"$ref": "#/$defs/a~1b%20%25"}],
}


@pytest.mark.parametrize(
    ("reference", "types"),
    [
        ("#", {"object"}), ("#/properties/label", {"string"}), ("#/properties/next", {"object"}),
        ("#/properties/first", {"boolean"}), ("#/prefixItems/1", {"integer"}), ("#/prefixItems/2", set()),
        ("#/prefixItems/-1", set()), ("#/none", set()), ("", set()), ("other.json#/properties/label", set()),
        ("https://example.org/#/type", set()),
    ],
)  # fmt: skip
def test_references_into_a_schema(reference, types):
    assert types_of({"$ref": reference}, NODE) == types


NAMES = ("a.b-c__d", "mcp__server__tool", "Write", "größe", "x")
KEYS = ("text", "a-b", "a_b.c", "$x", "ключ", "file path", "Type", "name", "arguments")


@pytest.mark.parametrize(
    "value", ["{1, 2}", "b'x'", "2j", "...", "[{1}]", "0x" + "f" * 5000], ids=lambda value: value[:8]
)
def test_a_python_value_that_json_cannot_express_is_text(value):
    answer = f"<|tool_call_start|>[write(text={value})]<|tool_call_end|>"
    assert split(answer, [], format_named("pythonic")) == ("", "", [("write", {"text": value})])


@pytest.mark.parametrize(
    ("text", "types", "want"),
    [
        ("5.5", {"integer", "string"}, '"5.5"'), ("5.0", {"integer", "string"}, "5"), ("5.5", {"integer"}, "5.5"),
        ("1e400", {"integer", "string"}, '"1e400"'), ("5.5", {"number", "string"}, "5.5"),
    ],
)  # fmt: skip
def test_a_number_of_a_type_that_is_not_allowed_is_text_if_that_is(text, types, want):
    assert untyped_as_json(text, types) == want


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
def test_names_that_are_not_identifiers(renderer):
    for i, key in enumerate(KEYS):
        name, arguments = NAMES[i % len(NAMES)], {key: ' \n"\\'}
        properties = {"properties": {key: {"type": "string"}}}
        tools = [
            {"type": "function", "function": {"name": each, "parameters": properties}} for each in (name, name + "2")
        ]
        splitter = Splitter(THINKING, (), tool_format=format_named(RENDERERS[renderer]), tools=tools)
        parts = splitter.feed(renderer(name, arguments) * 2) + splitter.end(cut=False)
        assert [(p.name, json.loads(p.arguments)) for p in parts] == [(name, arguments)] * 2


DEEP = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "more": {"type": "array", "items": {"$ref": "#/$defs/part"}},
    },
}
PART = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "number"}, "size": {"type": "string"}},
}
NESTED_TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": {
        "type": "object", "properties": {"where": DEEP}, "$defs": {"part": PART},
    }}},
]  # fmt: skip
# Without a member's start: an end and a start in a text would be read as those of members.
MARKED = st.lists(st.sampled_from([M3, f"{M3}</text>", f"{M3}</size>", f"{M3}</item>", "a", " ", "1"]), max_size=5)


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_nested_tags_become_objects_and_lists(data):
    text = MARKED.map("".join)
    part = st.fixed_dictionaries({}, optional={"text": text, "count": st.integers(), "size": text})
    where = {"text": data.draw(text), "more": data.draw(st.lists(part, max_size=3))}
    written = minimax_m3("write", {"where": where})
    splitter = Splitter(THINKING, (), tool_format=format_named(M3), tools=NESTED_TOOLS)
    parts = splitter.feed(written) + splitter.end(cut=False)
    assert [(p.name, json.loads(p.arguments)) for p in parts] == [("write", {"where": where})]
