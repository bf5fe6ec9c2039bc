"""Find the schemas that no finite JSON value fits, because each value would contain another one without end."""

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, NamedTuple

from .keywords import LISTS, NAMED, ONE, rewritten

MOST_WAYS = 256  # ways to choose among the alternatives of one schema
MOST_STEPS = 100_000  # schemas of which the ways are listed
SCALARS = {"null", "boolean", "number", "integer", "string"}
TYPES = SCALARS | {"array", "object"}


class Alternative(NamedTuple):
    """One choice among the alternatives of a schema. types: the types that it allows. parts: the schemas in it."""

    types: frozenset[str]
    parts: tuple[Mapping[str, Any], ...]


def without_endless(root: dict[str, Any]) -> Any:
    """Return a document in which each schema that no finite value fits is false; `$ref` are "#" or "#/$defs/...".

    What two schemas require of the same member, or of the same items, together is judged one by one.
    """
    found = _Finite(root)
    found.solve(root)
    return found.pruned(root)


class _Finite:
    """The schemas of a document that are known to have a finite value, by `id`; others are assumed to have none."""

    def __init__(self, root: dict[str, Any]):
        self._root, self._known, self._steps = root, set[int](), 0

    def solve(self, root: Any) -> None:
        """Find all, beginning with the innermost ones, until nothing changes."""
        nodes, size = [*_nodes(root)][::-1], -1
        while size < len(self._known):
            size = len(self._known)
            self._known |= {id(node) for node in nodes if id(node) not in self._known and self._has_value(node)}

    def pruned(self, schema: Any) -> Any:
        return rewritten(schema, lambda given, found: found if id(given) in self._known else False)

    def _fits(self, schema: Any) -> bool:
        return id(schema) in self._known if isinstance(schema, Mapping) else schema is not False

    def _has_value(self, schema: Mapping[str, Any]) -> bool:
        ways = [*islice(self._ways(schema, ()), MOST_WAYS)]
        return len(ways) == MOST_WAYS or any(self._is_finite(way) for way in ways)

    def _is_finite(self, way: Alternative) -> bool:
        if way.types & SCALARS:
            return True
        return ("object" in way.types and all(map(self._has_object, way.parts))) or (
            "array" in way.types and all(map(self._has_array, way.parts))
        )

    def _has_object(self, part: Mapping[str, Any]) -> bool:
        properties, others = part.get("properties") or {}, part.get("additionalProperties", True)
        patterns = part.get("patternProperties") or {}
        required = part.get("required") or []
        if not all(self._fits(properties[name]) for name in required if name in properties):
            return False
        if not patterns and not self._fits(others) and not {*required} <= {*properties}:
            return False
        free = part.get("minProperties", 0) > 0 and not required
        return not free or any(map(self._fits, (others, *properties.values(), *patterns.values())))

    def _has_array(self, part: Mapping[str, Any]) -> bool:
        first, least = part.get("prefixItems") or [], part.get("minItems", 0)
        return all(map(self._fits, first[:least])) and (least <= len(first) or self._fits(part.get("items", True)))

    def _ways(self, schema: Any, seen: tuple[int, ...]) -> Iterator[Alternative]:
        """Yield the ways of a schema; none for one that refers to itself in place. seen: `id`s of schemas around."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ValueError(": references and alternatives are combined in too many ways")
        if schema is False or id(schema) in seen:
            return
        if not isinstance(schema, Mapping):
            yield Alternative(frozenset(TYPES), ())
            return
        seen = (*seen, id(schema))
        types = schema.get("type", [*TYPES])
        types = {types} if isinstance(types, str) else {*types}
        own = Alternative(frozenset(types | {"integer"} if "number" in types else types), (schema,))
        groups = [[each] for each in schema.get("allOf", [])]
        groups += [schema[name] for name in ("anyOf", "oneOf") if name in schema]
        groups += [[self._target(schema["$ref"])]] if "$ref" in schema else []
        ways = ([*islice(self._each(group, seen), MOST_WAYS)] for group in groups)
        for chosen in product([own], *ways):
            types = frozenset.intersection(*(way.types for way in chosen))
            yield Alternative(types, tuple(part for way in chosen for part in way.parts))

    def _each(self, group: list[Any], seen: tuple[int, ...]) -> Iterator[Alternative]:
        for schema in group:
            yield from self._ways(schema, seen)

    def _target(self, reference: str) -> Any:
        return self._root if reference == "#" else self._root["$defs"][reference.removeprefix("#/$defs/")]


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each schema of a document that is an object, the outer ones first."""
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            yield each
            pending += [each[name] for name in ONE if name in each]
            pending += [value for name in LISTS for value in each.get(name, [])]
            pending += [value for name in NAMED for value in each.get(name, {}).values()]
