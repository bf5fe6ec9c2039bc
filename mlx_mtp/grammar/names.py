"""Write what a schema states about the names of an object's members, so that llguidance enforces it exactly."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from .keywords import is_any, rewritten
from .library import llguidance

MOST_SHOWN = 80
NO_NUMBERED_ESCAPES = 'nrbtf\\"'  # letters of escape sequences without u


def write_names(schema: dict[str, Any], path: str) -> None:
    """Replace `propertyNames` and unusable `patternProperties` in a schema, which is changed.

    Raises ValueError, with the keyword's path, for a schema of names or a number of members that is not supported.
    """
    if "propertyNames" in schema:
        _write_property_names(schema, path)
    if schema.get("patternProperties"):
        _write_patterns(schema, path)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        required, properties = schema.get("required", ()), schema.get("properties", {})
        kept = {name: each for name, each in properties.items() if each is not False or name in required}
        schema |= {"properties": kept} if kept != properties else {}
    named = len({*schema.get("required", ())})
    if schema.get("minProperties", 0) - named > 1 and _is_open(schema):
        allowed = f"allowed are at most {named + 1}, one more than `required`, where other names are free"
        raise ValueError(f"{path}.minProperties: a name could be written twice; {allowed}")


def unaliased(root: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a document in which no other member can have a declared name written with escape sequences.

    The second value is whether this also needs that the answer contains no escape sequences with numbers, such as
    those of control characters. root: in the form of `equivalent`. Raises ValueError if a name or constant has some.
    """
    objects = [each for each in _objects(root) if {"properties", "required", "patternProperties"} & {*each}]
    open = [each for each in objects if _is_open(each)]
    patterns = any("patternProperties" in each for each in objects)
    if not patterns and all(each.get("additionalProperties", True) in (True, {}) for each in open):
        return rewritten(root, _with_pattern), False
    escapes = bool(open) and any(each.get("additionalProperties") is not False for each in objects)
    if escapes and "\\u00" in _literals(root):
        raise ValueError(": names or constants with control characters next to members with free names")
    return root, escapes


def _is_open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))


def _objects(schema: Any) -> Iterable[Mapping[str, Any]]:
    """Yield each object in a document: its schemas, and others."""
    if isinstance(schema, list):
        for each in schema:
            yield from _objects(each)
    elif isinstance(schema, Mapping):
        yield schema
        for each in schema.values():
            yield from _objects(each)


def _literals(schema: Any) -> str:
    """Return the names and constants of a document as JSON."""
    found = [schema] if isinstance(schema, str) else []
    for each in _objects(schema):
        found += [each.get("const"), each.get("enum"), each.get("required"), *(each.get("properties") or ())]
    return json.dumps(found, ensure_ascii=False)


def _with_pattern(_: Mapping[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which an open object states its other members by a pattern that fits each name."""
    if (schema.get("properties") or schema.get("required")) and _is_open(schema):
        schema |= {"patternProperties": {"": True}, "additionalProperties": False}
    return schema


def _write_property_names(schema: dict[str, Any], path: str) -> None:
    """Replace `propertyNames`, of which nothing but keywords of strings is left, by other keywords."""
    names, others = schema.pop("propertyNames"), schema.get("additionalProperties", True)
    path = f"{path}.propertyNames"
    if names is False:
        schema["maxProperties"] = 0
        return
    if is_any(names):
        return
    if schema.get("patternProperties") or {*names} - {"minLength", "maxLength", "pattern", "const", "enum"}:
        raise ValueError(f"{path}: supported are enum, const, pattern, minLength and maxLength, no patternProperties")
    properties = dict(schema.get("properties", {}))
    if "const" in names or "enum" in names:
        if len(names) > 1:
            raise ValueError(f"{path}: enum or const with other keywords is not supported")
        values = [names["const"]] if "const" in names else names["enum"]
        free = {name: others for name in values if isinstance(name, str)}
        closed = {name: False for name in [*properties, *schema.get("required", ())] if name not in free}
        schema["properties"] = {**free, **properties, **closed}
    elif properties or schema.get("required") or ("pattern" in names and len(names) > 1):
        what = "next to properties or required, or a pattern with a length,"
        raise ValueError(f"{path}: {what} is not supported")
    else:
        length = f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
        schema["patternProperties"] = {names.get("pattern", length): others}
    schema["additionalProperties"] = False


def _write_patterns(schema: dict[str, Any], path: str) -> None:
    """Drop patterns that fit declared names only, and `additionalProperties` if the patterns fit all other names.

    Otherwise llguidance would allow a comma after which no name can follow.
    """
    patterns, properties = dict(schema["patternProperties"]), dict(schema.get("properties", {}))
    names = tuple(dict.fromkeys([*properties, *schema.get("required", ())]))
    for pattern, value in schema["patternProperties"].items():
        if _any_name(names, (pattern,), others=False, path=path):
            continue
        del patterns[pattern]
        for name in names:
            if _is_schema({"type": "string", "const": name, "pattern": pattern}):
                properties[name] = {"allOf": [properties[name], value]} if name in properties else value
    if patterns and any(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref")):
        for pattern in patterns:
            if not _is_schema({"type": "string", "pattern": pattern, "minLength": 500}):  # fits few names
                what = (
                    f"/{pattern[:MOST_SHOWN]}/ fits few names, which is not supported next to allOf, anyOf and $ref"
                )
                raise ValueError(f"{path}.patternProperties: {what}")
    schema |= {"patternProperties": patterns, **({"properties": properties} if properties else {})}
    if patterns and not _any_name(names, tuple(patterns), others=True, path=path):
        schema["additionalProperties"] = False


def _any_name(names: tuple[str, ...], patterns: tuple[str, ...], *, others: bool, path: str) -> bool:
    """Return whether a name is left besides `names`: of those that fit a pattern or, with `others`, that fit none.

    Raises ValueError if llguidance does not support the patterns.
    """
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": dict.fromkeys(patterns, not others),
        "additionalProperties": others,
        "minProperties": 1,
    }
    return _has_member(json.dumps(schema), path)


def _has_member(schema: str, path: str) -> bool:
    """Return whether an object that fits a schema's JSON can have a member."""
    library = llguidance()
    options = {"whitespace_flexible": False, "json_allowed_escapes": NO_NUMBERED_ESCAPES}
    grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    parser = library.LLMatcher(_byte_tokens(), grammar, limits=library.limits, log_level=0)
    if parser.is_error():
        reason = parser.get_error().strip().partition("\n")[0].replace("regex parse error:", "no supported pattern")
        raise ValueError(f"{path}.patternProperties: {reason}")
    opened = parser.try_consume_tokens([ord("{")])
    return bool(opened) and bool(parser.compute_bitmask()[ord('"') // 8] >> ord('"') % 8 & 1)


@cache
def _byte_tokens() -> Any:
    return llguidance().LLTokenizer("byte")


def _is_schema(schema: dict[str, Any]) -> bool:
    """Return whether llguidance finds a value for a schema, or cannot find out."""
    library = llguidance()
    grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    error = library.LLMatcher.validate_grammar(grammar, limits=library.limits)
    return not error or "Unable to determine" in error
