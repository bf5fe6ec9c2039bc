"""Find the targets of a document's `$ref`, the members that a schema evaluates, and the paths of keywords."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

DATA = ("const", "enum", "default", "examples", "example")  # keywords whose values are no schemas
ANCHORS = ("$anchor", "$dynamicAnchor")
ROOT = ""  # URI of a document without $id

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # objects of schemas, by name
COMMON = ("type", "pattern", "properties", "items", "required")  # keywords that are also words of messages
TEXTS = ("title", "description", "$comment")
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object", True, False)
VALUES = ("const", "enum", "default", "examples")  # JSON values, not schemas

# Keywords under which it depends on the value what is evaluated.
UNKNOWN = ("if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "not")


class References:
    """The schemas of a document by their URIs."""

    def __init__(self, root: Mapping[str, Any]):
        self._resources: dict[str, Any] = {ROOT: root}
        self._anchors: dict[str, tuple[Any, str]] = {}
        for schema, base in _schemas(root):
            self._resources.setdefault(base, schema)
            for name in ANCHORS:
                self._anchors.setdefault(f"{base}#{schema.get(name)}", (schema, base))

    def target(self, reference: Any, base: str) -> tuple[Any, str, str]:
        """Return (schema, its base URI, its name) for a `$ref` in a schema with the URI `base`.

        Raises ValueError for a reference that is no text or leads out of the document.
        """
        if not isinstance(reference, str):
            raise ValueError(f"{repr(reference)[:80]} is no reference")
        uri, fragment = urldefrag(reference if reference.startswith("#") else urljoin(base, reference))
        uri = uri or base
        name = unquote(fragment)
        if f"{uri}#{name}" in self._anchors:
            return *self._anchors[f"{uri}#{name}"], name
        try:
            found, base = self._resources[uri], uri
            if name and not name.startswith("/"):
                raise KeyError(name)
            for part in name.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
                base = base_of(found, base)
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"{reference[:80]!r} leads to no schema of this document; none is fetched") from None
        return found, base, name.rpartition("/")[2] or "root"


def base_of(schema: Any, base: str) -> str:
    """Return the URI to which the references in a schema are relative. base: that of the schema around it."""
    own = schema.get("$id") if isinstance(schema, Mapping) else None
    return urldefrag(urljoin(base, own))[0] if isinstance(own, str) else base


def _schemas(root: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (object, its base URI) for each object of a document that may be a schema."""
    pending = [(root, ROOT)]
    while pending:
        each, base = pending.pop()
        if isinstance(each, Mapping):
            base = base_of(each, base)
            yield each, base
            pending += [(value, base) for name, value in each.items() if name not in DATA]
        elif isinstance(each, list):
            pending += [(value, base) for value in each]


def keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, name, value) of each keyword of a schema and of the schemas in it, a schema's own keywords first.

    path: such as ".properties.a.type" or ".anyOf.0.type".
    """
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        path, each = pending.pop()
        if isinstance(each, list):
            pending += [(f"{path}.{i}", inner) for i, inner in enumerate(each)][::-1]
        for name, value in each.items() if isinstance(each, dict) else ():
            yield f"{path}.{name}", name, value
            if name in NAMED and isinstance(value, dict):
                pending += [(f"{path}.{name}.{inner}", found) for inner, found in value.items()][::-1]
            elif name not in VALUES:
                pending.append((f"{path}.{name}", value))


def path_in(schema: Any, message: str) -> str:
    """Return the path, with a dot before it, of the keyword that a message probably refers to; "" if none is found.

    That is the first keyword whose value, a text or integer of more than three characters, appears in the message,
    else the first whose name is a word of the message. Values of TEXTS and those in TYPES do not count; names in
    COMMON count only as the message's first word or in quotes.
    """
    if unsatisfiable := re.search(r"property '(.+)' is unsatisfiable", message):
        wanted = f".properties.{unsatisfiable[1]}"
        found = [*keywords(schema)]
        paths = [path[: path.index(wanted)] + wanted for path, *_ in found if f"{wanted}." in f"{path}."]
        lists = [path for path, name, value in found if name == "required" and unsatisfiable[1] in value]
        return next(iter([*paths, *lists]), "")
    (first, *words), named = re.findall(r"[\w$]+", message) or [""], ""
    words = {*words} - {*COMMON} | {first, *re.findall(r"[\"'](\w+)[\"']", message)}
    for path, name, value in keywords(schema):
        if name not in TEXTS and isinstance(value, str | int) and value not in TYPES:
            text = str(value).removeprefix("#")
            if len(text) > 3 and text in message:
                return path
        if not named and name in words:
            named = path
    return named


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
