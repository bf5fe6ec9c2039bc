"""Answers under accepted schemas are valid, annotations change nothing, and refusals name the keyword."""

import json
import random
import re
from typing import Any

import grammars
import pytest
from fuzzing import profile
from hypothesis import given
from hypothesis import strategies as st
from random_schemas import SCHEMAS, annotated, errors, random_text
from sweep import SWEEP

from mlx_mtp import grammar

WALKS = 200 if SWEEP else 3
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
OBJECT, CLOSED = {"type": "object"}, {"type": "object", "additionalProperties": False}
DRAFT_7, DRAFT_4 = ({"$schema": f"http://json-schema.org/draft-0{n}/schema#"} for n in (7, 4))


def closed(**properties: Any) -> dict[str, Any]:
    return {**CLOSED, "properties": properties, "required": [*properties]}


def tagged(*choices: Any) -> dict[str, Any]:
    """A schema of one of several objects, of which `t` states which."""
    a, b = ({**OBJECT, "properties": {"t": {**TEXT, "const": tag}}, "required": ["t"]} for tag in "ab")
    optional, untyped = {**a, "required": []}, {key: a[key] for key in ("properties", "required")}
    return {"oneOf": [*choices], "$defs": {"a": a, "b": b, "o": optional, "u": untyped, "x": closed(y=INTEGER)}}


def among(low: float, high: float, *, type: str = "number", **more: Any) -> dict[str, Any]:
    return {"type": type, "exclusiveMinimum": low, "exclusiveMaximum": high, **more}


