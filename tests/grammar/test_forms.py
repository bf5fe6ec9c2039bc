"""Grammars are immutable, refused in one line that names the fault, and not changed by options inside a schema."""

import dataclasses
import json
import subprocess
import sys

import grammars
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.demo import demo_path
from mlx_mtp.grammar.forms import SEPARATORS, either

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


def accepts(made, text):
    constraint = grammars.constraint(made)
    tokens = grammars.demo_tokenizer().encode(text, add_special_tokens=False)
    parser = constraint.parser.deep_copy()
    return parser.try_consume_tokens(tokens) == len(tokens) and parser.is_accepting()


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "null"}}, "not"),
    ({"if": {}, "then": {"type": "null"}}, "if"),
    ({"$ref": "https://example.com/schema.json"}, "example.com"),
    ({"type": "string", "pattern": "(?=a)b"}, "json_schema"),
    ({"type": 5}, "type"),
    (False, "false"),
    ("{", "not JSON"),
    ([], "list"),
    (None, "NoneType"),
]


@pytest.mark.parametrize(("schema", "name"), REFUSED)
def test_a_schema_that_cannot_be_honoured_is_one_line(schema, name):
    with pytest.raises(ValueError, match=name) as e:
        grammar.json_schema(schema)
    assert "\n" not in str(e.value)
    assert str(e.value).startswith("json_schema")


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammar.regex("("),
        lambda: grammar.regex("(?=a)b"),
        lambda: grammar.lark("start: missing"),
        lambda: grammar.lark('start: "'),
        lambda: grammar.lark('start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
        lambda: grammars.constraint(grammar.lark('start: "a" <no_such_token>')),
        lambda: grammars.constraint(grammar.regex("a", tokenizer=object())),
        lambda: grammar.compiled(grammar.regex("a"), None, 5),
        lambda: grammar.compiled("a", None, 5),
        lambda: grammar.compiled(grammar.regex("a"), grammars.letters(), 4),
        lambda: grammar.json(whitespace=-1),
        lambda: grammar.json(whitespace="("),
        lambda: grammar.json(whitespace=1.5),
        lambda: grammar.json(whitespace=(",", ":", " ")),
        lambda: grammar.json(whitespace=(",", "(")),
    ],
)
def test_other_mistakes_are_one_line(make):
    with pytest.raises(ValueError) as e:  # noqa: PT011 - each has its own words
        make()
    assert "\n" not in str(e.value)


OPTIONS = {
    "lenient": True,
    "coerce_one_of": True,
    "whitespace_flexible": False,
    "whitespace_pattern": "x+",
    "item_separator": ";",
    "key_separator": "=",
    "json_allowed_escapes": "n",
    "json_allow_general_unicode_escapes": True,
}


@pytest.mark.parametrize(
    "make",
    [
        grammar.regex,
        lambda pattern: grammar.lark(f"start: /{pattern}/"),
        lambda pattern: grammar.json_schema({"type": "string", "pattern": pattern}),
    ],
)
@pytest.mark.parametrize(("pattern", "wrong"), [("[0-9", "unclosed character class"), ("(a", "unclosed group")])
def test_the_message_states_what_is_wrong_with_a_pattern(make, pattern, wrong):
    with pytest.raises(ValueError, match=f"{wrong}$") as found:
        make(pattern)
    assert pattern in str(found.value)


def test_options_in_a_schema_change_nothing():
    for name, value in OPTIONS.items():
        hostile = {**POINT, "x-guidance": {name: value}}
        assert accepts(grammar.json_schema(hostile), '{"x": 1,"y":2}'), name
        assert grammar.json_schema(hostile) == grammar.json_schema({**POINT, "x-guidance": {}}), name
    with pytest.raises(ValueError, match="not"):
        grammar.json_schema({"not": {"type": "null"}, "x-guidance": {"lenient": True}})


WRITTEN = {
    '{"x":1,"y":2}': {SEPARATORS, 4, 1, 0, r"\n"},
    '{"x": 1, "y": 2}': {SEPARATORS, 4, 1, None},
    '{"x":1, "y": 2}': {SEPARATORS, 4, 1},
    '{"x" : 1 ,  "y":2}': {4},
    '{"x": 1 ,"y": 2}': {4, 1},
    '{"x" :1,"y":2}': {4, 1},
    '{"x":  1,"y":2}': {4},
    '{ "x":1,"y":2 }': {4, 1},
    '{"x":\n1,"y":2}': {4, 1, r"\n"},
    '{"x":     1,"y":2}': set(),
    ' {"x":1,"y":2}': set(),
    '{"x":1,"y":2} ': set(),
    '{"y":2,"x":1}': set(),
}


