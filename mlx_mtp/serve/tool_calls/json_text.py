"""Find where JSON values start and end inside a text, without parsing them."""

from collections.abc import Iterator

import regex

STRING = r'"(?:\\.|[^"\\])*+"'
TOKENS = regex.compile(rf"{STRING}|[\[\]{{}}]", regex.DOTALL)
SCALAR = regex.compile(rf"{STRING}|[^\s,\]}}]++", regex.DOTALL)
MEMBER = regex.compile(rf"\s*,?\s*(?P<key>{STRING})\s*:\s*", regex.DOTALL)
LAST = regex.compile(r"\s*,?\s*\}")


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