NODE = closed(n={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})
ENDLESS = closed(n={"$ref": "#/$defs/n"})
ACCEPTED: list[Any] = [
    True,
    {},
    OBJECT,
    {"type": "array"},
    {"type": ["null", "boolean"]},
    {"enum": [1, "a", None, [1, 2], {"a": 1}, 1.5, True]},
    # Names: declared, open, of patterns that overlap with them, or fit nothing else
    {**OBJECT, "properties": {"a": INTEGER}},
    {**OBJECT, "properties": {"a": INTEGER}, "additionalProperties": TEXT},
    {**OBJECT, "properties": {"a": INTEGER}, "required": ["a", "b"], "additionalProperties": TEXT},
    {**closed(a=INTEGER), "patternProperties": {"^a$": {"minimum": 5}}},
    {**closed(a=INTEGER), "patternProperties": {"^(a|b)$": {"minimum": 5}}},
    {**OBJECT, "properties": {"a": INTEGER}, "patternProperties": {"^a": {"minimum": 5}}},
    {**OBJECT, "patternProperties": {"^x": INTEGER, "^y": TEXT}},
    {**OBJECT, "patternProperties": {"^[^a]": INTEGER, "^a": TEXT}},
    {**OBJECT, "patternProperties": {"": False}},
    {**OBJECT, "patternProperties": {".*": False}, "additionalProperties": INTEGER},
    {"allOf": [{**OBJECT, "properties": {"a": INTEGER}}, {"patternProperties": {"^a": {"minimum": 3}}}]},
    {**OBJECT, "propertyNames": {"maxLength": 3}, "additionalProperties": INTEGER},
    {**OBJECT, "minProperties": 1},
    {**OBJECT, "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2},
    {**OBJECT, "maxProperties": 2},
    {**OBJECT, "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
    {**OBJECT, "propertyNames": {"enum": ["a"]}},
    {**CLOSED, "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
    {**CLOSED, "properties": {"a": INTEGER, "b": INTEGER}, "dependentSchemas": {"a": {"required": ["b"]}}},
    {"allOf": [{"properties": {"a": INTEGER}}, {"required": ["a"]}], **OBJECT, "unevaluatedProperties": False},
    # Numbers
    among(0, 1),
    among(-1, 0),
    among(3, 3.5),
    among(-3.5, -3),
    among(-0.5, 0.25),
    among(0, 100, multipleOf=0.01),
    {"allOf": [{"exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}]},
    {"type": "integer", "maximum": 2**63 - 1},
    among(-5, 5, type="integer", multipleOf=3),
    {**INTEGER, "minimum": 2.5, "maximum": 3.5},
    {"minimum": 3, "maximum": 7},
    {**INTEGER, "multipleOf": 0.7, "minimum": 1, "maximum": 20},
    {**DRAFT_4, "minimum": 3, "exclusiveMinimum": True},
    {"type": "number", "minimum": 0.1, "maximum": 1e5},
    {"const": 2**60},
    {"const": -(2**53)},
    {"const": 1e-7},
    # Arrays and texts
    {"type": "array", "items": {"const": 3}, "uniqueItems": True},
    {"type": "array", "items": INTEGER, "contains": {}},
    {**DRAFT_7, "type": "array", "items": [INTEGER, TEXT], "additionalItems": False},
    {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False, "uniqueItems": True},
    {**TEXT, "pattern": "^[a-c]{2,3}$"},
    {**TEXT, "minLength": 2, "maxLength": 3},
    {**TEXT, "pattern": "a", "maxLength": 4},
    {**TEXT, "format": "date"},
    {**TEXT, "format": "uri"},
    {"const": "\x01\x7f\U0001f600"},
    # Values that contain values of the same schema
    {"type": "array", "items": {"$ref": "#"}},
    {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    {"$defs": {"n": ENDLESS}, **OBJECT, "properties": {"x": {"$ref": "#/$defs/n"}}},
    {"$defs": {"n": ENDLESS}, "anyOf": [{"$ref": "#/$defs/n"}, INTEGER]},
    {"oneOf": [closed(k={"const": "a"}), closed(k={"const": "b"})]},
    {"oneOf": [INTEGER, TEXT]},
    # Schemas of oneOf that exclude each other
    tagged({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}),
    tagged({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, {"type": ["null", "integer"]}, TEXT),
    tagged({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/x"}, {"const": "k"}),
    tagged({"allOf": [{"$ref": "#/$defs/a"}, {"required": ["t"]}]}, {**OBJECT, "properties": {"t": {"const": "c"}}}),
    {**INTEGER, "oneOf": [{"const": 0, "title": "None"}, {"const": 1}, {"const": 2.0}]},
    {**INTEGER, "oneOf": [{"const": 0}, {"const": 1}], "anyOf": [{"minimum": 1}, TEXT]},
    {"oneOf": [{"$ref": "#/$defs/o"}, {"type": "null"}], "$defs": {"o": closed(a={"oneOf": [TEXT, {"$ref": "#"}]})}},
    {"type": ["boolean", "integer"], "oneOf": [{"enum": [1, 3]}, {"enum": [True]}]},
]
OVERLAPPING = [
    tagged({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}),
    tagged({"$ref": "#/$defs/a"}, {"properties": {"t": TEXT}, "required": ["t"]}),
    tagged({"$ref": "#/$defs/o"}, {**OBJECT, "properties": {"t": {"const": "b"}}}),
    tagged({"$ref": "#/$defs/u"}, {"properties": {"t": {"const": "b"}}, "required": ["t"]}),
    tagged({"$ref": "#/$defs/x"}, {**OBJECT, "patternProperties": {"^y": {}}, "additionalProperties": False}),
    {"oneOf": [{"enum": [1]}, {"enum": [1.0, 2]}]},
    {"oneOf": [{"enum": [[1, {"a": 2}]]}, {"const": [1.0, {"a": 2.0}]}]},
    {**INTEGER, "oneOf": [{"const": 0}, {"enum": [0, 1]}]},
]
AT = "additionalProperties"
REFUSED: list[tuple[Any, str]] = [  # a schema, and the path in the message
    ({"properties": {"a": {"not": INTEGER}}}, ".properties.a.not"),
    ({"type": "array", "items": {"not": {}}, "minItems": 1}, ".items.not"),
    ({"not": {}}, ".not"),
    ({"if": INTEGER, "then": {"minimum": 5}}, ".if"),
    ({"anyOf": [{"type": "any"}]}, ".anyOf.0.type"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    ({"contains": INTEGER}, ".contains"),
    ({"allOf": [{"properties": []}]}, ".allOf.0.properties"),
    ({"required": ["a", 5]}, ".required"),
    ({**closed(a=TEXT), "required": ["b"]}, ".properties.b"),
    (closed(a={"enum": []}), ".properties.a"),
    ({"dependentRequired": {"a": 5}}, ".dependentRequired"),
    ({"propertyNames": {"$ref": "#/none"}}, ".propertyNames.$ref"),
    ({"patternProperties": {"(": {}}}, ".patternProperties"),
    ({"minItems": -1}, ".minItems"),
    ({"maxLength": "5"}, ".maxLength"),
    ({"properties": {"a": 5}}, ".properties.a"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, ".oneOf"),
    ({"$ref": "#/$defs/none"}, ".$ref"),
    ({"$defs": {"x": {"not": INTEGER}}, "$ref": "#/$defs/x"}, ".$defs.x.not"),
    ({"$ref": "http://a/b"}, ".$ref"),
    ({"$dynamicRef": "#a"}, ".$dynamicRef"),
    ({"$ref": "#"}, ""),
    ({"$defs": {"n": ENDLESS}, "$ref": "#/$defs/n"}, ""),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
    ({**OBJECT, AT: {"$ref": "#"}, "minProperties": 1}, ""),
    ({**OBJECT, "minProperties": 2}, ".minProperties"),
    ({**OBJECT, "propertyNames": {"format": "date"}}, ".propertyNames"),
    ({"patternProperties": {"a": INTEGER, "b": TEXT}}, ".patternProperties"),
    ({"pattern": "(?=a)b"}, ".pattern"),
    ({"allOf": [{"properties": {"a": INTEGER}}], "patternProperties": {"^a$": {"minimum": 5}}}, ".patternProperties"),
    ({"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": False}, ".unevaluatedProperties"),
    ({"const": 2**53 + 1}, ".const"),
    ({"enum": [1, {"a": [2**64]}]}, ".enum"),
    ({"const": 1e400}, ".const"),
    ({"const": 0.1234567890123456}, ".const"),
    ({"minimum": 2**60}, ".minimum"),
    ({**INTEGER, "minimum": -(2**63)}, ".minimum"),
    ({"items": {"multipleOf": 0.07}}, ".items.multipleOf"),
    ({"multipleOf": 0}, ".multipleOf"),
    ({"multipleOf": 99991}, ".multipleOf"),
    ({"minimum": 1, "maximum": 2, "multipleOf": 5}, ".multipleOf"),
    ({"const": "\ud800"}, ".const"),
    ({"items": 5}, ".items"),
    ({"properties": {"\ud800": {}}}, ".properties"),
    ({"const": float("nan")}, ".const"),
    ({"minimum": "5"}, ".minimum"),
]


def made(schema: Any) -> grammar.Grammar | None:
    """Return a schema's grammar; None if it is refused, in one line that names no option of another program."""
    try:
        return grammar.json_schema(schema)
    except ValueError as e:
        reason = str(e)
    assert re.fullmatch(r"json_schema(\.[^\n]*)?: [^\n]{5,}", reason)
    assert not re.search(r"coerce|lenient|llguidance|option|json-schema:///", reason)
    return None


def check(schema: Any, found: grammar.Grammar, seed: int) -> None:
    text = random_text(found, seed)
    assert text is None or not errors(schema, text), text


@pytest.mark.parametrize("schema", ACCEPTED, ids=json.dumps)
def test_random_answers_are_valid(schema):
    found = grammar.json_schema(schema)
    for seed in range(WALKS):
        check(schema, found, seed)


@pytest.mark.parametrize("schema", OVERLAPPING, ids=json.dumps)
def test_one_of_schemas_that_may_overlap_is_refused(schema):
    with pytest.raises(ValueError, match=r"^json_schema\.oneOf: the schemas of oneOf may accept the same value"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=repr)
def test_a_refusal_names_the_place(schema, path):
    assert made(schema) is None
    with pytest.raises(ValueError, match=re.escape(f"json_schema{path}: ")):
        grammar.json_schema(schema)


@profile(60)
@given(SCHEMAS, st.integers(0, 2**32))
def test_random_answers_to_random_schemas_are_valid(schema, seed):
    if found := made(schema):
        check(schema, found, seed)


@profile(60)
@given(SCHEMAS, st.integers(0, 2**32))
def test_annotations_anywhere_change_nothing(schema, seed):
    assert made(annotated(schema, random.Random(seed))) == made(schema)


@pytest.mark.parametrize("schema", ACCEPTED, ids=json.dumps)
def test_annotations_of_usual_schemas_change_nothing(schema):
    assert made(annotated(schema, random.Random(5))) == made(schema)


@pytest.mark.parametrize("others", [True, {}, TEXT, {"patternProperties": {"^b": TEXT}}])
def test_a_declared_name_cannot_be_written_again_with_escape_sequences(others):
    more = others if isinstance(others, dict) and "patternProperties" in others else {AT: others}
    found = grammar.json_schema({**OBJECT, "properties": {"a": INTEGER}, **more})
    assert grammars.accepted(found, '{"a":1,"b":"x"}') is None
    for text in ('{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}'):
        assert grammars.accepted(found, text) is not None
