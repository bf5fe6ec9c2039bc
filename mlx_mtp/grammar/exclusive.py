"""Prove that the schemas of a `oneOf` exclude each other, so that it accepts the same values as an `anyOf`."""

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations, product
from typing import Any, NamedTuple

from .references import References, base_of

# A number is of one of two types, as an integer is one of type `number` too.
TYPES = {"number": ("integer", "fraction"), "integer": ("integer",)}
EVERY = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
DEEPEST = 4  # nesting of members that are compared
MOST_SHAPES = 64  # alternatives of one schema
MOST_PAIRS = 20_000  # comparisons per `oneOf`

Located = tuple[Any, str]  # a schema and its base URI


class Shape(NamedTuple):
    """What is known of the values that one alternative of a schema accepts.

    values: the only ones, in the form of `_key`. members: the schemas of an object's members. closed: names of the
    only members.
    """

    types: frozenset[str] = EVERY
    values: frozenset[str] | None = None
    members: Mapping[str, tuple[Located, ...]] = {}
    required: frozenset[str] = frozenset()
    closed: frozenset[str] | None = None

    def both(self, other: "Shape") -> "Shape":
        """Return the shape of the values that have both shapes."""
        members = {
            name: self.members.get(name, ()) + other.members.get(name, ())
            for name in {**self.members, **other.members}
        }
        return Shape(
            self.types & other.types,
            _common(self.values, other.values),
            members,
            self.required | other.required,
            _common(self.closed, other.closed),
        )


class Exclusion:
    """Compares schemas of a document; `proven` is bounded by MOST_PAIRS."""

    def __init__(self, references: References):
        self._references, self._left = references, MOST_PAIRS

    def proven(self, schemas: list[Any], base: str) -> bool:
        """Return whether no value fits two of the schemas; False also if this is not found out."""
        shapes = [self._shapes((each, base)) for each in schemas]
        return all(self._exclude(*pair, DEEPEST) for pair in combinations(shapes, 2))

    def _exclude(self, one: list[Shape], other: list[Shape], depth: int) -> bool:
        return all(self._apart(*pair, depth) for pair in product(one, other))

    def _apart(self, one: Shape, other: Shape, depth: int) -> bool:
        """Return whether no value has both shapes."""
        self._left -= 1
        both = one.both(other)
        if self._left < 0:
            return False
        if not both.types or (both.values is not None and not any(_type(each) in both.types for each in both.values)):
            return True
        if both.types != {"object"} or not depth:
            return False
        if both.closed is not None and both.required - both.closed:
            return True
        return any(
            self._exclude(self._all(one.members[name]), self._all(other.members[name]), depth - 1)
            for name in both.required
            if name in one.members and name in other.members
        )

    def _all(self, schemas: tuple[Located, ...]) -> list[Shape]:
        return _products([self._shapes(each) for each in schemas])

    def _shapes(self, located: Located, seen: tuple[int, ...] = ()) -> list[Shape]:
        """Return shapes such that each value which fits a schema has one. seen: `id`s of the schemas around it."""
        schema, base = located
        if schema is False:
            return []
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return [Shape()]
        seen, base = (*seen, id(schema)), base_of(schema, base)
        parts = [[_own(schema, base)]]
        if "$ref" in schema:
            with suppress(ValueError):  # reported where the reference is written
                parts.append(self._shapes(self._references.target(schema["$ref"], base)[:2], seen))
        parts += [self._shapes((each, base), seen) for each in schema.get("allOf") or ()]
        for name in ("anyOf", "oneOf"):
            if name in schema:
                parts.append([shape for each in schema[name] for shape in self._shapes((each, base), seen)])
        return _products(parts)


def _own(schema: Mapping[str, Any], base: str) -> Shape:
    """Return the shape that a schema's own keywords state."""
    stated = schema.get("type", [*EVERY])
    types = frozenset(
        t for each in ([stated] if isinstance(stated, str) else stated) for t in TYPES.get(each, (each,))
    )
    lists = [[schema["const"]]] if "const" in schema else []
    lists += [schema["enum"]] if "enum" in schema else []
    values = None
    for each in lists:
        values = _common(values, frozenset(map(_key, each)))
    members = schema.get("properties") or {}
    closed = frozenset(members) if schema.get("additionalProperties") is False else None
    return Shape(
        types,
        values,
        {name: ((each, base),) for name, each in members.items()},
        frozenset(schema.get("required") or ()),
        None if schema.get("patternProperties") else closed,
    )


def _products(parts: list[list[Shape]]) -> list[Shape]:
    """Return the shapes of values that have a shape of each part."""
    found = [Shape()]
    for part in parts:
        if len(found) * len(part) <= MOST_SHAPES:  # otherwise the part's are not used: fewer are excluded
            found = [one.both(other) for one, other in product(found, part)]
    return found


def _common(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return other if one is None else one if other is None else one & other


def _key(value: Any) -> str:
    """Return a text that is the same for equal JSON values only, and for 1 and 1.0."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {name: _whole(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _type(key: str) -> str:
    value = json.loads(key)
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    names = {int: "integer", float: "fraction", str: "string", list: "array", dict: "object"}
    return names[type(value)]
