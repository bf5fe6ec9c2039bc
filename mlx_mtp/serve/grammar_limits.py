"""Bound the size of clients' grammars, and the time to compile them outside of the engine's turn."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from .fields import Refused

T = TypeVar("T")
MAX_BYTES = 100_000  # of a schema, as JSON, or a list of choices
MAX_TEXT = 20_000  # characters of a regular expression or a Lark grammar
MAX_PROPERTIES = 2000  # of all objects together: the time to compile them grows with their square
MAX_FIXED = 4000  # characters of a const, a value of enum, a name, and of the shortest match of a pattern
MAX_SECONDS = 5.0  # to compile a grammar
COMPILERS = threading.Semaphore(2)  # at most so many grammars are compiled at once
NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentRequired", "dependentSchemas")
REPEATED = re.compile(r"\{(\d+)(?:,\d*)?\}")


def compiled_within(make: Callable[[], T], field: str, param: str) -> T:
    """Return make(), called on another thread, which is abandoned after MAX_SECONDS.

    Raises Refused, with the field, for a ValueError, after MAX_SECONDS (400), or while too many compile (503).
    """
    if not COMPILERS.acquire(timeout=MAX_SECONDS):
        raise Refused(f"{field}: other grammars are being compiled; try again later", status=503, param=param)
    found: Future[T] = Future()
    threading.Thread(target=_run, args=(make, found), name="mlx-mtp grammar", daemon=True).start()
    try:
        return found.result(MAX_SECONDS)
    except TimeoutError:
        raise Refused(f"{field}: takes longer than {MAX_SECONDS:.0f} s to compile", param=param) from None
    except ValueError as e:
        raise Refused(f"{field}: {e}", param=param) from e


def _run(make: Callable[[], T], found: Future[T]) -> None:
    try:
        found.set_result(make())
    except BaseException as e:
        found.set_exception(e)
    finally:
        COMPILERS.release()


def check_schema(schema: Any) -> None:
    """Raise ValueError, which names the key, for a schema whose grammar is too large."""
    if (size := len(json.dumps(schema))) > MAX_BYTES:
        raise ValueError(f"the schema has {size} bytes; allowed are {MAX_BYTES}")
    properties = 0
    for key, value in _members(schema):
        if key == "properties" and isinstance(value, dict):
            properties += len(value)
            if properties > MAX_PROPERTIES:
                raise ValueError(f"properties: allowed are at most {MAX_PROPERTIES} in the schema")
        if key in NAMES and isinstance(value, dict):
            for name in value:
                _check_length(key, least_length(name) if key == "patternProperties" else len(name))
        if key == "pattern" and isinstance(value, str):
            _check_length(key, least_length(value))
        if key in ("const", "enum"):
            for each in [value] if key == "const" else value if isinstance(value, list) else ():
                _check_length(key, len(json.dumps(each)))


def _check_length(key: str, length: int) -> None:
    if length > MAX_FIXED:
        raise ValueError(f"{key}: a text of {length} characters; allowed are {MAX_FIXED}")


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all members of a JSON value's objects, at any depth."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield from each.items()
            pending += each.values()
        elif isinstance(each, list):
            pending += each


def check_text(text: str) -> None:
    """Raise ValueError for a regular expression or a Lark grammar that is too large."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"{len(text)} characters; allowed are {MAX_TEXT}")
    if (length := least_length(text)) > max(MAX_FIXED, len(text)):
        raise ValueError(f"repetitions of {length} characters; allowed are {MAX_FIXED}")


def least_length(pattern: str) -> int:
    """Estimate the length of a regular expression's shortest match, from above."""
    lengths, last, at = [0], [0], 0  # of each open group, and of its last item
    while at < len(pattern):
        sign, size = pattern[at], 1
        if repeated := REPEATED.match(pattern, at):
            lengths[-1] += last[-1] * (int(repeated[1]) - 1)
            last[-1], size = last[-1] * int(repeated[1]), len(repeated[0])
        elif sign == "(":
            lengths.append(0)
            last.append(0)
        elif sign == ")" and len(lengths) > 1:
            last.pop()
            last[-1] = lengths.pop()
            lengths[-1] += last[-1]
        else:
            last[-1], size = 1, 2 if sign == "\\" else 1
            lengths[-1] += 1
        at += size
    return sum(lengths)
