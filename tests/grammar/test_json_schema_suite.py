"""The JSON Schema Test Suite (MIT, draft 2020-12): what is taken accepts no invalid instance.

The files in `support/fixtures/json_schema_suite` are those of the suite in jsonschema's source archive.
"""

import json
from pathlib import Path

import grammars
import pytest

from mlx_mtp import grammar
from mlx_mtp.grammar.equivalent import equivalent

FILES = sorted((Path(__file__).parents[1] / "support/fixtures/json_schema_suite").glob("*.json"))


def accepts(constraint, value) -> bool:
    """Return whether any usual way to write a value is accepted."""
    encode = grammars.demo_tokenizer().encode
    for separators in ((", ", ": "), (",", ":")):
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
            tokens, parser = encode(text, add_special_tokens=False), constraint.parser.deep_copy()
            if parser.try_consume_tokens(tokens) == len(tokens) and parser.is_accepting():
                return True
    return False


def test_the_suite():
    groups = [group for file in FILES for group in json.loads(file.read_text())]
    taken, valid, accepted = 0, 0, 0
    for group in groups:
        try:
            constraint = grammars.constraint(grammar.json_schema(group["schema"]))
        except ValueError:
            continue
        taken += 1
        for test in group["tests"]:
            fits = accepts(constraint, test["data"])
            assert test["valid"] or not fits, (group["description"], test)
            valid, accepted = valid + test["valid"], accepted + (fits and test["valid"])
    assert len(groups) == 368
    assert taken >= 188
    assert accepted >= 0.93 * valid


OBJECT = {"type": "object"}
SAME = [  # a schema and one that accepts the same values, or the same schema where it must not change
    ({"maxItems": 2.0, "minLength": 1.5}, {"maxItems": 2, "minLength": 1.5}),
    ({"properties": {"a": {"maxLength": 3.0}}}, {"properties": {"a": {"maxLength": 3}}}),
    ({"const": {"maxLength": 3.0, "if": {}}}, {"const": {"maxLength": 3.0, "if": {}}}),
    ({"enum": [{"then": {}}], "default": {"not": False}}, {"enum": [{"then": {}}], "default": {"not": False}}),
    ({"properties": {"if": {"minItems": 1.0}}}, {"properties": {"if": {"minItems": 1}}}),
    ({"if": {"type": "null"}}, {}),
    ({"then": False, "else": False}, {}),
    ({"if": {}, "then": False}, {"if": {}, "then": False}),
    ({"minContains": 2, "maxContains": 3}, {}),
    ({"contains": False, "minContains": 0}, {}),
    ({"contains": {}, "minContains": 0, "maxContains": 1}, {"contains": {}, "minContains": 0, "maxContains": 1}),
    ({"uniqueItems": False, "not": False, "propertyNames": {}}, {}),
    ({"uniqueItems": 0, "not": 0}, {"uniqueItems": 0, "not": 0}),
    ({"unevaluatedProperties": True, "unevaluatedItems": {}}, {}),
    ({"unevaluatedProperties": False}, {"unevaluatedProperties": False}),
    ({"dependentRequired": {"a": "b"}}, {"dependentRequired": {"a": "b"}}),
    (
        {"allOf": [OBJECT], "dependentRequired": {"b": ["a"]}},
        {"allOf": [OBJECT, {"anyOf": [{"properties": {"b": False}}, {"required": ["a", "b"]}]}]},
    ),
]


@pytest.mark.parametrize(("schema", "expected"), SAME)
def test_an_equivalent_schema(schema, expected):
    before = json.dumps(schema)
    assert json.dumps(equivalent(schema)) == json.dumps(expected)
    assert json.dumps(schema) == before


def test_a_deep_schema_is_refused_in_one_line():
    deep: dict = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="json_schema: ") as e:
        grammar.json_schema(deep)
    assert "\n" not in str(e.value)
