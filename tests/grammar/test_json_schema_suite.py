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
    assert taken >= 256
    assert accepted >= 0.95 * valid


OBJECT, WHOLE, TEXT = {"type": "object"}, {"type": "integer"}, {"type": "string"}
CLOSED = {"additionalProperties": False}
ENDLESS = {**OBJECT, "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
SAME = [  # a schema, and the form in which it is enforced
    ({"maxItems": 2.0, "minLength": 0}, {"maxItems": 2, "minLength": 0}),
    ({"properties": {"a": {"maxLength": 3.0}}}, {"properties": {"a": {"maxLength": 3}}}),
    ({"const": {"maxLength": 3.0, "if": {}}}, {"const": {"maxLength": 3.0, "if": {}}}),
    ({"enum": [{"then": {}}], "default": {"not": False}}, {"enum": [{"then": {}}]}),
    ({"properties": {"if": {"minItems": 1.0}}}, {"properties": {"if": {"minItems": 1}}}),
    ({"if": {"type": "null"}}, {}),
    ({"if": {"type": "null"}, "then": {}, "else": True}, {}),
    ({"then": False, "else": False}, {}),
    ({"not": False}, {}),
    ({"properties": {"a": {"not": {}}, "b": {}}}, {"properties": {"a": False, "b": {}}}),
    ({"properties": {"a": {"not": {}}, "b": {}}, **CLOSED}, {"properties": {"b": {}}, **CLOSED}),
    # Texts
    ({**TEXT, "format": "uuid4"}, TEXT),
    ({"format": "int32"}, {}),
    ({**WHOLE, "format": "date"}, WHOLE),
    ({**TEXT, "format": "date"}, {**TEXT, "format": "date"}),
    # Arrays
    ({"minContains": 2, "maxContains": 3}, {}),
    ({"contains": False, "minContains": 0}, {}),
    ({"contains": {}, "minContains": 0, "maxContains": 1}, {"minItems": 0, "maxItems": 1}),
    ({"contains": True, "maxItems": 3}, {"maxItems": 3, "minItems": 1}),
    ({"uniqueItems": False, "propertyNames": {}, "unevaluatedItems": {}}, {}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"uniqueItems": True, "items": {"enum": [5]}}, {"items": {"enum": [5]}, "maxItems": 1}),
    ({"uniqueItems": True, "prefixItems": [{}], "items": False}, {"prefixItems": [{}], "items": False}),
    ({"items": {}, "unevaluatedItems": False}, {"items": {}}),
    ({"prefixItems": [{}], "unevaluatedItems": False}, {"prefixItems": [{}], "items": False}),
    ({"items": [{}], "additionalItems": False}, {"prefixItems": [{}], "items": False}),
    ({"items": {}, "additionalItems": False}, {"items": {}}),
    ({**WHOLE, "uniqueItems": True, "propertyNames": False, "contains": WHOLE}, WHOLE),
    # Numbers
    ({"minimum": 3, "exclusiveMinimum": True}, {"minimum": 3.00000000000001}),
    ({"minimum": 3, "exclusiveMinimum": False}, {"minimum": 3}),
    ({**WHOLE, "exclusiveMinimum": 0, "maximum": 9.5}, {**WHOLE, "maximum": 9, "minimum": 1}),
    ({**WHOLE, "multipleOf": 1.5}, {**WHOLE, "multipleOf": 3}),
    # Objects
    ({"propertyNames": TEXT}, {}),
    ({"propertyNames": {"minLength": 0, "title": "t", "minimum": 5, "format": "x"}}, {}),
    ({"propertyNames": {"enum": ["a", 5]}, "additionalProperties": WHOLE}, {**CLOSED, "properties": {"a": WHOLE}}),
    ({"propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"const": "a"}}}, {"properties": {"a": True}, **CLOSED}),
    ({"propertyNames": {"pattern": "^a"}}, {"patternProperties": {"^a": True}, **CLOSED}),
    ({"propertyNames": False}, {"maxProperties": 0}),
    ({"unevaluatedProperties": True}, {}),
    ({"unevaluatedProperties": False}, CLOSED),
    ({"additionalProperties": WHOLE, "unevaluatedProperties": False}, {"additionalProperties": WHOLE}),
    (
        {"allOf": [{"properties": {"a": WHOLE}}], "unevaluatedProperties": {"not": {}}},
        {"allOf": [{"properties": {"a": WHOLE}}], "properties": {"a": True}, **CLOSED},
    ),
    ({"allOf": [CLOSED], "unevaluatedProperties": False}, {"allOf": [CLOSED]}),
    (
        {"properties": {"a": {}}, "patternProperties": {"^a$": WHOLE, "^b": {}}},
        {"properties": {"a": {"allOf": [{}, WHOLE]}}, "patternProperties": {"^b": {}}},
    ),
    ({"patternProperties": {"": False}}, {"patternProperties": {"": False}, **CLOSED}),
    (
        {"allOf": [OBJECT], "dependentRequired": {"b": ["a"], "c": []}},
        {"allOf": [OBJECT, {"anyOf": [{"properties": {"b": False}}, {"required": ["a", "b"]}]}]},
    ),
    (
        {"dependencies": {"b": WHOLE}},
        {"allOf": [{"anyOf": [{"properties": {"b": False}}, {"required": ["b"], "allOf": [WHOLE]}]}]},
    ),
    # References
    ({"$defs": {"a": {"title": "unused"}}}, {}),
    ({"$ref": "#/x/y", "x": {"y": {"example": 5}}}, {"$ref": "#/$defs/y", "$defs": {"y": {}}}),
    ({"$id": "http://a/b", "$ref": "b#c", "d": {"$anchor": "c"}}, {"$ref": "#/$defs/c", "$defs": {"c": {}}}),
    ({"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}),
    # Values without end
    ({"items": {"$ref": "#/$defs/n"}, "$defs": {"n": ENDLESS}}, {"items": False, "$defs": {"n": False}}),
    ({"anyOf": [{"$ref": "#/$defs/n"}, {}], "$defs": {"n": ENDLESS}}, {"anyOf": [False, {}], "$defs": {"n": False}}),
    ({"prefixItems": [{"$ref": "#/a"}], "a": {"$ref": "#/a"}}, {"prefixItems": [False], "$defs": {"a": False}}),
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
    with pytest.raises(ValueError, match="json_schema: nested too deeply") as e:
        grammar.json_schema(deep)
    assert "\n" not in str(e.value)
