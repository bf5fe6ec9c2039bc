"""Walk the keywords of JSON schemas, and find the one that an error message refers to."""

import re
from collections.abc import Iterator
from typing import Any

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # objects of schemas, by name
COMMON = ("type", "pattern", "properties", "items", "required")  # keywords that are also words of messages
TEXTS = ("title", "description", "$comment")
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object", True, False)
VALUES = ("const", "enum", "default", "examples")  # JSON values, not schemas


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
