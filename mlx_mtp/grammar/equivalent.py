"""Rewrite a JSON schema as one that accepts the same values and that llguidance enforces exactly, or refuse it.

llguidance refuses a schema with a keyword that it does not implement, also where the keyword has no effect, and it
takes some schemas that lead an answer where nothing may follow.
"""

from collections.abc import Mapping
from json import dumps
from typing import Any

from .exclusive import Exclusion
from .finite import without_endless
from .keywords import UNSUPPORTED, contradiction, is_any, write_keywords
from .names import write_names
from .numbers import write_numbers
from .references import ROOT, References, base_of, evaluated

# Keywords with subschemas: one, a list, and an object of them. Other values are data, which may look like schemas.
ONE = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
ONE += ("unevaluatedItems", "unevaluatedProperties")
MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
DATA = ("type", "const", "enum", "required", "dependentRequired", "minLength", "maxLength", "pattern", "format")
DATA += ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems")
DATA += ("uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties")
DATA += ("$ref", "$dynamicRef", "$recursiveRef")
DATA += ("nullable",)  # has no effect, but the formats of tool calls without JSON read texts by it
KEYWORDS = {*ONE, *MANY, *NAMED, *DATA}  # others, in any vocabulary, are annotations or where `$ref` lead
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OTHER_TYPES = {*OF_NUMBERS, *ONE, *NAMED, "prefixItems", "required", "minItems", "maxItems", "minProperties"}
OTHER_TYPES |= {"maxProperties"}  # keywords that do not concern texts
MOST_SCHEMAS = 50_000


