"""Read tool calls in Python's syntax, as LFM2 and others write them: `[weather(city="Bonn", days=2), ...]`."""

import ast
import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of, skip_space
from .schema import Tools, dumps

# Bounds on the search where strings are not escaped: ends of arguments, and those after a list without an end mark.
MOST_STEPS, MOST_MORE = 5000, 30
JSON_CONSTANTS = {"true": True, "false": False, "null": None}
NAME = r"[\w.$-]++(?: ++[\w.$-]++)*+"  # a parameter's name, which need not be a Python identifier
KEY = regex.compile(rf"\s*,?\s*(?P<key>{NAME})\s*=\s*")
TOKENS = regex.compile(
    r"""'(?:\\.|[^'\\\n])*+'|"(?:\\.|[^"\\\n])*+"|(?P<open>[\[({])|(?P<close>[\])}])|,""", regex.DOTALL
)
CALL_END, LIST_END = regex.compile(r"\s*,?\s*\)"), regex.compile(r"\s*,?\s*\]")
# What follows a value: the next argument, or the call's end with the next call or the list's end.
VALUE_END = regex.compile(rf"(?=\s*(?:,\s*{NAME}\s*=|\)\s*(?:,\s*[\w.-]+\s*\(|\])))")


@dataclass(frozen=True)
class PythonicCalls:
    """A format with the marks `start` and `end` before and after a list of calls.

    escaped: try to read all arguments as Python literals; if not, or if they are none, strings are any text between
    quotes.
    """

    start: str
    end: str
    escaped: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return regex.compile(rf"\s*(?:{regex.escape(self.start)}\s*)?\[\s*(?:{any_of(tools.names)})\s*\(")

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """Implement `CallFormat.read`. A text may start with several lists."""
        calls: list[ToolCall] = []
        pattern, end, unescaped = self.opening(tools), 0, UnescapedReader(text, self.end, tools)
        while opening := pattern.match(text, end):
            begin = text.index("[", opening.start())
            literals = _literals(text, begin, tools) if self.escaped else None
            if (found := literals or unescaped.read(begin)) is None:
                break
            after = skip_space(text, found.end)
            end = after + len(self.end) if text.startswith(self.end, after) else found.end
            calls += found.calls
        return Reading(calls, end) if calls else None


def _call_pattern(tools: Tools) -> regex.Pattern[str]:
    return regex.compile(rf"\s*,?\s*(?P<name>{any_of(tools.names)})\s*\(")


def _literals(text: str, begin: int, tools: Tools) -> Reading | None:
    """Return the calls of the list at `begin`.

    None if it is empty or incomplete, or contains anything but calls of offered tools with literals by name.
    """
    name, at, calls = _call_pattern(tools), begin + 1, list[ToolCall]()
    while call := name.match(text, at):
        at, arguments = call.end(), dict[str, Any]()
        while key := KEY.match(text, at):
            if (end := _literal_end(text, key.end())) is None:
                return None
            try:
                arguments[key["key"]] = _parsed(text[key.end() : end].strip())
            except ValueError:
                return None
            at = end
        if not (end := CALL_END.match(text, at)):
            return None
        calls.append(ToolCall(call["name"], dumps(arguments)))
        at = end.end()
    end = LIST_END.match(text, at)
    return Reading(calls, end.end()) if calls and end else None


def _literal_end(text: str, at: int) -> int | None:
    """Return the index of the comma or bracket that ends the literal at `at`; None if nothing ends it."""
    depth = 0
    for token in TOKENS.finditer(text, at):
        if not depth and (token["close"] or token[0] == ","):
            return token.start()
        depth += bool(token["open"]) - bool(token["close"])
    return None


class ListPosition(NamedTuple):
    """A position in a list of calls. calls: the names and arguments read so far. inside: the last call is open."""

    at: int
    calls: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    inside: bool


class UnescapedReader:
    """Reads lists of calls whose strings are any text between quotes; the shortest possible values count."""

    def __init__(self, text: str, end: str, tools: Tools):
        self._text, self._end, self._steps = text, end, 0
        self._call = _call_pattern(tools)

    def read(self, begin: int) -> Reading | None:
        """Return the calls of the list at `begin`, if possible so that the end mark follows; None if unreadable."""
        stack, unclosed, last = [iter([ListPosition(begin + 1, (), False)])], None, MOST_STEPS
        while stack and self._steps < last:
            if (position := next(stack[-1], None)) is None:
                stack.pop()
            elif position.inside:
                stack.append(self._in_call(position))
            elif call := self._call.match(self._text, position.at):
                stack.append(iter([ListPosition(call.end(), (*position.calls, (call["name"], ())), True)]))
            elif position.calls and self._text.startswith("]", at := skip_space(self._text, position.at)):
                calls = [(name, {key: _unescaped(value) for key, value in given}) for name, given in position.calls]
                found = Reading([ToolCall(name, dumps(arguments)) for name, arguments in calls], at + 1)
                if self._text.startswith(self._end, skip_space(self._text, at + 1)):
                    return found
                unclosed = unclosed or found
                last = min(last, self._steps + MOST_MORE)
        return unclosed

    def _in_call(self, position: ListPosition) -> Iterator[ListPosition]:
        """Yield the position after the call's end, or those after each possible end of its next argument."""
        at = skip_space(self._text, position.at)
        if self._text.startswith(")", at):
            yield position._replace(at=at + 1, inside=False)
            return
        if not (key := KEY.match(self._text, position.at)):
            return
        (name, given), start = position.calls[-1], key.end()
        for end in itertools.chain(self._container_end(start), self._ends(start)):
            value = self._text[start:end].rstrip()
            if value[:1] in ("'", '"') and (len(value) < 2 or value[-1] != value[0]):
                continue
            calls = (*position.calls[:-1], (name, (*given, (key["key"], value))))
            yield ListPosition(end, calls, True)
            if value[:1] not in ("'", '"', "{", "["):
                return

    def _ends(self, start: int) -> Iterator[int]:
        """Yield the indices at which the value at `start` may end; none after MOST_STEPS of the whole text."""
        for found in VALUE_END.finditer(self._text, start + 1):
            self._steps += 1
            if self._steps > MOST_STEPS:
                return
            yield found.start()

    def _container_end(self, start: int) -> Iterator[int]:
        """Yield the index after a list or dict at `start` if that is a literal; its strings may contain any text."""
        end = _literal_end(self._text, start) if self._text[start : start + 1] in ("{", "[") else None
        if end is not None:
            with suppress(ValueError):
                _parsed(self._text[start:end].strip())
                yield end


def _unescaped(text: str) -> Any:
    """Return the value of an argument: the text between quotes, the value of a Python literal, or the text itself."""
    if text[:1] in ("'", '"'):
        return text[1:-1]
    try:
        return _parsed(text)
    except ValueError:
        return text


def _parsed(text: str) -> Any:
    """Return the value of a Python literal, as `_value`. Raises ValueError if the text is no literal."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise ValueError("no literal") from e


def _value(node: ast.expr) -> Any:
    """Return the value of a literal. `true`, `false` and `null` are allowed too; infinities and NaN become None.

    Tuples become lists, and keys strings. Raises ValueError or TypeError for other code and what JSON cannot express.
    """
    if isinstance(node, ast.Name) and node.id in JSON_CONSTANTS:
        return JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(each) for key, each in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    dumps(value)  # raises for sets, bytes, `...`, and integers with too many digits
    return None if isinstance(value, float) and not math.isfinite(value) else value
