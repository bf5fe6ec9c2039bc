"""Read calls as Python writes them, of LFM2 and others: `[weather(city="Bonn", days=2), ...]` between marks."""

import ast
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of, behind_space
from .schema import Tools, dumps

# Ends of arguments that are tried where strings are not escaped, and those behind a list that no end mark follows.
MOST_STEPS, MOST_MORE = 5000, 30
JSON_CONSTANTS = {"true": True, "false": False, "null": None}
NAME = r"[\w.$-]++(?: ++[\w.$-]++)*+"  # of a parameter, which may be no identifier of Python's
KEY = regex.compile(rf"\s*,?\s*(?P<key>{NAME})\s*=\s*")
TOKENS = regex.compile(
    r"""'(?:\\.|[^'\\\n])*+'|"(?:\\.|[^"\\\n])*+"|(?P<open>[\[({])|(?P<close>[\])}])|,""", regex.DOTALL
)
CALL_END, LIST_END = regex.compile(r"\s*,?\s*\)"), regex.compile(r"\s*,?\s*\]")
# Behind a value: the next argument, or the end of the call and the next call or the end of the list.
VALUE_END = regex.compile(rf"(?=\s*(?:,\s*{NAME}\s*=|\)\s*(?:,\s*[\w.-]+\s*\(|\])))")


@dataclass(frozen=True)
class PythonicCalls:
    """The format with these marks around a list of calls. escaped: strings are literals, else text between quotes."""

    start: str
    end: str
    escaped: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return _opening(self.start, tuple(tools.names))

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """As `CallFormat.read`. The list ends at the first bracket at which it can be read."""
        calls: list[ToolCall] = []
        end, unescaped = 0, Unescaped(text, self.end, tools)
        while opening := self.opening(tools).match(text, end):
            begin = text.index("[", opening.start())
            literals = _literals(text, begin, tools) if self.escaped else None
            found = self._with_end(text, literals or unescaped.read(begin))
            if found is None:
                break
            calls, end = calls + found.calls, found.end
        return Reading(calls, end) if calls else None

    def _with_end(self, text: str, found: Reading | None) -> Reading | None:
        """A list and the end mark behind it, if one is there."""
        if found is None:
            return None
        behind = behind_space(text, found.end)
        return Reading(found.calls, behind + len(self.end) if text.startswith(self.end, behind) else found.end)


def _literals(text: str, begin: int, tools: Tools) -> Reading | None:
    """The calls of a list whose arguments are Python's literals; None where they are anything else."""
    name, at, calls = _call_pattern(tuple(tools.names)), begin + 1, list[ToolCall]()
    while call := name.match(text, at):
        at, arguments = call.end(), dict[str, Any]()
        while key := KEY.match(text, at):
            if (end := _literal_end(text, key.end())) is None:
                return None
            try:
                arguments[key["key"]] = _value(ast.parse(text[key.end() : end].strip(), mode="eval").body)
            except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
                return None
            at = end
        if not (end := CALL_END.match(text, at)):
            return None
        calls.append(ToolCall(call["name"], dumps(arguments)))
        at = end.end()
    end = LIST_END.match(text, at)
    return Reading(calls, end.end()) if calls and end else None


def _literal_end(text: str, at: int) -> int | None:
    """The index of the comma or bracket that ends the literal which begins at `at`; None where none does."""
    depth = 0
    for token in TOKENS.finditer(text, at):
        if not depth and (token["close"] or token[0] == ","):
            return token.start()
        depth += bool(token["open"]) - bool(token["close"])
    return None


class Place(NamedTuple):
    """A position behind a call's name, its arguments or its end, and what was read up to it."""

    at: int
    calls: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    inside: bool


class Unescaped:
    """The readings of a list in which strings are any text between quotes, the shortest values first."""

    def __init__(self, text: str, end: str, tools: Tools):
        self._text, self._end, self._steps = text, end, 0
        self._call = _call_pattern(tuple(tools.names))

    def read(self, begin: int) -> Reading | None:
        """The calls of the list that begins at `begin`, preferably of one that the end mark follows."""
        stack, unclosed, last = [iter([Place(begin + 1, (), False)])], None, MOST_STEPS
        while stack and self._steps < last:
            if (place := next(stack[-1], None)) is None:
                stack.pop()
            elif place.inside:
                stack.append(self._in_call(place))
            elif call := self._call.match(self._text, place.at):
                stack.append(iter([Place(call.end(), (*place.calls, (call["name"], ())), True)]))
            elif place.calls and self._text.startswith("]", at := behind_space(self._text, place.at)):
                found = Reading([_unescaped_call(name, given) for name, given in place.calls], at + 1)
                if self._text.startswith(self._end, behind_space(self._text, at + 1)):
                    return found
                unclosed = unclosed or found
                last = min(last, self._steps + MOST_MORE)
        return unclosed

    def _in_call(self, place: Place) -> Iterator[Place]:
        """The places behind the call's end, or behind its next argument."""
        at = behind_space(self._text, place.at)
        if self._text.startswith(")", at):
            yield place._replace(at=at + 1, inside=False)
            return
        if not (key := KEY.match(self._text, place.at)):
            return
        (name, given), start = place.calls[-1], key.end()
        for found in VALUE_END.finditer(self._text, start + 1):
            self._steps += 1
            if self._steps > MOST_STEPS:
                return
            value = self._text[start : found.start()].rstrip()
            if value[:1] in ("'", '"') and (len(value) < 2 or value[-1] != value[0]):
                continue
            yield Place(found.start(), (*place.calls[:-1], (name, (*given, (key["key"], value)))), True)
            if value[:1] not in ("'", '"', "{", "["):
                return


def _unescaped_call(name: str, given: tuple[tuple[str, str], ...]) -> ToolCall:
    return ToolCall(name, dumps({key: _unescaped(value) for key, value in given}))


def _unescaped(text: str) -> Any:
    """The value that a text stands for: what is between quotes, or a literal; else the text itself."""
    if text[:1] in ("'", '"'):
        return text[1:-1]
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text


@functools.lru_cache(maxsize=64)
def _opening(start: str, names: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile(rf"\s*(?:{regex.escape(start)}\s*)?\[\s*(?:{any_of(list(names))})\s*\(")


@functools.lru_cache(maxsize=64)
def _call_pattern(names: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile(rf"\s*,?\s*(?P<name>{any_of(list(names))})\s*\(")


def _value(node: ast.expr) -> Any:
    """The value of a literal, in which `true`, `false` and `null` are allowed too; infinities become None."""
    if isinstance(node, ast.Name) and node.id in JSON_CONSTANTS:
        return JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(each) for key, each in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    return None if isinstance(value, float) and not math.isfinite(value) else value
