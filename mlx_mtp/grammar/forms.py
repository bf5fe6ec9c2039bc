"""Create grammars: immutable objects that `generate` and the other functions take as `grammar=`."""

import json as json_text
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ..machine.errors import first_line
from .equivalent import equivalent
from .library import llguidance
from .names import NO_NUMBERED_ESCAPES, unaliased
from .references import path_in

SPACES = r"[\x20\x0A\x0D\x09]"  # JSON's white space
# The default separators of items and keys, as patterns. Without a limit a model can write spaces for ever.
SEPARATORS = (", ?", ": ?")
STYLES = ((", ", ": "), (",", ":"))  # (item, key) separators that `json.dumps` and compact writers use
STRICT = {
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": False,
}
ONE_OF = "the schemas of oneOf may accept the same value; allowed are schemas that exclude each other, or anyOf"
Whitespace = int | str | Sequence[str] | None


@dataclass(frozen=True)
class Grammar:
    """A grammar for an answer, made by `json_schema`, `json`, `regex` or `lark`.

    text:      llguidance's form of it. name: how messages name it.
    styles:    the same form with the separators of each usual style fixed: for drafts of what a model likely writes.
    tokenizer: used where a function has no tokenizer; not part of the grammar's identity.
    """

    text: str
    name: str
    styles: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, compare=False, repr=False)


def json_schema(schema: Any, *, whitespace: Whitespace = SEPARATORS, tokenizer: Any = None) -> Grammar:
    """Return the grammar of JSON values that a JSON schema (draft 2020-12) accepts, keys in the schema's order.

    schema: a dict, its JSON text, or True for any value. Annotations are ignored, and no `$ref` is fetched.
    whitespace: a pair has the regular expressions of the separators of items and of keys, with no other white space;
    the default allows one space behind each. An int is the maximum number of characters between any two tokens of
    JSON, 0 is none; a str is a regular expression of it, and there may also be none; None means exactly the
    separators ", " and ": ", as `json.dumps` writes them. Before and behind the value there is none.
    Raises ValueError, "json_schema<path of the keyword>: <reason>", for a schema that cannot be enforced exactly, and
    for an invalid `whitespace`.
    """
    schema = parsed(schema)
    own, styles = _spacings(whitespace)
    text, *others = _texts(schema, [own, *styles])
    try:
        return _checked(Grammar(text, "json_schema", tuple(others), tokenizer))
    except ValueError as e:
        reason = str(e).removeprefix("json_schema: ")
        raise ValueError(f"json_schema{path_in(schema, reason)}: {reason}") from None


def json(*, whitespace: Whitespace = SEPARATORS, tokenizer: Any = None) -> Grammar:
    """Return the grammar of any JSON value. whitespace: as in `json_schema`."""
    return replace(json_schema({}, whitespace=whitespace, tokenizer=tokenizer), name="json")


def regex(pattern: str, *, tokenizer: Any = None) -> Grammar:
    """Return the grammar of texts that a regular expression matches as a whole.

    pattern: in the syntax of Rust's `regex`. Raises ValueError if llguidance does not support it.
    """
    return _checked(Grammar(llguidance().LLMatcher.grammar_from_regex(pattern), "regex", (), tokenizer))


def lark(grammar: str, *, tokenizer: Any = None) -> Grammar:
    """Return the grammar of a Lark text in llguidance's dialect, with the rule `start`.

    Special tokens of the tokenizer stand in it as `<name>`: a string never matches them. `%json` may contain no
    `x-guidance`, and its white space is not bounded. Raises ValueError for `x-guidance`, and if llguidance does not
    support the grammar.
    """
    if "x-guidance" in grammar:
        raise ValueError("lark: x-guidance is not supported; give a schema with mlx_mtp.grammar.json_schema")
    return _checked(Grammar(llguidance().LLMatcher.grammar_from_lark(grammar), "lark", (), tokenizer))


def parsed(schema: Any) -> dict[str, Any]:
    """Return a schema as a dict: a dict or its JSON text (str or bytes); {} for true. The contents are not checked.

    Raises ValueError for false, which accepts nothing, for text that is not JSON, and for any other type.
    """
    if isinstance(schema, str | bytes):
        try:
            schema = json_text.loads(schema)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"json_schema: not JSON ({first_line(e)})") from None
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("json_schema: false accepts no value")
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema: a {type(schema).__name__}; expected a dict or its JSON text")
    return schema