def equivalent(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new schema that accepts the same values, in a form that llguidance enforces or refuses.

    It has no annotations, and its `$ref` are "#" or "#/$defs/<name>". Raises ValueError, whose text begins with the
    path of a keyword or with ":", if the schema cannot be enforced, and RecursionError if it is nested too deeply.
    """
    document = _Document(schema)
    found = document.written(schema, "", ROOT)
    while document.pending:
        name, (target, path, base) = document.pending.popitem()
        document.definitions[name] = document.written(target, path, base)
    if isinstance(found, dict):
        document.reason = ""
        if document.definitions:
            found["$defs"] = document.definitions
        found = without_endless(found)
    if found is False:
        raise ValueError(document.reason or ": no finite JSON value fits it")
    return {} if found is True else found


class _Document:
    """Writes the schemas of a document.

    definitions: the written targets of `$ref`, by name. pending: those not written yet: a schema, its path, its base
    URI. reason: why the last schema that became false accepts nothing, as the text of an error.
    """

    def __init__(self, root: Mapping[str, Any]):
        self.definitions: dict[str, Any] = {}
        self.pending: dict[str, tuple[Any, str, str]] = {}
        self._root, self._references = root, References(root)
        self._names: dict[int, str] = {}  # by the `id` of a target
        self._left = MOST_SCHEMAS
        self.reason = ""

    def written(self, schema: Any, path: str, base: str) -> Any:
        """Return a schema in the form of `equivalent`; false for one that is known to accept nothing."""
        self._left -= 1
        if not self._left:
            raise ValueError(f": more than {MOST_SCHEMAS} schemas")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"{path}: {repr(schema)[:80]} is no schema; allowed are an object, true and false")
        own = base_of(schema, base)
        found = {
            name: self._value(name, value, f"{path}.{name}", own)
            for name, value in schema.items()
            if name in KEYWORDS
        }
        if "not" in found and is_any(found["not"]):
            self.reason = f"{path}.not: no value is allowed"
            return False
        write_keywords(found, path)
        write_numbers(found, path)
        if "oneOf" in found and Exclusion(self._references).proven(schema["oneOf"], own):
            _write_one_of(found)
        if isinstance(found.get("propertyNames"), dict):
            found["propertyNames"] = _of_text(found["propertyNames"])
        if "unevaluatedProperties" in found:
            self._write_unevaluated(found, schema, base)
        write_names(found, path)
        for name in UNSUPPORTED:
            if name in found:
                raise ValueError(f"{path}.{name}: {name} is not supported here")
        if reason := contradiction(found):
            if not self.reason.startswith(f"{path}{reason[0]}."):
                self.reason = f"{path}{reason[0]}: {reason[1]}"
            return False
        return found

    def _value(self, name: str, value: Any, path: str, base: str) -> Any:
        """Return the written value of a keyword. Raises ValueError for one of another type than the keyword has."""
        if name == "$ref":
            return self._reference(value, path, base)
        if name == "propertyNames":
            value, base = self._dereferenced(value, path, base)
        if name in MANY or (name == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise ValueError(f"{path}: {repr(value)[:80]}; allowed is a list of schemas")
            return [self.written(each, f"{path}.{i}", base) for i, each in enumerate(value)]
        if name in ONE:
            return self.written(value, path, base)
        if name in (*NAMED, "dependentRequired") and not isinstance(value, Mapping):
            raise ValueError(f"{path}: {repr(value)[:80]}; allowed is an object")
        if name in NAMED:
            _check_text([*value], path)
            lists = name == "dependencies"
            return {
                key: each if lists and isinstance(each, list) else self.written(each, f"{path}.{key}", base)
                for key, each in value.items()
            }
        _check_text(value, path)
        if name in ("required", "enum") and not isinstance(value, list):
            raise ValueError(f"{path}: {repr(value)[:80]}; allowed is a list")
        needs: Any = {"required": {"": value}, "dependentRequired": value}.get(name, {})
        if not all(isinstance(each, list) and all(isinstance(key, str) for key in each) for each in needs.values()):
            raise ValueError(f"{path}: {repr(value)[:80]}; allowed are lists of texts")
        return value

    def _dereferenced(self, schema: Any, path: str, base: str) -> tuple[Any, str]:
        """Return (schema, its base URI), of one that is only a `$ref` those of its target."""
        for _ in range(10):
            if not isinstance(schema, Mapping) or {*schema} & KEYWORDS != {"$ref"}:
                break
            try:
                schema, base, _ = self._references.target(schema["$ref"], base)
            except ValueError as e:
                raise ValueError(f"{path}.$ref: {e}") from None
        return schema, base

    def _write_unevaluated(self, found: dict[str, Any], schema: Mapping[str, Any], base: str) -> None:
        """Replace `unevaluatedProperties` by `additionalProperties` if it is known what other schemas evaluate.

        found: the written schema, which is changed. schema, base: the given one and the base URI around it.
        """
        value = found["unevaluatedProperties"]
        known = evaluated(schema, base, self._references)
        if known is None and not is_any(value) and "additionalProperties" not in found:
            return
        del found["unevaluatedProperties"]
        if known is None or known.all or is_any(value):
            return
        for name, keys in (("properties", known.names), ("patternProperties", known.patterns)):
            if keys:
                found[name] = {**found.get(name, {}), **{k: True for k in keys if k not in found.get(name, {})}}
        found["additionalProperties"] = value

    def _reference(self, value: Any, path: str, base: str) -> str:
        """Return the `$ref` to the written target of another one; ValueError, with `path`, if that leads nowhere."""
        try:
            target, base, name = self._references.target(value, base)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None
        if target is self._root:
            return "#"
        if id(target) not in self._names:
            name = "".join(letter if letter.isalnum() or letter in "_-." else "_" for letter in name)
            while name in self._names.values():
                name += "_"
            self._names[id(target)] = name
            self.pending[name] = target, value.partition("#")[2].replace("/", "."), base
        return f"#/$defs/{self._names[id(target)]}"


def _check_text(value: Any, path: str) -> None:
    """Raise ValueError, with `path`, if a value contains lone surrogates, which are no Unicode."""
    try:
        dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise ValueError(f"{path}: no Unicode text, or no JSON") from None


def _write_one_of(schema: dict[str, Any]) -> None:
    """Replace the `oneOf` of a written schema, whose schemas exclude each other, by an `anyOf`; it is changed."""
    choices = schema.pop("oneOf")
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": choices}]
    else:
        schema["anyOf"] = choices


def _of_text(schema: dict[str, Any]) -> Any:
    """Return a written schema of names without `type` and keywords of other types; false if it accepts no text."""
    types = schema.get("type", "string")
    if "string" not in ([types] if isinstance(types, str) else types):
        return False
    found = {name: value for name, value in schema.items() if name not in OTHER_TYPES and name != "type"}
    if found.get("minLength") == 0:
        del found["minLength"]
    return found
