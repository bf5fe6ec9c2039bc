"""Grammars of tool calls: what a format renders is accepted, and what they accept is read back as valid calls."""

import json
import random
import re
from types import SimpleNamespace

import grammars
import pytest
from call_renderers import M3, RENDERERS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sweep import SWEEP
from tokenizers import AddedToken

from mlx_mtp import grammar
from mlx_mtp.grammar import Gate
from mlx_mtp.serve.answer import Splitter, calls_of, text_of
from mlx_mtp.serve.frames import frames_of
from mlx_mtp.serve.structured import RequiredOutput
from mlx_mtp.serve.tool_calls.grammars import OfferedTools, call_grammar, call_mark, object_schema
from mlx_mtp.serve.tool_calls.schema import Tools
from mlx_mtp.serve.tool_calls.table import BY_PARSER, PYTHONIC_PLAIN, format_of
from mlx_mtp.serve.tool_choice import ToolChoice, call_output

EXAMPLES = 2000 if SWEEP else 2


class Plain(SimpleNamespace):
    __hash__ = object.__hash__  # grammars are cached by tokenizer


PLAIN = Plain(has_tool_calling=False, chat_template=None, eos_token_ids=[256], get_vocab=dict)


def pythonic_plain(name, arguments):
    """A call in Python's syntax, with strings as they are."""
    written = (f"'{value}'" if isinstance(value, str) else repr(value) for value in arguments.values())
    inside = ", ".join(f"{key}={value}" for key, value in zip(arguments, written, strict=True))
    return f"<|tool_call_start|>[{name}({inside})]<|tool_call_end|>"


NAMES = {**RENDERERS, pythonic_plain: "pythonic_plain"}
RENDERED = sorted(NAMES, key=lambda renderer: renderer.__name__)
MARKS = re.compile(r"\]<\]minimax\[>\[|<[^<>]*>|\[[A-Z_]+\]|[{}\":,\n\\]+|call:")


def renderer_of(name):
    return next(each for each in RENDERED if each.__name__ == name)


def format_named(name):
    if name == "pythonic_plain":
        return PYTHONIC_PLAIN
    plain = SimpleNamespace(has_tool_calling=False, chat_template=name, get_vocab=dict)
    return BY_PARSER.get(name) or BY_PARSER.get(name.rpartition("_")[2]) or format_of(plain)


def offer(*schemas, one=False, forced=True, strict=None):
    """The tools "write", "write_all" and so on with these schemas of their arguments."""
    named = zip(("write", "write_all", "run"), schemas, strict=False)
    tools = Tools([{"function": {"name": name, "parameters": schema}} for name, schema in named])
    return OfferedTools(tools, forced, one, tools.names if strict is None else strict)


def tools_of(offer):
    return [{"function": {"name": name, "parameters": offer.tools.parameters(name)}} for name in offer.tools.names]


STRINGS = {
    "any": {"type": "string"}, "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "letters": {"type": "string", "pattern": "^[a-c]+$|^x/y$"}, "day": {"type": "string", "format": "date"},
    "size": {"enum": ["s", "null", "5"]}, "same": {"const": "it's"},
}  # fmt: skip
TEXTS = {
    "any": None, "short": st.text("ab<>/'\"\n é", min_size=1, max_size=3),
    "letters": st.sampled_from(["a", "abc", "x/y"]), "day": st.just("2024-02-28"),
    "size": st.sampled_from(["s", "null", "5"]), "same": st.just("it's"),
}  # fmt: skip
OBJECT = {
    "type": "object", "required": ["count"], "additionalProperties": False,
    "properties": {"count": {"type": "integer"}, "text": {"$ref": "#/$defs/text"}},
}  # fmt: skip

FIXED = [[1, "it's"], [[True], []], {"text": "a b", "list": [{"count": -2.5}]}]


@st.composite
def parameters(draw, pieces, nulls=True):
    """A schema of arguments, and arguments that fit it, in its order."""
    text = st.lists(st.sampled_from([*pieces, "a", " ", "\n", "é", "'", "0", "null"]), max_size=6).map("".join)
    kind = draw(st.sampled_from(sorted(STRINGS)))
    inner = st.tuples(st.integers(), text | st.none()).map(
        lambda both: {"count": both[0], **({} if both[1] is None else {"text": both[1]})}
    )
    found = {
        "text": (STRINGS[kind], text if TEXTS[kind] is None else TEXTS[kind]),
        "count": ({"type": "integer", "minimum": -5}, st.integers(-5)),
        "share": ({"type": "number"}, st.floats(-1e6, 1e6)),
        "now": ({"type": "boolean"}, st.booleans()),
        "maybe": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, st.none() if nulls else st.just("x")),
        "either": ({"type": ["string", "null"]}, st.sampled_from(["", "nothing", "a b"])),
        "where": (OBJECT, inner),
        "list": ({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, st.lists(st.integers(), max_size=3)),
        "objects": ({"type": "array", "items": OBJECT}, st.lists(inner, max_size=2)),
        "nothing": ({"type": "null"}, st.none()),
        "fixed": ({"enum": FIXED}, st.sampled_from(FIXED)),
    }  # fmt: skip
    names = draw(st.lists(st.sampled_from([*found] if nulls else [*found][:-2]), unique=True, max_size=5))
    required = [name for name in names if draw(st.booleans())]
    given = {name: draw(found[name][1]) for name in names if name in required or draw(st.booleans())}
    properties = {name: found[name][0] for name in names}
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "$defs": {"text": {"type": "string"}}}, given


