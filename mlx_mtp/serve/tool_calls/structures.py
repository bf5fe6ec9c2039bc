"""Write the grammar of values that are no plain JSON: Gemma's, Python's, nested tags, JSON that avoids a mark."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import regex

from .branches import Branch, SchemaDocument, branches
from .lark import ANY, LarkRules, containing, pattern
from .nested import ITEM
from .schema import Schema, dumps, types_of, untyped_as_json

WHITE = r"[\s\x1c-\x1f]*"
NUMBERS = f"{WHITE}-?[0-9]{ANY}"
# Texts that `untyped_as_json` does not read as strings where the schema allows these types, too.
READ_AS = {
    "null": f"{WHITE}(?:null|None|NaN|-?Infinity){WHITE}",
    "boolean": f"{WHITE}(?:[tT]rue|[fF]alse){WHITE}",
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": rf"{WHITE}\[{ANY}",
    "object": rf"{WHITE}\{{{ANY}",
}
# Numbers that Python reads as finite ones.
PYTHON_NUMBERS = {
    "integer": "/-?(?:0|[1-9][0-9]{0,299})/",
    "number": r"/-?(?:0|[1-9][0-9]{0,199})(?:\.[0-9]{1,200})?(?:[eE](?:\+?[0-9]{1,2}|-[0-9]{1,3}))?"
    r"|-?[0-9](?:\.[0-9]{1,200})?[eE]\+?(?:[12][0-9]{2}|30[0-7])/",
}
CONSTANTS = {None: "None", True: "True", False: "False"}


class Style(NamedTuple):
    """A way to write values. kind: "json", "python", "gemma" or "nested".

    mark: a text that no string contains, "" if there is none; for "gemma" it is at both ends of strings, and for
    "nested" before every tag.
    """

    kind: str
    mark: str

    @property
    def is_python(self) -> bool:
        return self.kind == "python"

    def allows(self, text: str) -> bool:
        """Return whether a text does not contain the mark."""
        return not self.mark or self.mark not in text


class Structures:
    """Adds the rules of values in one style to a grammar. document: where `$ref` is resolved.

    by_key: members of objects are sorted by key. quote: at both ends of Python's strings outside of lists and objects
    if these have no escape sequences; "" if they may have some.
    """

    def __init__(
        self, rules: LarkRules, document: SchemaDocument, style: Style, *, by_key: bool = False, quote: str = ""
    ):
        self.rules, self.document, self.style, self.by_key, self.quote = rules, document, style, by_key, quote

    def value(self, schema: Any, close: str = "") -> str:
        """Return the name of the rule of a value that fits `schema` and the literal `close` after it.

        Raises ValueError for a schema that cannot be written in this style.
        """
        key = f"{self.style} {self.quote} {self.by_key} {close} {json.dumps(schema)} {json.dumps(self.document.root)}"
        name, new = self.rules.begun(key)
        if new:
            found = list(branches(schema, self.document.root))
            types = types_of(schema, self.document.root)
            bodies = [body for each in found for body in self._bodies(each, types, close)]
            if not bodies:
                raise ValueError("no value of a schema can be written in this model's tool calls")
            self.rules.complete(name, " | ".join(dict.fromkeys(bodies)))
        return name

    def _inside(self) -> "Structures":
        """Return a writer of values inside lists and objects: this one, without `quote`."""
        return Structures(self.rules, self.document, self.style, by_key=self.by_key) if self.quote else self

    def _bodies(self, branch: Branch, types: set[str], close: str) -> Iterable[str]:
        """Yield the bodies of a branch's values, each with `close` after it.

        types: JSON types that the whole schema allows, by which the parser reads a text; empty allows any.
        """
        literal = self.rules.literal
        if branch.values and branch.kind in ("array", "object"):
            with suppress(ValueError):  # other values of an enum may be possible
                yield f"{self._container(branch.values[0])} {literal(close)}"
        elif branch.values:
            yield from (literal(text + close) for text in self.texts(branch.values[0], types))
        elif branch.kind == "string":
            yield from self._strings(branch, types, close)
        elif branch.kind in ("null", "boolean"):
            values = (None,) if branch.kind == "null" else (True, False)
            yield from (literal(text + close) for value in values for text in self.texts(value, types))
        elif self.style.is_python and branch.kind in PYTHON_NUMBERS and not branch.schema:
            yield f"{self.rules.rule(PYTHON_NUMBERS[branch.kind], terminal=True)} {literal(close)}"
        elif branch.kind in ("integer", "number"):
            yield f"{self.rules.json({'type': branch.kind, **branch.schema}, tight=True)} {literal(close)}"
        else:
            write = self._array if branch.kind == "array" else self._object
            yield f"{write(branch.schema)} {literal(close)}"

    def texts(self, value: Any, types: set[str]) -> list[str]:
        """Return the texts that may be written for one value, which is no list or object.

        [] if none of them would be read back as this value. types: as in `_bodies`.
        """
        style, text = self.style, dumps(value)
        if not isinstance(value, str):
            python = CONSTANTS.get(value) if value is None or isinstance(value, bool) else None
            return [text, python] if python and style.kind in ("python", "gemma") else [text]
        if style.kind == "nested":
            read = dumps(value) if types == {"string"} else untyped_as_json(value, types)
            return [value] if style.allows(value) and json.loads(read) == value else []
        if style.kind == "gemma":
            return [f"{style.mark}{value}{style.mark}"] if style.allows(value) else []
        if self.quote:
            return [f"{self.quote}{value}{self.quote}"] if not regex.search(rf"{self.quote}\s*[,)]", value) else []
        return [text, repr(value)] if style.is_python else [text] if style.allows(text) else []

    def _strings(self, branch: Branch, types: set[str], close: str) -> Iterable[str]:
        style, rules, patterns = self.style, self.rules, branch.patterns()
        if style.kind == "gemma":
            yield f"{rules.literal(style.mark)} {rules.raw(style.mark, patterns=patterns)} {rules.literal(close)}"
        elif style.kind == "nested":
            without = excluded(types)
            yield rules.raw(close, patterns=patterns, without=without, mark=style.mark)
        elif self.quote:
            # A quote ends the text only before what follows an argument, as the parser reads it.
            ends = rf"{ANY}{self.quote}\s*[,)]{ANY}"
            quoted = rules.raw(self.quote, patterns=patterns, without=[ends], mark="")
            yield f"{rules.literal(self.quote)} {quoted} {rules.literal(close)}"
        elif style.is_python or patterns:
            yield f"{rules.json({'type': 'string', **branch.schema}, tight=True)} {rules.literal(close)}"
            if style.is_python:
                plain = " & ".join(f"/{each}/" for each in [*patterns, r"[^'\\\x00-\x1f]*"])
                least, most = branch.schema.get("minLength", 0), branch.schema.get("maxLength", "")
                escaped = rf"/'(?:[^'\\\x00-\x1f]|\\['\\nrt]){{{least},{most}}}'/"
                simple = {*branch.schema} <= {"minLength", "maxLength"}
                single = escaped if simple else f'"\'" ({plain}) "\'"'
                yield f"{rules.rule(single, terminal=True)} {rules.literal(close)}"
        else:
            text = rf'/"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/ & ~/{containing(style.mark)}/'
            yield f"{rules.rule(text, terminal=True)} {rules.literal(close)}"

    def _container(self, value: Any) -> str:
        """Return the body of one list or object. Raises ValueError if it cannot be written in this style."""
        if self.style.kind == "nested":
            raise ValueError("a list or object in const or enum is not supported with this model's tool calls")
        if isinstance(value, list):
            separator = f" {self._separator(',')} "
            items = separator.join(self._inside().value({"const": each}) for each in value)
            return f'"[" {items} "]"'
        members = {key: {"const": each} for key, each in value.items()}
        return self._object({"properties": members, "required": [*value]})

    def _array(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if "prefixItems" in schema:
            raise ValueError("prefixItems is not supported with this model's tool calls")
        items, nested = schema.get("items", {}), self.style.kind == "nested"
        before, after = self._tag(ITEM) if nested else ("", "")
        item = f"{self.rules.literal(before)} {self._inside().value(items, after)}".strip()
        inner = repeated(item, "" if nested else self._separator(","), least, most)
        return inner if nested else f'"[" {inner} "]"'

    def _object(self, schema: Schema) -> str:
        nested, gemma = self.style.kind == "nested", self.style.kind == "gemma"
        properties, extra = (
            schema.get("properties", {}),
            schema.get("additionalProperties", "properties" not in schema),
        )
        required = set(schema.get("required", ()))
        members = []
        if missing := required - set(properties):
            raise ValueError(f"required: {sorted(missing)[0]!r} is not among the properties")
        for key in sorted(properties, key=str.lower) if self.by_key else properties:
            before, after = self._tag(key) if nested else (self._key(key), "")
            literal = self.rules.literal(before) if nested or gemma else before
            members.append((f"{literal} {self._inside().value(properties[key], after)}", key in required))
        free = ""
        if extra is not False and not nested:
            free = f"{self._free_key(list(properties))} {self._inside().value({} if extra is True else extra)}"
        inner = sequence(self.rules, members, "" if nested else self._separator(","), free)
        return inner if nested else f'"{{" {inner} "}}"'

    def _separator(self, sign: str) -> str:
        if self.style.kind == "gemma":
            return json.dumps(sign)
        options = self.rules.tight["item_separator" if sign == "," else "key_separator"]
        return self.rules.rule(f"/{options}/", terminal=True)

    def _key(self, key: str) -> str:
        """Return a member's key with the colon after it: for Gemma the text, else a body. Raises ValueError."""
        if self.style.kind == "gemma":
            check_key(key, r"[^\s:{}\[\],]+")
            return f"{key}:"
        if not self.style.allows(dumps(key)):
            raise ValueError(f"properties: {key!r} contains a mark of this model's tool calls")
        texts = [dumps(key), repr(key)] if self.style.is_python else [dumps(key)]
        keys = self.rules.either(self.rules.literal(text) for text in texts)
        return f"{keys} {self._separator(':')}"

    def _free_key(self, declared: Sequence[str]) -> str:
        if self.style.kind == "gemma":
            names = "".join(f" & ~/{pattern(each)}:/" for each in declared)
            return self.rules.rule(f"/[A-Za-z_][A-Za-z0-9_-]*:/{names}", terminal=True)
        names = "".join(f" & ~/{pattern(dumps(each))}/" for each in declared)
        plain = f'/"[^"\\\\\\x00-\\x1f\\x7f]*"/{names} & ~/{containing(self.style.mark or chr(0))}/'
        keys = [self.rules.rule(plain, terminal=True)]
        if self.style.is_python:
            names = "".join(f" & ~/{pattern(repr(each))}/" for each in declared)
            keys.append(self.rules.rule(f"/'[^'\\\\\\x00-\\x1f\\x7f]*'/{names}", terminal=True))
        return f"{self.rules.either(keys)} {self._separator(':')}"

    def _tag(self, key: str) -> tuple[str, str]:
        check_key(key, "[^<>/]+")
        return f"{self.style.mark}<{key}>", f"{self.style.mark}</{key}>"


