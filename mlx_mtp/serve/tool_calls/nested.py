"""Read argument values whose objects and lists are nested tags: `<key>...</key>`, and `<item>` in lists."""

from collections.abc import Iterator
from typing import NamedTuple

import regex

from .schema import Schema, alternatives, dumps, types_of, untyped_as_json

ITEM = "item"
# Bounds on the work for a hostile answer: depth of nesting, and values that the search tries.
DEEPEST, MOST_STEPS = 40, 5000


class Position(NamedTuple):
    """A position in the text of a list or an object, with the members before it as JSON and their keys."""

    at: int
    members: tuple[str, ...]
    keys: frozenset[str]


class NestedValues:
    """Converts values with nested tags to JSON. mark: precedes every tag. root: where `$ref` is resolved."""

    def __init__(self, mark: str, root: Schema):
        self._mark, self._root, self._steps = mark, root, 0
        self._begin = regex.compile(rf"{regex.escape(mark)}<(?P<key>[^<>/]+)>")

    def as_json(self, text: str, schema: Schema | None, depth: int = 0) -> str:
        """Return the JSON of a value: a list or an object if its tags form one that the schema allows, else a scalar.

        A scalar is a string if the schema allows only that, otherwise as `untyped_as_json` converts it. If the tags
        have several readings, the one with the shortest values counts. "" is an empty list or object if the schema
        allows that and no string. schema: None allows any type. depth: number of lists and objects around the value.
        """
        types = types_of(schema, self._root)
        self._steps += 1
        if (not types or types & {"array", "object"}) and depth < DEEPEST and text.startswith(self._mark):
            kinds = [kind for kind in ("array", "object") if not types or kind in types]
            found = next((json for kind in kinds if (json := self._container(text, kind, schema, depth))), None)
            if found is not None:
                return found
        if not text and types & {"array", "object"} and "string" not in types:
            return "[]" if "array" in types else "{}"
        return dumps(text) if types == {"string"} else untyped_as_json(text, types)

    def _container(self, text: str, kind: str, schema: Schema | None, depth: int) -> str | None:
        """Return the JSON of the list or object that the whole text is; None if none is found within MOST_STEPS.

        kind: "array" or "object". schema, depth: as in `as_json`.
        """
        seen: set[tuple[int, frozenset[str]]] = set()
        stack = [iter([Position(0, (), frozenset())])]
        while stack and self._steps < MOST_STEPS:
            if (position := next(stack[-1], None)) is None:
                stack.pop()
            elif position.at == len(text):
                members = ", ".join(position.members)
                return f"[{members}]" if kind == "array" else f"{{{members}}}"
            elif (position.at, position.keys) not in seen:
                seen.add((position.at, position.keys))
                stack.append(self._following(text, position, kind, schema, depth))
        return None

    def _following(
        self, text: str, position: Position, kind: str, schema: Schema | None, depth: int
    ) -> Iterator[Position]:
        """Yield the position after the next `<key>...</key>`, once for each closing tag that may end it.

        The nearest tag comes first. kind: "array", whose members are all `<item>...</item>`, or "object". Without
        a next member, yield nothing.
        """
        begin = self._begin.match(text, position.at)
        key = begin["key"] if begin else ""
        if not begin or (key != ITEM if kind == "array" else key in position.keys):
            return
        inner = _inner(schema, kind, key, self._root)
        close = f"{self._mark}</{key}>"
        end = text.find(close, begin.end())
        while end >= 0 and self._steps < MOST_STEPS:
            after = end + len(close)
            if after == len(text) or text.startswith(self._mark, after):
                value = self.as_json(text[begin.end() : end], inner, depth + 1)
                member = value if kind == "array" else f"{dumps(key)}: {value}"
                keys = position.keys if kind == "array" else position.keys | {key}
                yield Position(after, (*position.members, member), keys)
            end = text.find(close, end + 1)


def _inner(schema: Schema | None, kind: str, key: str, root: Schema) -> Schema | None:
    """Return the schema of a list's items or of an object's member `key`; None if the schema does not state it."""
    for each in alternatives(schema, root):
        properties = each.get("properties")
        found = each.get("items") if kind == "array" else each.get("additionalProperties")
        if kind == "object" and isinstance(properties, dict):
            found = properties.get(key, found)
        if isinstance(found, dict):
            return found
    return None
