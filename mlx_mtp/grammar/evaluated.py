"""Find the members that a schema evaluates, which `unevaluatedProperties` around it does not concern."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .references import References, base_of

# Keywords under which it depends on the value what is evaluated.
UNKNOWN = ("if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "not")


class Evaluated(NamedTuple):
    """Members of objects. names: theirs. patterns: of their names. all: every member is evaluated."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all: bool = False


def evaluated(schema: Any, base: str, references: References, seen: tuple[int, ...] = ()) -> Evaluated | None:
    """Return the members that a schema evaluates whatever the value is; None if that depends on the value.

    base: the schema's base URI. seen: `id`s of the schemas around it in place.
    """
    if not isinstance(schema, Mapping):
        return Evaluated()
    if id(schema) in seen or any(name in schema for name in UNKNOWN):
        return None
    seen, base = (*seen, id(schema)), base_of(schema, base)
    own = Evaluated(
        tuple(schema.get("properties") or ()),
        tuple(schema.get("patternProperties") or ()),
        "additionalProperties" in schema or ("unevaluatedProperties" in schema and bool(seen[1:])),
    )
    parts = [evaluated(each, base, references, seen) for each in schema.get("allOf") or ()]
    if "$ref" in schema:
        target, other, _ = references.target(schema["$ref"], base)
        parts.append(evaluated(target, other, references, seen))
    for name in ("anyOf", "oneOf"):
        branches = [evaluated(each, base, references, seen) for each in schema.get(name) or ()]
        parts += [branches[0] if len({*branches}) == 1 else None] if branches else []
    return _joined([own, *parts])


def _joined(parts: Iterable[Evaluated | None]) -> Evaluated | None:
    found = Evaluated()
    for each in parts:
        if each is None:
            return None
        names, patterns = (tuple(dict.fromkeys(a + b)) for a, b in zip(found[:2], each[:2], strict=True))
        found = Evaluated(names, patterns, found.all or each.all)
    return found
