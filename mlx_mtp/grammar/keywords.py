"""Drop the keywords of one JSON schema that have no effect, and write some with others that llguidance supports."""

from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Formats that llguidance enforces; in JSON Schema others are annotations.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
COUNTS = ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties")
COUNTS += ("maxContains", "minContains")
# Keywords of one type that may be dropped where the type is not allowed.
OF_TYPE = {
    "string": ("format",),
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": ("propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
}
UNSUPPORTED = ("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains")
UNSUPPORTED += ("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies")
UNSUPPORTED += ("$dynamicRef", "$recursiveRef")
# Keywords with one schema, with a list, and with schemas by name, in the form of `equivalent`.
ONE = ("items", "additionalProperties")
LISTS, NAMED = ("allOf", "anyOf", "oneOf", "prefixItems"), ("properties", "patternProperties", "$defs")
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")


def rewritten(schema: Any, change: Callable[[Mapping[str, Any], dict[str, Any]], Any]) -> Any:
    """Return a schema in the form of `equivalent` in which `change` has replaced each schema, the inner ones first.

    change: receives a given schema, and a copy of it with the changed schemas inside. Other values stay.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in ONE:
            found[name] = rewritten(value, change)
        elif name in LISTS and isinstance(value, list):
            found[name] = [rewritten(each, change) for each in value]
        elif name in NAMED and isinstance(value, Mapping):
            found[name] = {key: rewritten(each, change) for key, each in value.items()}
    return change(schema, found)


def is_any(schema: Any) -> bool:
    """Return whether a schema is true or {}."""
    return schema is True or (isinstance(schema, Mapping) and not schema)


def write_keywords(schema: dict[str, Any], path: str) -> None:
    """Write a schema, whose subschemas are written already, with supported keywords; it is changed.

    Raises ValueError, with the path, for a `type` that does not exist.
    """
    types = schema.get("type", [*TYPES])
    types = types if isinstance(types, list) else [types]
    for each in types:
        if each not in TYPES:
            raise ValueError(f"{path}.type: {repr(each)[:80]} is no type of JSON; allowed are {', '.join(TYPES)}")
    for each, names in OF_TYPE.items():
        if each not in types:
            _drop(schema, *names)
    for name in COUNTS:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
            raise ValueError(f"{path}.{name}: {repr(value)[:80]}; allowed are integers from 0")
        if name in schema:
            schema[name] = int(value)
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    if schema.get("not") is False:
        del schema["not"]
    _write_older_drafts(schema)
    _drop_conditions(schema)
    _write_contains(schema)
    _write_unevaluated_items(schema)
    _write_unique_items(schema)
    _write_dependencies(schema)


def contradiction(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (a path, what is required there) if a schema of objects or of arrays requires what it does not allow."""
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    others = True if schema.get("patternProperties") else others
    if schema.get("type") == "object":
        for name in schema.get("required", ()):
            if properties.get(name, others) is False:
                return f".properties.{name}", f"no value is allowed for {name[:80]!r}, which is required"
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    if schema.get("type") == "array" and schema.get("items") is False and least > len(first):
        return ".items", f"no value is allowed for an item, of which at least {least} are required"
    return None


def _drop(schema: dict[str, Any], *names: str) -> None:
    for name in names:
        schema.pop(name, None)


def _write_older_drafts(schema: dict[str, Any]) -> None:
    """Write lists of `items`, and `exclusiveMinimum` that is true or false, as draft 2020-12 does."""
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    _drop(schema, "additionalItems")
    for name, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(exclusive := schema.get(name), bool):
            del schema[name]
            if exclusive and limit in schema:
                schema[name] = schema.pop(limit)


def _drop_conditions(schema: dict[str, Any]) -> None:
    """Drop `if` without `then` and `else` that state anything, and these without `if`."""
    for name in ("then", "else"):
        if "if" not in schema or is_any(schema.get(name)):
            _drop(schema, name)
    if "then" not in schema and "else" not in schema:
        _drop(schema, "if")


def _write_contains(schema: dict[str, Any]) -> None:
    """Drop the counts without `contains`, and `contains` without effect; with any items it is a number of items."""
    if "contains" not in schema:
        _drop(schema, "minContains", "maxContains")
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        _drop(schema, "contains", "minContains")
    elif is_any(schema["contains"]):
        least = max(schema.get("minItems", 0), schema.get("minContains", 1))
        most = [schema[name] for name in ("maxItems", "maxContains") if name in schema]
        schema |= {"minItems": least, **({"maxItems": min(most)} if most else {})}
        _drop(schema, "contains", "minContains", "maxContains")


def _write_unique_items(schema: dict[str, Any]) -> None:
    """Drop `uniqueItems` if it is false, or of at most one item; with one possible value there is at most one."""
    if "uniqueItems" not in schema:
        return
    items, first = schema.get("items", True), schema.get("prefixItems", [])
    single = isinstance(items, Mapping) and ("const" in items or len(items.get("enum", ())) == 1)
    if schema["uniqueItems"] is True and single and not first:
        schema["maxItems"] = min(schema.get("maxItems", 1), 1)
    most = min(schema.get("maxItems", 2), len(first) if items is False else 2)
    if schema["uniqueItems"] is False or most <= 1:
        del schema["uniqueItems"]


def _write_unevaluated_items(schema: dict[str, Any]) -> None:
    """Drop `unevaluatedItems` if each item is evaluated; write it as `items` if no other schema evaluates any."""
    if is_any(schema.get("unevaluatedItems")) or "items" in schema:
        _drop(schema, "unevaluatedItems")
    elif "unevaluatedItems" in schema and not any(name in schema for name in (*IN_PLACE, "contains")):
        schema["items"] = schema.pop("unevaluatedItems")


def _write_dependencies(schema: dict[str, Any]) -> None:
    """Write what the presence of a key requires as `allOf`: the key is absent, or what it requires is fulfilled."""
    parts = []
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        for key, needs in schema.pop(name, {}).items():
            fits = {"required": [*needs, key]} if isinstance(needs, list) else {"required": [key], "allOf": [needs]}
            if needs != [] and not is_any(needs):
                parts.append({"anyOf": [{"properties": {key: False}}, fits]})
    if parts:
        schema["allOf"] = [*schema.get("allOf", []), *parts]
