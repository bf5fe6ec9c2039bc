"""Calls as Python writes them, of LFM2 and others: `[weather(city="Bonn", days=2), ...]` between marks."""

import ast
import functools
import math
from dataclasses import dataclass
from typing import Any

import regex

from .call_format import Reading, ToolCall, any_of
from .schema import Tools, dumps

MOST_ENDS = 200  # brackets that are tried as the end of the list
JSON_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonicCalls:
    """The format with these marks around a list of calls."""

    start: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return _opening(self.start, tuple(tools.names))

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """As `CallFormat.read`. The list ends at the first bracket at which it is Python."""
        calls: list[ToolCall] = []
        end = 0
        while opening := _opening(self.start, tuple(tools.names)).match(text, end):
            found = self._list(text, text.index("[", opening.start() if not calls else end), tools)
            if found is None:
                break
            calls, end = calls + found.calls, found.end
        return Reading(calls, end) if calls else None

    def _list(self, text: str, begin: int, tools: Tools) -> Reading | None:
        bracket = begin
        for _ in range(MOST_ENDS):
            if (bracket := text.find("]", bracket + 1)) < 0:
                return None
            try:
                parsed = ast.parse(text[begin : bracket + 1], mode="eval").body
                calls = [_call(each, tools) for each in parsed.elts] if isinstance(parsed, ast.List) else []
            except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
                continue
            if calls:
                behind = regex.compile(rf"\s*{regex.escape(self.end)}").match(text, bracket + 1)
                return Reading(calls, behind.end() if behind else bracket + 1)
        return None


@functools.lru_cache(maxsize=64)
def _opening(start: str, names: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile(rf"\s*(?:{regex.escape(start)}\s*)?\[\s*(?:{any_of(list(names))})\s*\(")


def _call(node: ast.expr, tools: Tools) -> ToolCall:
    """A call with keywords only; raises ValueError where a node is anything else."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or node.args or name not in tools.names:
        raise ValueError("no call of an offered function")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("arguments without names")
    return ToolCall(name, dumps(arguments))


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
