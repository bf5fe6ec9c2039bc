"""Bound the size of clients' grammars, and the time to compile them outside of the engine's turn."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from ..machine.errors import with_type
from .fields import Refused
from .schema_paths import NAMED, keywords

T = TypeVar("T")
MAX_BYTES = 100_000  # of a schema, as JSON, or a list of choices
MAX_TEXT = 20_000  # characters of a regular expression or a Lark grammar
MAX_PROPERTIES = 2000  # of all objects together: the time to compile them grows with their square
MAX_FIXED = 4000  # characters of a const, a value of enum, a name, and of the shortest match of a pattern
MAX_SECONDS = 5.0  # to compile a grammar
COMPILERS = threading.Semaphore(2)  # at most so many grammars are compiled at once
REPEATED = re.compile(r"\{(\d+)(?:,\d*)?\}")


def compiled_within(make: Callable[[], T], field: str, param: str) -> T:
    """Return make(), called on another thread, or raise its ValueError; other exceptions become one.

    Raises Refused, with the field, after MAX_SECONDS (400; the thread is abandoned), or while too many compile (503).
    """
    if not COMPILERS.acquire(timeout=MAX_SECONDS):
        raise Refused(f"{field}: other grammars are being compiled; try again later", status=503, param=param)
    found: Future[T] = Future()
    # No daemon: if the process ended while Rust compiles, it would crash.
    threading.Thread(target=_run, args=(make, found), name="mlx-mtp grammar").start()
    try:
        return found.result(MAX_SECONDS)
    except TimeoutError:
        raise Refused(f"{field}: takes longer than {MAX_SECONDS:.0f} s to compile", param=param) from None


def _run(make: Callable[[], T], found: Future[T]) -> None:
    try:
        found.set_result(make())
    except BaseException as e:  # a panic of a Rust library is no Exception
        found.set_exception(e if isinstance(e, ValueError) else ValueError(f"cannot be compiled ({with_type(e)})"))
    finally:
        COMPILERS.release()


def check_schema(schema: Any) -> None:
    """Raise ValueError, which names the key, for a schema whose grammar is too large."""
    if (size := len(json.dumps(schema))) > MAX_BYTES:
        raise ValueError(f"the schema has {size} bytes; allowed are {MAX_BYTES}")
    properties = 0
    for _, name, value in keywords(schema):
        properties += len(value) if name == "properties" and isinstance(value, dict) else 0
        if properties > MAX_PROPERTIES:
            raise ValueError(f"properties: allowed are at most {MAX_PROPERTIES} in the schema")
        if (length := max(_fixed(name, value), default=0)) > MAX_FIXED:
            raise ValueError(f"{name}: a text of {length} characters; allowed are {MAX_FIXED}")


def _fixed(name: str, value: Any) -> Iterator[int]:
    """Yield the lengths of the texts that a keyword fixes, or of the shortest that its patterns match."""
    if name == "const":
        yield len(json.dumps(value))
    elif name == "enum" and isinstance(value, list):
        yield from (len(json.dumps(each)) for each in value)
    elif name == "pattern" and isinstance(value, str):
        yield least_length(value)
    elif name in NAMED and isinstance(value, dict):
        yield from map(least_length if name == "patternProperties" else len, value)


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