def excluded(types: set[str]) -> list[str]:
    """Return the regular expressions of texts that are not read as strings if the schema allows these types.

    types: empty if it allows any.
    """
    if types == {"string"}:
        return []
    if not types:
        return [*dict.fromkeys(READ_AS.values()), f'{WHITE}"{ANY}']
    return list(dict.fromkeys(text for kind, text in READ_AS.items() if kind in types))


def check_key(key: str, allowed: str) -> None:
    """Raise ValueError unless `allowed`, a regular expression, matches all of a parameter's name."""
    if not regex.fullmatch(allowed, key):
        raise ValueError(f"properties: {key!r} cannot be written in this model's tool calls")


def repeated(item: str, separator: str, least: int, most: int | None) -> str:
    """Return the body of `least` to `most` items (None: any number) with separators between them.

    It is "" if `most` is 0 or less than `least`.
    """
    if most is not None and most < max(least, 1):
        return ""
    further = f"({separator} {item})" + _times(max(least - 1, 0), None if most is None else most - 1)
    return f"({item} {further})" + ("" if least else "?")


def _times(least: int, most: int | None) -> str:
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


def sequence(rules: LarkRules, members: list[tuple[str, bool]], separator: str, free: str = "") -> str:
    """Return the body of members (body, required) in this order; those that are not required may be missing.

    separator: between members; "" for none. free: body of further members, any number of which may follow; "" for
    none. `free` is ignored without a separator.
    """
    if not separator:
        return " ".join(body if required else f"({body})?" for body, required in members)
    rest, alternatives, optional = f"({separator} {free})*" if free else "", list[str](), True
    firsts = [f"{free} {rest}"] if free else []
    for body, required in reversed(members):
        firsts = [f"{body} {rest}", *([] if required else firsts)]
        optional = optional and not required
        rest = f"{separator} {body} {rest}" if required else f"({separator} {body})? {rest}"
        rest = rules.rule(rest) if len(rest) > 40 else rest
    alternatives = firsts
    if not alternatives:
        return ""
    return f"({' | '.join(alternatives)})" + ("?" if optional else "")
