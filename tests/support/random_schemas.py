"""Strategies of JSON schemas, with and without annotations, and random texts that a grammar allows."""

import json
import random
from decimal import Decimal
from typing import Any

import grammars
import hypothesis.strategies as st
import numpy as np
from jsonschema.validators import validator_for

from mlx_mtp import grammar

END = 256  # of `grammars.byte_tokenizer`
COMMA, CLOSING = ord(","), (END, *b']}"')
NAMES = ("a", "b", "\u00e9", "x-1")
PATTERNS = ("^a$", "^(a|b)$", "^[ab]", "^x-", "", "^[^ab]", "b$")
NUMBERS = st.one_of(
    st.integers(-20, 20),
    st.integers(-120, 120).map(lambda n: n / 100),
    st.sampled_from(
        [2**53, 2**53 + 1, 2**60, 2**63 - 1, -(2**63), 2**64, 10**30, 1e-7, 1e22, 0.1234567890123456, -0.0]
    ),
)
VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from([*NAMES, "\x01", "\U0001f600"]))
VALUES |= st.lists(VALUES, max_size=2) | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2)
ANNOTATIONS: dict[str, Any] = {
    **{"title": "not", "description": "oneOf", "$comment": "x", "default": {"not": {}}, "examples": [{"type": 5}]},
    **{"deprecated": True, "readOnly": True, "writeOnly": False, "example": 5, "xml": {"name": "a"}, "x-order": 3},
    **{"externalDocs": {"url": "u"}, "discriminator": {"propertyName": "a", "mapping": {"a": "#/$defs/n"}}},
    **{"contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {"not": {}}, "strict": True},
    **{"format": "uuid4", "propertyNames": {"type": "string"}, "uniqueItems": False, "if": {"type": "null"}},
    **{"minContains": 3, "$dynamicAnchor": "q", "enumDescriptions": ["a"], "x-guidance": {"lenient": True}},
    **{"markdownDescription": "\ud800", "dependentRequired": {}, "unevaluatedItems": True, "definitions": {"z": {}}},
}


def _sized(names: tuple[str, str], most: int = 3) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({}, optional={name: st.integers(0, most) for name in names})


def _object(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named = st.dictionaries(st.sampled_from(NAMES), schemas, max_size=3)
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": named,
            "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            "additionalProperties": schemas,
            "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), schemas, max_size=2),
            "propertyNames": st.sampled_from([{"pattern": "^x"}, {"maxLength": 2}, {"enum": ["a", "b"]}]),
            "unevaluatedProperties": st.just(False),
            "dependentRequired": st.just({"a": ["b"]}),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
        },
    )


def _array(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    inner = {"items": schemas, "prefixItems": st.lists(schemas, min_size=1, max_size=2), "uniqueItems": st.booleans()}
    found = st.fixed_dictionaries({"type": st.just("array")}, optional=inner)
    return st.builds(dict.__or__, found, _sized(("minItems", "maxItems")))


def _combined(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        *(
            st.lists(schemas, min_size=1, max_size=2).map(lambda each, name=name: {name: each})
            for name in ("allOf", "anyOf")
        ),
        st.builds(
            lambda one, all: {**one, "allOf": all}, schemas.filter(lambda s: isinstance(s, dict)), st.lists(schemas)
        ),
    )


LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LEAVES = st.one_of(
    st.booleans(),
    st.just({}),
    st.builds(
        lambda kind, limits, multiple: {"type": kind, **limits, **multiple},
        st.sampled_from(["integer", "number"]),
        st.dictionaries(st.sampled_from(LIMITS), NUMBERS, max_size=2),
        st.sampled_from([{}, {}, {"multipleOf": 3}, {"multipleOf": 0.01}, {"multipleOf": 0.7}]),
    ),
    _sized(("minLength", "maxLength")).map(lambda sizes: {"type": "string", **sizes}),
    st.sampled_from(["^a*$", "b", "^[0-9]{2}$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(["null", "boolean", ["string", "integer"], ["object", "null"]]).map(lambda kind: {"type": kind}),
    st.just({"$ref": "#/$defs/n"}),
)
PARTS = st.recursive(LEAVES, lambda inner: _object(inner) | _array(inner) | _combined(inner), max_leaves=6)
SCHEMAS = st.builds(
    lambda schema, target: {**schema, "$defs": {"n": target}} if isinstance(schema, dict) else {}, PARTS, PARTS
)


def annotated(schema: Any, draw: random.Random) -> Any:
    """Return a copy of a schema with keywords that have no effect, at random places."""
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs"):
            value = {key: annotated(each, draw) for key, each in value.items()}
        elif name in ("items", "additionalProperties"):
            value = annotated(value, draw)
        elif name in ("allOf", "anyOf", "prefixItems"):
            value = [annotated(each, draw) for each in value]
        found[name] = value
    for name in draw.sample([*ANNOTATIONS], 2):
        found.setdefault(name, ANNOTATIONS[name])
    return found


def random_text(made: grammar.Grammar, seed: int, most: int = 1000) -> str | None:
    """Return a text of random bytes that a grammar allows, commas most of all; None if it is longer than `most`.

    After 40 bytes, those that can end a value are preferred. Raises AssertionError if no byte is allowed.
    """
    parser, draw, found = grammars.compiled_bytes(made), random.Random(seed), bytearray()
    while not parser.is_stopped():
        bits = np.unpackbits(np.frombuffer(parser.compute_bitmask(), np.uint8), bitorder="little")[: END + 1]
        allowed = np.flatnonzero(bits).tolist()
        assert not parser.is_error(), parser.get_error()
        assert allowed, bytes(found)
        liked = [COMMA] if draw.random() < 0.4 else list(CLOSING) if len(found) > 40 and draw.random() < 0.9 else []
        token = draw.choice([each for each in liked if each in allowed] or allowed)
        if token == END:
            break
        found.append(token)
        if len(found) > most:
            return None
        assert parser.consume_token(token)
    assert parser.is_accepting() or parser.is_stopped()
    return found.decode()


def errors(schema: Any, text: str) -> list[str]:
    """Return why a text is no JSON value that fits a schema, with exact numbers; [] if it fits."""
    value, schema = (json.loads(each, parse_float=_number) for each in (text, json.dumps(schema)))
    return [error.message for error in validator_for(schema)(schema).iter_errors(value)]


def _number(text: str) -> Decimal | float:
    exponent = text.lower().partition("e")[2]
    return Decimal(text) if len(exponent) < 5 else float(text)
