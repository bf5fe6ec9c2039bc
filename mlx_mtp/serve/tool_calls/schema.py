"""Look up the types of tools' parameters, convert arguments without quotes to JSON, and find JSON in a text."""

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import regex

Schema = dict[str, Any]
ESCAPE = re.compile(r'["/bfnrt]|u[0-9a-fA-F]{4}')
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # jinja's `string` filter writes the keys

STRING = r'"(?:\\.|[^"\\])*+"'
TOKENS = regex.compile(rf"{STRING}|[\[\]{{}}]", regex.DOTALL)
SCALAR = regex.compile(rf"{STRING}|[^\s,\]}}]++", regex.DOTALL)
MEMBER = regex.compile(rf"\s*,?\s*(?P<key>{STRING})\s*:\s*", regex.DOTALL)
LAST = regex.compile(r"\s*,?\s*\}")


class Tools:
    """The functions that a request offers. offered: tools in OpenAI's form; those without a name are skipped."""

    def __init__(self, offered: Iterable[Any] | None):
        functions = [tool.get("function") for tool in offered or () if isinstance(tool, dict)]
        self._parameters: dict[str, Schema] = {
            f["name"]: f.get("parameters") or {} for f in functions if isinstance(f, dict) and f.get("name")
        }

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def parameters(self, name: str) -> Schema:
        """Return the schema of a function's arguments object; {} if it has none or was not offered."""
        parameters = self._parameters.get(name)
        return parameters if isinstance(parameters, dict) else {}

    def properties(self, name: str) -> Schema:
        """Return the schemas of a function's parameters by name; {} if it declares none or was not offered."""
        properties = self.parameters(name).get("properties")
        return properties if isinstance(properties, dict) else {}

    def types(self, name: str, key: str) -> set[str]:
        """Return the JSON types that the schema allows for a parameter; an empty set allows any type."""
        return types_of(self.properties(name).get(key), self.parameters(name))

    def fits(self, name: str, key: str, text: str, as_json: Callable[[str, str, str], str]) -> bool:
        """Return whether the schema declares a parameter, and the JSON of `text` has one of its types.

        If the schema allows any type or string, any text has one.
        as_json: converts (function's name, parameter's name, text) to JSON.
        """
        properties, types = self.properties(name), self.types(name, key)
        if key not in properties or not types or "string" in types:
            return key in properties
        kind = kind_of(json.loads(as_json(name, key, text)))
        return kind in types or (kind == "integer" and "number" in types)

    def as_json(self, name: str, key: str, text: str) -> str:
        """Return the JSON of an argument that a model wrote without quotes.

        It is a string for a parameter of type string alone, otherwise as `untyped_as_json` converts it.
        """
        types = self.types(name, key)
        return dumps(text) if types == {"string"} else untyped_as_json(text, types)


def untyped_as_json(text: str, types: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """Return the JSON of a text that a model wrote without quotes. types: of the schema; empty allows any.

    Valid JSON, and Python's True, False and None, keep their type if it is allowed, or if string is not allowed.
    In the second case Python's lists and dicts do so too. Other text becomes a string. A whole number such as 5.0
    becomes an integer if integer is allowed and number is not. Text in double quotes keeps them in its string if
    string is allowed.
    """
    written = PYTHON_CONSTANTS.get(text.strip(), text.strip())
    try:
        written = strict(written)
    except ValueError:
        return dumps(text) if "string" in types else _from_python(text)
    kind = kind_of(json.loads(written))
    if kind == "string":  # the model wrote quotes that the format does not use
        return dumps(text) if "string" in types or not types else written
    if kind == "number" and "integer" in types and "number" not in types and float(written).is_integer():
        return str(int(float(written)))
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return dumps(text) if not fits and "string" in types else written


def _from_python(text: str) -> str:
    """Return the JSON of the literal of a Python list or dict; any other text becomes a JSON string."""
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if text.strip()[:1] in ("{", "["):
            return dumps(_without_nan(ast.literal_eval(text.strip())))
    return dumps(text)


def types_of(schema: Any, root: Schema, depth: int = 8) -> set[str]:
    """Return the JSON types that a schema names, also in `anyOf`, `oneOf` and `allOf`; without any, all are allowed.

    Values of `enum` and `const` name their types if there is no `type`. The set is empty if no type is named. root:
    where `$ref` is resolved. depth: maximum levels of nested schemas; deeper ones name no type.
    """
    schema = target_of(schema, root)
    if not isinstance(schema, dict) or not depth:
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    types = types or {kind_of(value) for value in values}
    for choice in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(choice), list):
            types = types.union(*(types_of(each, root, depth - 1) for each in schema[choice]))
    return types | {"null"} if types and schema.get("nullable") is True else types