def composed(write: Callable[[dict[str, Any]], str], name: str, *, whitespace: Whitespace = SEPARATORS) -> Grammar:
    """Return the grammar of a Lark text that contains JSON; ValueError if llguidance refuses it.

    write: returns the Lark text, given llguidance's options for its JSON; it is called with those of `whitespace` (as
    in `json_schema`), then with those of each style. name: how messages name the grammar.
    """
    make = llguidance().LLMatcher.grammar_from_lark
    own, styles = _spacings(whitespace)
    text, *others = (make(write({**STRICT, **spaces})) for spaces in (own, *styles))
    return _checked(Grammar(text, name, tuple(dict.fromkeys(others)) if others != [text] * len(others) else ()))


def either(first: Grammar, second: Grammar) -> Grammar:
    """Return the grammar of the texts that at least one of two accepts, with the name and tokenizer of the first.

    ValueError if llguidance refuses it.
    """
    pairs = zip_longest((first.text, *first.styles), (second.text, *second.styles))
    text, *styles = (_either(one or first.text, other or second.text) for one, other in pairs)
    return _checked(Grammar(text, first.name, tuple(styles), first.tokenizer))


def _either(*texts: str) -> str:
    """Return llguidance's JSON of a grammar that accepts what any of these does; each is a grammar's JSON or Lark."""
    found = []
    for i, text in enumerate(texts):
        inner = json_text.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        found.append({**inner[0], "name": f"g{i}"})
        assert len(inner) == 1, "no grammar of this module has several"
    start = "start: " + " | ".join(f"@{each['name']}" for each in found)
    return json_text.dumps({"grammars": [{"lark_grammar": start}, *found]})


def _spacings(whitespace: Whitespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return llguidance's options for white space, and a list of the options for each of STYLES.

    The list is empty if the first options leave no choice of style (0 or None). Raises ValueError for other values
    of `whitespace` than those of `json_schema`.
    """
    own = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True, "whitespace_pattern": None}
    fixed = {"whitespace_flexible": False, "whitespace_pattern": None}
    styles = [{"item_separator": item, "key_separator": key, **fixed} for item, key in STYLES]
    if whitespace is None:
        own = styles[0]
    elif whitespace == 0:
        own = styles[1]
    elif isinstance(whitespace, str):
        own["whitespace_pattern"] = whitespace
    elif isinstance(whitespace, int) and whitespace > 0:
        own["whitespace_pattern"] = f"{SPACES}{{1,{int(whitespace)}}}"
    elif isinstance(whitespace, Sequence) and len(whitespace) == 2 and all(isinstance(e, str) for e in whitespace):
        own = {"item_separator": whitespace[0], "key_separator": whitespace[1], **fixed}
    else:
        allowed = "0 or more, a regular expression, a pair of them, and None"
        raise ValueError(f"whitespace={whitespace!r}: allowed are {allowed}")
    return own, [] if own in styles else styles


def honoured(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (a schema, options) with which llguidance enforces a schema exactly. The options go before others.

    Raises ValueError, "json_schema<path of the keyword>: <reason>", if it cannot.
    """
    try:
        found, no_numbers = unaliased(equivalent(schema))
    except RecursionError:
        raise ValueError("json_schema: nested too deeply") from None
    except ValueError as e:
        raise ValueError(f"json_schema{first_line(e)}") from None
    return found, {"json_allowed_escapes": NO_NUMBERED_ESCAPES} if no_numbers else {}


def _texts(schema: dict[str, Any], spacings: Sequence[dict[str, Any]]) -> list[str]:
    """Return llguidance's JSON of a schema, once for each of its options for white space.

    All options are overrides: those in the schema change nothing. Raises ValueError if llguidance refuses the schema.
    """
    make = llguidance().LLMatcher.grammar_from_json_schema
    found, options = honoured(schema)
    try:
        return [make(found, overrides={**STRICT, **spaces, **options}) for spaces in spacings]
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f"json_schema: {first_line(e)}") from None


def _checked(grammar: Grammar) -> Grammar:
    """Return the grammar; ValueError, in one line, if llguidance cannot honour it."""
    library = llguidance()
    if error := library.LLMatcher.validate_grammar(grammar.text, limits=library.limits):
        raise ValueError(f"{grammar.name}: {_reason(error)}")
    return grammar


def _reason(error: str) -> str:
    """Return the first line of llguidance's error message, of a pattern's its start and what is wrong."""
    first, *rest = error.strip().replace("json-schema:///", "").splitlines()
    if "coerce_one_of" in first:
        return ONE_OF
    wrong = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), "")
    if "regex parse error" not in first or not wrong:
        return first
    return f"pattern {rest[0].strip()[:80]!r}: {wrong}"
