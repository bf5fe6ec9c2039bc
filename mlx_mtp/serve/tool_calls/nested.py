"""Read values whose objects and lists are written as tags inside tags: `<key>...</key>`, and `<item>` in lists."""

from collections.abc import Iterator
from typing import NamedTuple

import regex

from .schema import Schema, Tools, alternatives, dumps, types_of, untyped_as_json

ITEM = "item"
# These bound the time that a hostile answer takes: tags inside tags, and ends of values that are tried.
DEEPEST, MOST_STEPS = 40, 5000


class Position(NamedTuple):
    """A position in a container's text, the members before it as JSON, and their keys."""

    at: int
    members: tuple[str, ...]
    keys: frozenset[str]


class NestedValues:
    """The JSON of texts with tags. mark: stands in front of every tag. root: the schema with the `$defs`."""

    def __init__(self, mark: str, root: Schema):
        self._mark, self._root, self._steps = mark, root, 0
        self._begin = regex.compile(rf"{regex.escape(mark)}<(?P<key>[^<>/]+)>")

    def as_json(self, text: str, schema: Schema | None, depth: int = 0) -> str:
        """The JSON of a value of this schema: a list or an object where the text has the tags of one, else a scalar.

        Of all ways to read the tags the first one counts in which values are as short as possible.
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
        """The JSON of a list or an object that takes up the whole text; None where the tags are no such one."""
        seen: set[tuple[int, frozenset[str]]] = set()
        stack = [iter([Position(0, (), frozenset())])]
        while stack and self._steps < MOST_STEPS:
            if (place := next(stack[-1], None)) is None:
                stack.pop()
            elif place.at == len(text):
                return f"[{', '.join(place.members)}]" if kind == "array" else f"{{{', '.join(place.members)}}}"
            elif (place.at, place.keys) not in seen:
                seen.add((place.at, place.keys))
                stack.append(self._following(text, place, kind, schema, depth))
        return None

    def _following(
        self, text: str, place: Position, kind: str, schema: Schema | None, depth: int
    ) -> Iterator[Position]:
        """The positions behind the next member, the shortest value first."""
        begin = self._begin.match(text, place.at)
        key = begin["key"] if begin else ""
        if not begin or (key != ITEM if kind == "array" else key in place.keys):
            return
        inner = _inner(schema, kind, key, self._root)
        close = f"{self._mark}</{key}>"
        end = text.find(close, begin.end())
        while end >= 0 and self._steps < MOST_STEPS:
            behind = end + len(close)
            if behind == len(text) or text.startswith(self._mark, behind):
                value = self.as_json(text[begin.end() : end], inner, depth + 1)
                member = value if kind == "array" else f"{dumps(key)}: {value}"
                keys = place.keys if kind == "array" else place.keys | {key}
                yield Position(behind, (*place.members, member), keys)
            end = text.find(close, end + 1)


def nested_json(text: str, tools: Tools, name: str, key: str, mark: str) -> str:
    """The JSON of a parameter of a function that was offered."""
    root = tools.parameters(name)
    return NestedValues(mark, root).as_json(text, tools.properties(name).get(key))


def _inner(schema: Schema | None, kind: str, key: str, root: Schema) -> Schema | None:
    """The schema of a list's items or of an object's member; None where it states none."""
    for each in alternatives(schema, root):
        properties = each.get("properties")
        found = each.get("items") if kind == "array" else each.get("additionalProperties")
        if kind == "object" and isinstance(properties, dict):
            found = properties.get(key, found)
        if isinstance(found, dict):
            return found
    return None