def alternatives(schema: Any, root: Schema, depth: int = 8) -> Iterator[Schema]:
    """Yield a schema, with its `$ref` resolved in `root`, and likewise those in its `anyOf`, `oneOf` and `allOf`.

    depth: maximum levels of nested schemas; deeper ones, and values that are not objects, are left out.
    """
    schema = target_of(schema, root)
    if isinstance(schema, dict) and depth:
        yield schema
        for choice in ("anyOf", "oneOf", "allOf"):
            for each in schema[choice] if isinstance(schema.get(choice), list) else ():
                yield from alternatives(each, root, depth - 1)


def target_of(schema: Any, root: Schema, depth: int = 8) -> Any:
    """Return a schema with its `$ref` resolved in `root`; None if there is no target within `depth` steps."""
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        schema, depth = _resolved(reference, root) if depth else None, depth - 1
    return schema


def _resolved(reference: str, root: Schema) -> Any:
    """Return the part of the root schema to which a `$ref` such as "#" or "#/$defs/name" points.

    The part may stand in a list. None if there is no such part, or if the reference is to another document.
    """
    document, *keys = reference.split("/")
    found: Any = root if document == "#" else None
    for key in keys:
        parts = {str(i): part for i, part in enumerate(found)} if isinstance(found, list) else found
        found = parts.get(unquote(key).replace("~1", "/").replace("~0", "~")) if isinstance(parts, dict) else None
    return found


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def dumps(value: Any) -> str:
    """Return a value as JSON without escaping non-ASCII characters, unless it has lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def strict(text: str) -> str:
    """Return a text that is valid JSON unchanged, and repair one that nearly is. Raises ValueError for other text.

    Control characters and stray backslashes in strings are escaped; NaN and infinities become null, as in JavaScript.
    Lone surrogates become escape sequences.
    """
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=_refuse)
        text.encode()
        return text
    try:
        return dumps(json.loads(_with_escaped_backslashes(text), strict=False, parse_constant=lambda _: None))
    except RecursionError as e:
        raise ValueError("JSON is nested too deeply") from e


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _with_escaped_backslashes(text: str) -> str:
    """Double each backslash that does not start a JSON escape sequence."""
    parts = text.split("\\\\")  # a pair is an escape sequence
    for i, part in enumerate(parts):
        before, *others = part.split("\\")
        for other in others:
            before += ("\\" if ESCAPE.match(other) else "\\\\") + other
        parts[i] = before
    return "\\\\".join(parts)


def _without_nan(value: Any) -> Any:
    """Return a value with NaN and infinities as None, dictionary keys as strings and tuples as lists."""
    if isinstance(value, dict):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def members(text: str, start: int) -> Iterator[tuple[str, str]]:
    """Yield (quoted key, value's text) of the object whose brace is at `start`.

    Values need not be valid. After the last readable member, raises ValueError if the object does not end there.
    """
    at = start + 1
    while member := MEMBER.match(text, at):
        end = end_of_value(text, member.end())
        if end is None:
            raise ValueError("a JSON object without an end")
        yield member["key"], text[member.end() : end]
        at = end
    if not LAST.match(text, at):
        raise ValueError("a JSON object with invalid members")


def end_of_value(text: str, start: int) -> int | None:
    """Return the index after the JSON value, valid or not, that starts at `start`; None if it does not end."""
    if text[start : start + 1] not in ("{", "["):
        scalar = SCALAR.match(text, start)
        return scalar.end() if scalar else None
    depth = 0
    for token in TOKENS.finditer(text, start):
        depth += (token[0] in ("{", "[")) - (token[0] in ("}", "]"))
        if not depth:
            return token.end()
    return None
