"""Read the request fields that require structured output: JSON, a JSON schema, a regular expression or a grammar."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from ..grammar import Grammar
from ..grammar.forms import SEPARATORS, json_schema, lark, parsed, regex
from ..grammar.vocabulary import Kept
from .fields import Refused, field_of, fields_of
from .structured import RequiredOutput, check_schema, check_text, compiled_within

OBJECT = {"type": "object"}
MAX_CHOICES = 1000  # of guided_choice
MADE: dict[str, Callable[..., Grammar]] = {
    "json": json_schema,
    "regex": lambda pattern, whitespace: regex(pattern),
    "grammar": lambda grammar, whitespace: lark(grammar),
    "choice": lambda choices, whitespace: lark("start: " + " | ".join(json.dumps(each) for each in choices)),
    "json_object": lambda _, whitespace: json_schema(OBJECT, whitespace=whitespace),
}
GRAMMARS = Kept()
UNUSED = {"text": ("schema", "json_schema"), "json_object": ("json_schema",)}  # by type, members without effect
TEXT_KINDS = ("regex", "grammar")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}


def output_of(api: str, body: dict[str, Any]) -> RequiredOutput | None:
    """Return the grammar that a request's fields require of its answer, as an `RequiredOutput`; None for free text.

    api: "ollama", or one of `field_table.APIS`. Raises Refused, naming the field, for an unknown format, for more
    than one field that requires a grammar, and for a grammar that cannot be enforced.
    """
    found = [*_formats(api, body), *_guided(body)]
    if len(found) > 1:
        raise Refused(f"{found[1][0]}: cannot be used with {found[0][0]}", param=found[1][0].partition(".")[0])
    return _output(*found[0]) if found else None


Wanted = tuple[str, str, Any, Any]  # field path, key of MADE, its value, white space


def _formats(api: str, body: dict[str, Any]) -> list[Wanted]:
    """Return what the API's own fields require, up to two for messages, else up to one; [] for free text.

    Raises Refused as `_format` or, for "ollama", as `_ollama`.
    """
    if api == "ollama":
        return _ollama(body)
    if api == "responses":
        given = {"text.format": fields_of(body, "text").get("format")}
    elif api == "messages":
        given = {"output_config.format": fields_of(body, "output_config").get("format")}
        given["output_format"] = body.get("output_format")
    else:
        given = {"response_format": body.get("response_format")}
    found = (_format(name, value, flat=name != "response_format") for name, value in given.items())
    return [each for each in found if each]


def _ollama(body: dict[str, Any]) -> list[Wanted]:
    """Return [what Ollama's `format`, "json" or a JSON schema, requires]; [] if it is missing, null, "" or {}.

    Raises Refused for any other value.
    """
    given = field_of(body, "format", '"json" or a JSON schema', lambda v: v in ("", "json") or isinstance(v, dict))
    if not given:
        return []
    key, value = ("json_object", None) if given == "json" else ("json", given)
    return [("format", key, value, SEPARATORS)]


def _format(name: str, given: Any, *, flat: bool) -> Wanted | None:
    """Return what an output format, {"type": ..., ...} or its type alone, requires; None for type text or no format.

    name: path of the format's field. flat: its schema is its own member `schema`; otherwise, if it has an object as
    member `json_schema`, the member `schema` of that object. Raises Refused for another type, for a schema that is
    missing (json_object needs none) or null, for a member of UNUSED, and for a value that is neither object nor text.
    """
    param = name if name.startswith("text") else name.partition(".")[0]
    given = {"type": given} if isinstance(given, str) else given
    if not isinstance(given, dict | None):
        raise Refused(f"{name}={repr(given)[:80]}: allowed is an object with a member `type`, or a type", param=param)
    kind = (given or {}).get("type", "text")
    for inner in UNUSED.get(str(kind), ()):
        if (given or {}).get(inner):
            raise Refused(f"{name}.{inner}: has no effect with type {kind}; use type json_schema", param=param)
    if kind == "text":
        return None
    if kind == "json_object" and "schema" not in (given or {}):
        return name, kind, None, SEPARATORS
    if kind not in ("json_object", "json_schema"):
        allowed = "text, json_object and json_schema"
        raise Refused(f"{name}: type {repr(kind)[:80]} is not supported; allowed are {allowed}", param=param)
    assert given
    if not flat and isinstance(inner := given.get("json_schema"), dict):
        name, given = f"{name}.json_schema", inner
    if given.get("schema") is None:
        raise Refused(f"{name}.schema: missing; allowed is a JSON schema", param=param)
    return f"{name}.schema", "json", given["schema"], SEPARATORS


def _guided(body: dict[str, Any]) -> list[Wanted]:
    """Return what vLLM's fields require: `guided_*`, and the members of `structured_outputs`.

    A null or false value requires nothing. Raises Refused for an unknown member of `structured_outputs`, unless its
    value is null or false, and for a pattern of white space that is no text.
    """
    inner = fields_of(body, "structured_outputs")
    given = {f"structured_outputs.{key}": (key, value) for key, value in inner.items()}
    given |= {name: (key, body.get(name)) for name, key in GUIDED.items()}
    spaces = field_of(body, "guided_whitespace_pattern", "a text", lambda v: isinstance(v, str))
    spaces = spaces or field_of(inner, "whitespace_pattern", "a text", lambda v: isinstance(v, str)) or SEPARATORS
    spaces = None if inner.get("disable_any_whitespace") is True else spaces
    found: list[Wanted] = []
    for name, (key, value) in given.items():
        if key in ("whitespace_pattern", "disable_any_whitespace") or value in (None, False):
            continue
        if key not in MADE:
            allowed = ", ".join([*MADE, "whitespace_pattern", "disable_any_whitespace"])
            raise Refused(f"{name}: not supported; allowed are {allowed}", param=name.partition(".")[0])
        found.append((name, key, value, spaces))
    return found


def _output(name: str, key: str, value: Any, whitespace: Any) -> RequiredOutput:
    """Return the grammar of a field's value, cached in GRAMMARS. name: the field's path. key: of MADE.

    whitespace: as in `grammar.forms.json_schema`. Raises Refused, naming the field, for a value of another type than
    `_allowed` returns, one that `_made` refuses, and as `compiled_within`.
    """
    param = "text.format" if name.startswith("text") else name.partition(".")[0]
    allowed, fits = _allowed(key, value)
    if not fits:
        raise Refused(f"{name}={repr(value)[:80]}: allowed is {allowed}", param=param)
    try:
        value = parsed(value) if key == "json" else value
        text = json.dumps([key, value, whitespace])
        if (grammar := GRAMMARS.get(text)) is None:
            GRAMMARS.put(text, grammar := compiled_within(partial(_made, key, value, whitespace), name, param))
    except Refused:
        raise
    except ValueError as e:
        reason = str(e) if str(e).startswith("json_schema") else f": {e}"
        raise Refused(f"{name}{reason.removeprefix('json_schema')}", param=param) from e
    return RequiredOutput(grammar, name, param)


def _made(key: str, value: Any, whitespace: Any) -> Grammar:
    """Return the grammar of a field's value. key: of MADE. ValueError if it is too large, or cannot be enforced."""
    if key in TEXT_KINDS:
        check_text(value)
    else:
        check_schema(value)
    return MADE[key](value, whitespace=whitespace)


def _allowed(key: str, value: Any) -> tuple[str, bool]:
    """Return (words for the allowed values of `key` of MADE, whether `value` is one); for "json" it always is."""
    if key == "choice":
        texts = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
        return f"a list of 1 to {MAX_CHOICES} texts, none empty", texts and 0 < len(value) <= MAX_CHOICES
    if key in TEXT_KINDS:
        return "a text", isinstance(value, str)
    return ("true", value is True or value is None) if key == "json_object" else ("a JSON schema", True)