@pytest.mark.parametrize("whitespace", [SEPARATORS, 4, 1, 0, None, r"\n"])
def test_white_space(whitespace):
    made = grammar.json_schema(POINT, whitespace=whitespace)
    assert {text for text in WRITTEN if accepts(made, text)} == {t for t, w in WRITTEN.items() if whitespace in w}
    if whitespace == SEPARATORS:
        assert made == grammar.json_schema(json.dumps(POINT)) == grammar.json_schema(POINT, whitespace=[*whitespace])
        assert len(made.styles) == 2


RANGE = {"minimum": -5, "maximum": 5}
DIGITS = [  # a schema, a text that it accepts, and one that it does not
    ({"type": "integer"}, "-" + "7" * 400, "7.5"),
    ({"type": "integer", "maximum": 5}, "-" + "7" * 400, "7" * 400),
    ({"type": "integer", **RANGE}, "-3", "-" + "7" * 400),
    ({"type": "number", **RANGE}, "4." + "7" * 400, "7" * 400),
    ({"type": "number", **RANGE, "multipleOf": 0.01}, "4.77", "4.777"),
]


@pytest.mark.parametrize(("schema", "taken", "refused"), DIGITS)
def test_digits_have_the_limits_of_the_schema_only(schema, taken, refused):
    assert [accepts(grammar.json_schema(schema), text) for text in (taken, refused)] == [True, False]


def test_any_json_and_any_value():
    for made in (grammar.json(), grammar.json_schema({}), grammar.json_schema(True), grammar.json_schema("true")):
        assert all(accepts(made, text) for text in ('{"a": [1, null]}', '"x"', "3", "[]"))
        assert not accepts(made, "{a: 1}")
    assert not accepts(grammar.json_schema({"type": "object"}), "[]")


def test_a_grammar_is_immutable_and_equal_to_another_of_the_same_text():
    made = grammar.regex("a+", tokenizer=grammars.letters())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.text = "b"
    assert made == grammar.regex("a+")
    assert hash(made) == hash(grammar.regex("a+"))
    assert mlx_mtp.grammar is grammar


def test_a_grammar_is_compiled_once():
    first, second = (grammars.constraint(grammar.json_schema(POINT)) for _ in range(2))
    assert first.parser is second.parser


def test_special_tokens_stand_in_lark_by_name():
    plain = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    plain.add_special_tokens(["<call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    tokens = [tokenizer.encode(text)[0] for text in ("a", "<call>", "b")]
    for text, taken in (('start: "a" <call> "b"', 3), ('start: "a<call>b"', 1)):
        constraint = grammar.compiled(grammar.lark(text), tokenizer, 2056)
        assert constraint.parser.deep_copy().try_consume_tokens(tokens) == taken


def test_without_llguidance_the_message_names_the_extra():
    program = "import sys; sys.modules['llguidance'] = None; from mlx_mtp import grammar; grammar.json()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "ValueError: grammars need llguidance: pip install -e '.[grammar]'" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("swapped", [False, True])
def test_either_of_two_grammars_has_the_texts_of_both_and_their_styles(swapped):
    others = [grammar.lark('start: "n" N\nN: /[0-9]+/'), grammar.regex("[a-c]{2}"), grammar.json_schema({"const": 5})]
    spaced, tight = '{"x": 1, "y": 2}', '{"x":1,"y":2}'
    for other, text in zip(others, ["n12", "ab", "5"], strict=True):
        pair = (other, grammar.json_schema(POINT)) if swapped else (grammar.json_schema(POINT), other)
        made = either(*pair)
        assert made.name == pair[0].name
        assert all(accepts(made, each) for each in (spaced, tight, text))
        assert not any(accepts(made, each) for each in ('{"x": 1}', text + spaced, ""))
        styles = [dataclasses.replace(made, text=each) for each in made.styles]
        found = [[accepts(style, each) for each in (spaced, tight, text)] for style in styles]
        assert found == [[True, False, True], [False, True, True]]
