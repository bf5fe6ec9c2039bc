"""Parse the JSON object in a request's body, within limits of text, structure and nesting."""

import json
import math
import re
import secrets
from functools import partial
from typing import Any

from .departure import check_client
from .fields import Refused

DEPTH = 64  # maximum nesting of a JSON body
MOST_TEXT = 8 * 10**6  # bytes without base64 data: each may take four bytes in memory, in several copies
MOST_VALUES, MOST_STRINGS, MOST_CONTAINERS = 1_000_000, 100_000, 50_000  # 0.2 seconds of the GIL
LONG = 1 << 16  # bytes of a string from which it may be base64 data
CONVERSATIONS = ("messages", "input")  # whose earlier messages may contain anything; `entries_of` checks them
MOST_QUOTES = 1_000_000  # of a body in which base64 data is found
MARK = f"\ufdd4{secrets.token_hex(8)}:"  # random, so that no client can write it
BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\\"  # and the \ of \n and \/
ESCAPED = re.compile(rb"\\u00(?:2[bBfF]|3[dD])")  # + / = of base64, of which .NET escapes the first
TOO_LARGE = "the body has more than {most:,} {what}; send fewer"


def parsed_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a body.

    Raises Refused for text that is no UTF-8, other content, more than the limits of this module, and, except in the
    conversation, for lone surrogates and numbers with a fraction or an exponent that overflow float64. Raises
    ClientDisconnect as `check_client`.
    """
    content, data = _without_data(content.removeprefix(b"\xef\xbb\xbf"))
    _check_structure(content)
    check_client()
    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        raise Refused(f"the body is not UTF-8: byte {e.start} is 0x{content[e.start]:02x}") from None
    try:
        body = json.loads(text, parse_constant=_no_constant, parse_float=partial(_float, infinite := list[str]()))
    except (ValueError, RecursionError) as e:
        raise Refused(f"the body cannot be read as JSON: {str(e)[:200]}") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    _complete(body, data)
    if infinite or "\\ud" in text.lower():
        for name, value in body.items():
            if name not in CONVERSATIONS or not isinstance(value, list):
                _check_text(name, value)
    return body


def _without_data(content: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return (a body in which a text with MARK replaces each base64 string, these strings by their texts).

    A body of at most MOST_TEXT is returned unchanged. Raises Refused if more than MOST_TEXT is left.
    """
    data: dict[str, bytes] = {}
    if len(content) > MOST_TEXT and content.count(b'"') <= MOST_QUOTES:
        parts = content.split(b'"')
        for i, part in enumerate(parts):
            if len(part) > LONG and _is_data(part) and not parts[i - 1].endswith(b"\\"):
                data[name := f"{MARK}{len(data)}"] = part
                parts[i] = name.encode()
        content = b'"'.join(parts)
    if len(content) > MOST_TEXT:
        more = "without pictures in base64; send less text"
        raise Refused(f"the body has more than {MOST_TEXT:,} bytes {more}", status=413)
    return content, data


def _is_data(part: bytes) -> bool:
    """Return whether bytes between two quotes are a JSON string of base64, perhaps in a `data:` URL."""
    if part.startswith(b"data:"):
        part = part.partition(b",")[2]
    part = ESCAPED.sub(b"", part)
    return not (part.translate(None, BASE64) or part.endswith(b"\\") or b"\\u" in part)


def _check_structure(content: bytes) -> None:
    """Raise Refused for a body with more strings, containers or values than allowed, before any is parsed."""
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_number(content.count(b'"') // 2, MOST_STRINGS, "strings")
    outside = b"".join(content.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    _check_number(containers, MOST_CONTAINERS, "objects and lists")
    _check_number(containers + outside.count(b",") + 1, MOST_VALUES, "values")


def _check_number(found: int, most: int, what: str) -> None:
    if found > most:
        raise Refused(TOO_LARGE.format(most=most, what=what), status=413)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _float(infinite: list[str], digits: str) -> float:
    """Return a number; append its digits to `infinite` if it overflows."""
    found = float(digits)
    if math.isinf(found):
        infinite.append(digits)
    return found


def _check_text(name: str, value: Any) -> None:
    """Raise Refused for a field that a response cannot repeat: with lone surrogates, or an infinite number."""
    try:
        json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise Refused(f"{ascii(name)[:80]}: allowed are valid Unicode and finite numbers") from None


def _complete(body: dict[str, Any], data: dict[str, bytes]) -> None:
    """Put base64 strings back into a parsed body; raises Refused for nesting deeper than DEPTH."""
    left, level = len(data), list[Any]([body])
    for _ in range(DEPTH):
        inner: list[Any] = []
        for found in level:
            check_client()
            for key, value in found.items() if isinstance(found, dict) else enumerate(found):
                if isinstance(value, (dict, list)):
                    inner.append(value)
                elif data and isinstance(value, str) and value in data:
                    found[key], left = json.loads(b'"' + data[value] + b'"'), left - 1
        level = inner
    if level:
        raise Refused(f"the body is nested deeper than {DEPTH} levels")
    if left:
        raise Refused(f"the body has a name of more than {LONG} bytes")
