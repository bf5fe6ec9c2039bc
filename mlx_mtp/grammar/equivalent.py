"""Rewrite a JSON schema (draft 2020-12) as one that accepts the same values, without some unsupported keywords.

llguidance refuses a schema with a keyword that it does not implement, also where the keyword has no effect: such
keywords are removed, and `dependentRequired` is written with other keywords.
"""

from collections.abc import Mapping
from typing import Any

# Keywords with subschemas: one, a list, and an object of them. Other values are data, which may look like schemas.
ONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
ONE += ("unevaluatedItems", "unevaluatedProperties")
MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
COUNTS = ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties")
COUNTS += ("maxContains", "minContains")
ANY, NONE = (True, {}), (False,)  # schemas of any value, and of none
# Values with which a keyword has no effect.
NO_EFFECT = {"not": NONE, "uniqueItems": NONE, "dependentRequired": ({},), "dependentSchemas": ({},)}
NO_EFFECT |= dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), ANY)


def equivalent(schema: Any) -> Any:
    """Return a new schema that accepts the same values; what is no Mapping, such as True, is returned unchanged.

    Raises RecursionError for a schema that is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _value(name, value) for name, value in schema.items()}
    for name, values in NO_EFFECT.items():
        if name in found and any(type(found[name]) is type(value) and found[name] == value for value in values):
            del found[name]
    _drop_conditions(found)
    _drop_counts_of_contains(found)
    _expand_dependent_required(found)
    return found


def _value(name: str, value: Any) -> Any:
    if name in ONE:
        return equivalent(value)
    if name in MANY and isinstance(value, list):
        return [equivalent(each) for each in value]
    if name in NAMED and isinstance(value, Mapping):
        return {key: equivalent(each) for key, each in value.items()}
    if name in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _drop_conditions(schema: dict[str, Any]) -> None:
    """Remove `if` without `then` and `else`, and these without `if`, from a schema, which is changed."""
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]


def _drop_counts_of_contains(schema: dict[str, Any]) -> None:
    """Remove minContains and maxContains without `contains`, and `contains` with minContains 0 and no maximum.

    The schema is changed.
    """
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"], schema["minContains"]


def _expand_dependent_required(schema: dict[str, Any]) -> None:
    """Replace `dependentRequired` in a schema by `allOf`: each key is absent, or present with those that it requires.

    The schema is changed, unless the value of one of the two keywords is malformed.
    """
    needs, parts = schema.get("dependentRequired"), schema.get("allOf", [])
    if not (isinstance(needs, Mapping) and isinstance(parts, list)):
        return
    if not all(isinstance(keys, list) for keys in needs.values()):
        return
    del schema["dependentRequired"]
    absent = {key: {"properties": {key: False}} for key in needs}
    schema["allOf"] = [*parts, *({"anyOf": [absent[key], {"required": [*keys, key]}]} for key, keys in needs.items())]