def unwritable(format, value):
    """Whether a value has a string that the format's grammar leaves out, as it could not be read back for certain."""
    texts = [each for each in value.values() if isinstance(each, str)]
    if format is PYTHONIC_PLAIN and any(re.search(r"'\s*[,)]", each) for each in texts):
        return True
    marks = [getattr(format, name) for name in ("close", "nested", "quote") if getattr(format, name, "")]
    written = json.dumps(value, ensure_ascii=False)
    return any(mark.split("{")[0] in written.replace('\\"', '"') for mark in marks) or "]]>" in written


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_rendered_call_is_accepted(renderer, data):
    format = format_named(NAMES[renderer])
    pieces = sorted({*MARKS.findall(renderer("write", {"text": "x"}))})
    schema, arguments = data.draw(parameters(pieces, nulls=NAMES[renderer] != M3))
    if "gemma" in renderer.__name__ or renderer.__name__ == "minicpm":  # strings that their templates do not escape
        assume(not unwritable(format, arguments))
    text = renderer("write", arguments)
    assume(not unwritable(format, arguments))
    assert grammars.accepted(call_grammar(PLAIN, format, offer(schema)), text) is None, text


def walked(made, seed, pieces, closing):
    """A text that a grammar accepts, of random pieces; None if it found no end. closing: pieces that end a text."""
    parser, draw, text = grammars.compiled_bytes(made), random.Random(seed), b""
    for step in range(160):
        if parser.is_accepting() and (step > 60 or draw.random() < 0.5):
            return text.decode()
        found = bytes(parser.compute_ff_tokens())
        tried = [*(draw.sample(pieces, len(pieces)) if step < 60 else closing), *draw.sample(ALL, len(ALL))]
        found = found or next((each.encode() for each in tried if taken(parser, each.encode())), b"")
        if not found:
            assert parser.is_accepting(), text
            return text.decode()
        assert parser.try_consume_tokens([*found]) == len(found)
        text += found
    return None


def taken(parser, piece):
    """Whether a parser takes a whole piece; it is taken back."""
    count = parser.try_consume_tokens([*piece])
    assert not count or parser.rollback(count)
    return count == len(piece) and not parser.is_error()


ALL = [chr(byte) for byte in range(32, 127)] + ["\n", "é"]


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_text_of_the_grammar_is_read_back_as_valid_calls(renderer, data):
    format = format_named(NAMES[renderer])
    rendered = renderer("write", {"text": "\0"}).replace("\\u0000", "\0").replace("\\x00", "\0")
    closing = [rendered.partition("\0")[2], '"', "'", "}", "]", ")", *MARKS.findall(rendered)[::-1]]
    pieces = sorted(
        {*MARKS.findall(rendered), *rendered.partition("\0")[::2], "a", "'", '"', "0", "-5", "null", "[", " "}
    )
    one, schemas = data.draw(st.booleans()), [data.draw(parameters(pieces))[0] for _ in range(2)]
    chosen = offer(*schemas, one=one)
    try:
        made = call_grammar(PLAIN, format, chosen)
    except ValueError:
        assume(False)
    text = walked(made, data.draw(st.integers()), pieces, closing)
    assume(text is not None)
    splitter = Splitter(SimpleNamespace(), (), tool_format=format, tools=tools_of(chosen), one_call=False)
    parts = splitter.feed(text) + splitter.end(cut=False)
    assert not text_of(parts).strip(), text
    calls = calls_of(parts)
    assert calls, text
    assert len(calls) == 1 or not one
    for call in calls:
        made = grammar.json_schema(object_schema(chosen.tools.parameters(call.name)))
        assert grammars.accepted(made, call.arguments) is None, (text, call)


