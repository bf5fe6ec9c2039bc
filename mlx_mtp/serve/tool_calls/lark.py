"""Write grammars in llguidance's dialect of Lark: rules, literals with special tokens, JSON, and raw text."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...grammar.forms import honoured
from .schema import Schema

SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
ANY = r"(?s:.*)"


def pattern(text: str) -> str:
    """Return a regular expression that matches this text only."""
    return "".join(ESCAPES.get(letter) or SYNTAX.sub(r"\\\g<0>", letter) for letter in text)


def containing(text: str) -> str:
    """Return a regular expression that matches, as a whole, each text that contains this one."""
    return f"{ANY}{pattern(text)}{ANY}"


class LarkRules:
    """The rules of one grammar, by name. A body is the right side of a rule.

    special: ids of the special tokens by their texts; only an id in a rule matches one. spaces: llguidance's options
    for JSON. tight: those for JSON with white space next to its separators only; such JSON can stand where raw text
    is allowed too, because its white space is no lexeme of its own.
    """

    def __init__(self, special: Mapping[str, int], spaces: Mapping[str, Any]):
        self._special, self._spaces = special, spaces
        marks = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._rules: dict[str, str] = {}  # by name
        self._names: dict[str, str] = {}  # by key
        white = spaces.get("whitespace_pattern")
        between = f"(?:{white})?" if spaces["whitespace_flexible"] and white else ""
        self.tight = {
            **spaces,
            **{key: f"{between}{spaces[key]}{between}" for key in ("item_separator", "key_separator")},
            "whitespace_flexible": False,
            "whitespace_pattern": None,
        }

    def text(self, start: str) -> str:
        """Return the grammar as text; start: the body of its rule `start`, which is the first."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])

    def rule(self, body: str, *, terminal: bool = False) -> str:
        """Return the name of a rule with this body, which is added once. terminal: the rule is one lexeme."""
        key = f"{terminal} {body}"
        if key not in self._names:
            self._names[key] = name = f"{'T' if terminal else 'r'}{len(self._names)}"
            self._rules[name] = body
        return self._names[key]

    def begun(self, key: str) -> tuple[str, bool]:
        """Return the name of the rule for a key, and whether it is new; then `complete` must give its body."""
        new = key not in self._names
        return self._names.setdefault(key, f"r{len(self._names)}"), new

    def complete(self, name: str, body: str) -> None:
        self._rules[name] = body

    def either(self, bodies: Iterable[str]) -> str:
        """Return the name of a rule that allows any of these bodies; a single body is returned itself."""
        found = list(dict.fromkeys(bodies))
        return found[0] if len(found) == 1 else self.rule(" | ".join(found))

    def literal(self, text: str) -> str:
        """Return the body of a literal text: strings, and special tokens by id; "" for no text."""
        parts, at = [], 0
        for mark in self._marks.finditer(text):
            parts += [text[at : mark.start()], mark]
            at = mark.end()
        parts.append(text[at:])
        return " ".join(
            json.dumps(part, ensure_ascii=False) if isinstance(part, str) else f"<[{self._special[part[0]]}]>"
            for part in parts
            if part
        )

    def first_text(self, text: str) -> str:
        """Return the part of a text before its first special token."""
        mark = self._marks.search(text)
        return text[: mark.start()] if mark else text

    def special_ids(self, text: str) -> list[int]:
        """Return the ids of the special tokens in a text."""
        return [self._special[mark[0]] for mark in self._marks.finditer(text)]

    def last_mark(self, text: str) -> tuple[str, int] | None:
        """Return the special token with which a text ends, and its id; None if it ends with none."""
        found = next((mark[0] for mark in self._marks.finditer(text) if mark.end() == len(text)), None)
        return None if found is None else (found, self._special[found])

    def json(self, schema: Schema, *, tight: bool = False) -> str:
        """Return the name of the rule of a JSON value that fits a schema. tight: with the options `tight`.

        Raises ValueError for a schema that cannot be enforced exactly.
        """
        found, own = honoured(schema)
        options = {**(self.tight if tight else self._spaces), **own}
        return self.rule("%json " + json.dumps({**found, "x-guidance": options}, ensure_ascii=False))

    def free(self, mark: str) -> str:
        """Return the body of a text that does not contain `mark`; it may be empty."""
        return self.rule(f"/(?s:.+)/ & ~/{containing(mark)}/", terminal=True) + "?"

    def raw(
        self, close: str, *, patterns: Sequence[str] = (), without: Sequence[str] = (), mark: str | None = None
    ) -> str:
        """Return the body of a text and the literal `close` after it.

        The text matches all of `patterns` and none of `without`, and does not contain `mark`, by default `close`
        ("": it may contain any). It is one lexeme with the part of `close` before the first special token, because a
        lexeme takes as much text as it can.
        """
        mark = close if mark is None else mark
        excluded = [*([containing(mark)] if mark else []), *without]
        text = " & ".join(f"/{each}/" for each in patterns) or f"/{ANY}/"
        text += "".join(f" & ~/{each}/" for each in excluded)
        before = self.first_text(close)
        after = self.literal(close[len(before) :])
        if before:
            return f"{self.rule(f'({text}) {self.literal(before)}', terminal=True)} {after}".strip()
        empty = all(re.fullmatch(each, "") for each in patterns) and not any(re.fullmatch(e, "") for e in excluded)
        return f"{self.rule(f'{text} & /(?s:.+)/', terminal=True)}{'?' if empty else ''} {after}"
