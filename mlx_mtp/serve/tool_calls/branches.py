"""Split a JSON schema into branches of one type each, for values that a format does not write as JSON."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...grammar.keywords import rewritten
from .lark import ANY
from .schema import Schema, kind_of, target_of

ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable", "strict"),
    *("$comment", "$defs", "definitions", "$schema", "$id", "x-guidance"),
}
TYPES = ("string", "null", "boolean", "integer", "number", "array", "object")
# Keywords of each type, those that `Structures`, `TaggedValues` and `Branch.patterns` honour.
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "null": set(),
    "boolean": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
DAY, CLOCK = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])", "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
ZONE, BYTE = (
    r"(?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
    "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
)
LONG_DAYS = "[0-9]{4}-(?:(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
FORMATS = {
    "date": f"(?:{DAY}|{LONG_DAYS})",
    "time": CLOCK + ZONE,
    "date-time": f"(?:{DAY}|{LONG_DAYS})T{CLOCK}{ZONE}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "hostname": rf"{LABEL}(?:\.{LABEL})*",
    "email": rf"[a-zA-Z0-9_+-]+(?:\.[a-zA-Z0-9_+-]+)*@{LABEL}(?:\.{LABEL})+",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[a-zA-Z0-9._~:\/?#@!$&'()*+,;=%-]+",
}


class Branch(NamedTuple):
    """One alternative of a schema. kind: its JSON type. schema: its keywords.

    values: a tuple with the only value that it allows; () if it has no const or enum.
    """

    kind: str
    schema: Schema
    values: tuple[Any, ...] = ()

    def patterns(self) -> list[str]:
        """Return regular expressions; a string of this branch must match each of them as a whole. [] allows any.

        Raises ValueError for a `format` that is not in FORMATS.
        """
        schema, found = self.schema, list[str]()
        if "minLength" in schema or "maxLength" in schema:
            found.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
        if "pattern" in schema:
            found.append(searched(schema["pattern"]))
        if (format := schema.get("format")) is not None:
            if format not in FORMATS:
                raise ValueError(f"format {format!r} is not supported with this model's tool calls")
            found.append(FORMATS[format])
        return found


def branches(schema: Any, root: Schema, depth: int = 8) -> Iterator[Branch]:
    """Yield the alternatives of a schema, each of one type. root: where its `$ref` are resolved.

    oneOf is split as anyOf is, since `call_grammar` refuses one whose schemas could accept the same value.
    Raises ValueError, after the alternatives before, for a schema that cannot be split and an unsupported keyword.
    depth: 1 + the maximum number of nested anyOf, oneOf and allOf.
    """
    schema = {} if schema is True else target_of(schema, root)
    if not isinstance(schema, dict) or not depth:
        raise ValueError(
            "a schema is no object, nests anyOf, oneOf and allOf more than 7 times, "
            "or has an invalid or long chain of $ref"
        )
    keys = set(schema) - ANNOTATIONS
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice not in keys:
            continue
        if (
            keys - {choice}
            or not isinstance(schema[choice], list)
            or (choice == "allOf" and len(schema[choice]) != 1)
        ):
            what = f"{choice} with other keywords, or allOf of several,"
            raise ValueError(f"{what} is not supported with this model's tool calls")
        for each in schema[choice]:
            yield from branches(each, root, depth - 1)
        return
    yield from _typed(schema, keys)


def _typed(schema: Schema, keys: set[str]) -> Iterator[Branch]:
    """Yield the branches of a schema without anyOf, oneOf and allOf: one per type, or per value of const or enum.

    A value that does not fit `type` is left out. Without type, const and enum there is one branch of each JSON type,
    with integer as a part of number. keys: the schema's keywords without annotations. Raises ValueError, after values
    of const or enum, for an unsupported keyword.
    """
    named = schema.get("type", [])
    types = [named] if isinstance(named, str) else list(named)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        for value in values:
            if not types or kind_of(value) in types or (kind_of(value) == "integer" and "number" in types):
                yield Branch(kind_of(value), schema, (value,))
        if others := keys - {"type", "const", "enum"}:
            raise ValueError(f"const or enum with {sorted(others)[0]} is not supported with this model's tool calls")
        return
    types = types or [each for each in TYPES if each != "integer"]
    known = {"type"}.union(*(KEYWORDS.get(each, set()) for each in types))
    if others := keys - known:
        raise ValueError(f"{sorted(others)[0]} is not supported with this model's tool calls")
    for each in TYPES:
        if each in types:
            yield Branch(each, {key: schema[key] for key in schema if key in KEYWORDS[each]})


def searched(pattern: str) -> str:
    """Return a regular expression that matches, as a whole, each text in which a schema's `pattern` is found."""
    return "(?:" + "|".join(_anchored(each) for each in _alternatives(pattern)) + ")"


def _anchored(pattern: str) -> str:
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", pattern)
    inner = pattern[begins : len(pattern) - ends]
    inner = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner)
    return f"{'' if begins else ANY}(?:{inner}){'' if ends else ANY}"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression at its top level."""
    found, depth, inside = [""], 0, False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        depth += (part == "(") - (part == ")") if not inside else 0
        inside = part == "[" or (inside and part != "]")
        if part == "|" and not depth and not inside:
            found.append("")
        else:
            found[-1] += part
    return found


class SchemaDocument:
    """A schema whose parts can be made schemas of their own. root: the schema, where `$ref` of parts are resolved."""

    def __init__(self, root: Schema):
        self.root, self._definition = root, rewritten(root, _rerooted)

    def within(self, schema: Any) -> Schema:
        """Return a part of the document as a schema of its own, with the document in `$defs` if it needs that."""
        schema = {} if schema is True else rewritten(schema, _rerooted)
        if "$ref" not in json.dumps(schema):
            return schema
        return {**schema, "$defs": {"root": self._definition}}


def _rerooted(_: Any, schema: Schema) -> Schema:
    """Return a schema whose `$ref`, if it has one to "#...", refers to "#/$defs/root..."."""
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        return {**schema, "$ref": "#/$defs/root" + reference[1:]}
    return schema