@pytest.mark.parametrize("name", ["gemma_4", "function_gemma", "minicpm", "pythonic", "pythonic_plain"])
def test_lists_and_objects_of_an_enum_are_written_and_read_back(name):
    renderer = renderer_of(name)
    format, own = format_named(NAMES[renderer]), {"type": "object", "properties": {"a": {"enum": FIXED}}}
    chosen = offer({**own, "required": ["a"]})
    made = call_grammar(PLAIN, format, chosen)
    texts = [renderer("write", {"a": each}) for each in FIXED]
    texts += [text.replace("true", "True") for text in texts]  # as MiniCPM's template writes it
    assert [text for text in texts if grammars.accepted(made, text)] == []
    for other in ([1], [1, "it's", 2], [[False], []], {"text": "a b"}, {"text": "a b", "list": []}):
        assert grammars.accepted(made, renderer("write", {"a": other})) is not None
    for seed in range(6):
        text = walked(made, seed, ["'", '"', " "], [])
        splitter = Splitter(SimpleNamespace(), (), tool_format=format, tools=tools_of(chosen), one_call=False)
        calls = calls_of(splitter.feed(text) + splitter.end(cut=False))
        assert calls, text
        assert all(json.loads(call.arguments)["a"] in FIXED for call in calls), text


SPECIAL = {
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'), "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"), "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"), "<｜DSML｜": ("｜DSML｜",), M3: (M3,),
    "json_tools": ("<tool_call>", "</tool_call>"),
}  # fmt: skip


@pytest.mark.parametrize("renderer", [each for each in RENDERED if NAMES[each] in SPECIAL])
def test_a_mark_that_is_a_special_token_is_that_token_not_its_text(renderer):
    name, schema = NAMES[renderer], {"type": "object", "properties": {"text": {"type": "string"}}}
    added = {257 + i: AddedToken(mark, special=True) for i, mark in enumerate(SPECIAL[name])}
    tokenizer = SimpleNamespace(chat_template=None, eos_token_ids=[256], added_tokens_decoder=added)
    made = call_grammar(tokenizer, format_named(name), offer(schema, schema))
    for text in (renderer("write", {"text": "a <b>\nc"}), renderer("write_all", {"text": ""})):
        assert grammars.accepted(made, text, *SPECIAL[name]) is None
        assert grammars.accepted(made, text, *SPECIAL[name], spelled=True) is not None


def test_a_token_that_ends_the_answer_is_no_part_of_a_grammar():
    added = {257: AddedToken("<|call|>", special=True)}
    tokenizer = SimpleNamespace(chat_template=None, eos_token_ids=[256, 257], added_tokens_decoder=added)
    made = call_grammar(tokenizer, format_named("<|channel|>commentary"), offer({}))
    text = renderer_of("harmony")("write", {})
    assert grammars.accepted(made, text.removesuffix("<|call|>"), "<|call|>") is None


@pytest.mark.parametrize("renderer", RENDERED, ids=lambda renderer: renderer.__name__)
def test_a_grammar_behind_the_mark_accepts_the_rest_of_a_call(renderer):
    """The mark is that of `call_mark`; arguments of a tool that is not strict are free."""
    format, schema = (
        format_named(NAMES[renderer]),
        {"type": "object", "properties": {"text": {"type": "integer"}}},
    )
    for strict in ((), ("write",)):
        chosen = offer(schema, schema, forced=False, strict=strict)
        mark, literal = call_mark(PLAIN, format)
        text = renderer("write", {"text": "x"})
        begin = re.search(re.escape(mark) if literal else mark, text)
        made = call_grammar(PLAIN, format, chosen)
        assert (grammars.accepted(made, text[begin.end() :]) is None) is not bool(strict), text


def test_text_behind_a_call_is_free_where_the_next_call_has_a_mark_of_its_own():
    """The grammar ends with the call; in a list of calls it can go on."""
    for name, ends in (("hermes", True), ("qwen_coder", True), ("gemma_4", True), ("kimi_k2", False)):
        renderer = renderer_of(name)
        format, chosen = format_named(NAMES[renderer]), offer({}, forced=False, strict=())
        parser = grammars.compiled_bytes(call_grammar(PLAIN, format, chosen))
        text = renderer("write", {}).removeprefix(call_mark(PLAIN, format)[0])
        text = text.removesuffix("<|tool_calls_section_end|>")
        assert parser.try_consume_tokens([*text.encode()]) == len(text.encode())
        assert parser.is_stopped() is ends, name


HARMONY = frames_of(SimpleNamespace(chat_template="<|channel|> <|message|> analysis"))


@pytest.mark.parametrize(
    ("renderer", "frames", "strict", "restricted"),
    [("llama", None, True, True), ("llama", None, False, True), ("hermes", None, True, True),
     ("hermes", None, False, False), ("harmony", HARMONY, True, False), ("harmony", HARMONY, False, False)],
)  # fmt: skip
def test_instead_of_content_an_answer_may_be_a_call(renderer, frames, strict, restricted):
    """Free or restricted; strict tools that are not honoured are a warning."""
    renderer = renderer_of(renderer)
    schema = {"type": "object", "properties": {"text": {"enum": ["x", "y"]}}}
    tools = tools_of(offer(schema, schema))
    info = SimpleNamespace(tokenizer=PLAIN, tool_format=format_named(NAMES[renderer]), frames=frames)
    content, warnings = RequiredOutput(grammar.regex("[0-9]"), "response_format", "response_format"), []
    choice = ToolChoice(tools, strict=("write",) if strict else ())
    found = call_output(info, choice, content, warnings)
    assert len(warnings) == (strict and not restricted)
    assert (found.gate == Gate()) is restricted
    assert found.gate.optional is (frames is not None)
    texts = ["5", renderer("write", {"text": "x"}), renderer("write_all", {"text": "z"}), "five"]
    fits = [grammars.accepted(found.grammar, text) is None for text in texts]
    assert fits == [True, restricted, restricted, False]
    assert (grammars.accepted(found.grammar, renderer("write", {"text": "z"})) is None) is (restricted and not strict)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]}}}, "oneOf"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"required": ["b"], "properties": {"a": {}}}, "'b'"),
        ({"properties": {"a": {"type": "string", "format": "duration"}}}, "duration"),
        ({"properties": {"a": {"type": ["array", "string"], "prefixItems": [{}]}}}, "prefixItems"),
        ({"properties": {"a": {"$ref": "https://example.org/a"}}}, "$ref"),
        ({"properties": {"a>": {"type": "string"}}}, "'a>'"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "string"}}}, "anyOf"),
        ({"additionalProperties": {"type": "string"}, "minProperties": 1}, "minProperties"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_honoured_is_refused(schema, named):
    with pytest.raises(ValueError, match=re.escape(named)) as raised:
        call_grammar(PLAIN, format_named("qwen3_coder"), offer({"type": "object", **schema}))
    assert "'write'" in str(raised.value)


def test_a_section_mark_in_a_text_is_not_mistaken_for_a_section():
    """MiniCPM's parser drops the marks around a whole section, and does not find the end of one that is open."""
    made = call_grammar(PLAIN, format_named(NAMES[renderer_of("minicpm")]), offer({"properties": {"a": {}}}))
    table = {"a": True, "<![CDATA[</param>]]>": True, "<![CDATA[y": False, " <![CDATA[y]]>": False}
    for value, fits in table.items():
        text = f'<function name="write"><param name="a">{value}</param></function>'
        assert (grammars.accepted(made, text) is None) is fits, value


def coder(value):
    return f"<tool_call>\n<function=write>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


LISTED = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "string"}, ["", "null", "5", " <x>\n", "</function>"], ["</parameter>", "</parameter>b"]),
        ({"type": "string", "nullable": True}, ["", "nul", "true"], ["null", " None\n", "NaN"]),
        ({"type": ["string", "integer"]}, ["5", "-5", "five", "null", "[5]"], ["5.5", "5 a", " -5"]),
        (LISTED, ["a", '["a"]', '["</x>"]'], ["[5]", "[a", '["</parameter>"]', " [x"]),
        ({"type": "array", "items": {"type": "string"}}, ['["</parameter>"]', "[]"], ["", "a", "[5]"]),
        ({"enum": ["a", "null", 5, None]}, ["a", "5", "null", "None"], ["b", "6", ""]),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c", ""]),
        ({"type": "boolean"}, ["true", "False"], ["TRUE", "0", '"true"']),
        ({"type": "string", "pattern": "b|^a/$", "minLength": 2}, ["a/", "xby"], ["b", "xa/", "a/c"]),
        ({"type": "string", "format": "date"}, ["2024-02-28", "2023-12-31"], ["2024-02-30", "2024-2-1"]),
        ({}, ["a", "5", '{"a": [null]}', "true"], ['"a"', "[5", "{"]),
    ],
)  # fmt: skip
def test_raw_values_are_those_that_are_read_back(schema, accepted, refused):
    made = call_grammar(PLAIN, format_named("qwen3_coder"), offer({"properties": {"a": schema}, "required": ["a"]}))
    assert [each for each in accepted if grammars.accepted(made, coder(each)) is not None] == []
    assert [each for each in refused if grammars.accepted(made, coder(each)) is None] == []
    undeclared = coder("x").replace("=a>", "=b>")
    assert grammars.accepted(made, undeclared) is not None
    assert grammars.accepted(made, re.sub("<param.*ter>\n", "", coder("x"), flags=re.DOTALL)) is not None
