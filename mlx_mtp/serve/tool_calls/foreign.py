"""Calls that only a parser of the tokenizer's own can read, between marks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import regex

from .call_format import Reading, ToolCall
from .schema import Tools, dumps

Parser = Callable[[str, Any], Any]


@dataclass(frozen=True)
class ForeignCalls:
    """The format of a parser that returns one {"name", "arguments"} or several. end: "" if there is no end mark."""

    start: str
    end: str
    parse: Parser

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return regex.compile(regex.escape(self.start))

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """As `CallFormat.read`. A block ends at the first end mark in front of which the parser finds calls."""
        calls: list[ToolCall] = []
        end = 0
        while text.startswith(self.start, end):
            found = self._block(text, end + len(self.start), tools, complete)
            if found is None:
                break
            calls, end = calls + found.calls, found.end
            end += len(text[end:]) - len(text[end:].lstrip()) if text[end:].lstrip().startswith(self.start) else 0
        return Reading(calls, end) if calls else None

    def _block(self, text: str, begin: int, tools: Tools, complete: bool) -> Reading | None:
        end = text.find(self.end, begin) if self.end else -1
        while end >= 0:
            if calls := self._parsed(text[begin:end], tools):
                return Reading(calls, end + len(self.end))
            end = text.find(self.end, end + 1)
        calls = self._parsed(text[begin:], tools) if complete else []
        return Reading(calls, len(text)) if calls else None

    def _parsed(self, text: str, tools: Tools) -> list[ToolCall]:
        """The calls of a block; none where the parser refuses it, or a name was not offered."""
        try:
            found = self.parse(text, tools.offered)
            found = found if isinstance(found, list) else [found]
            calls = [(call["name"], call.get("arguments", {})) for call in found]
        except Exception:  # a parser of others may raise anything
            return []
        if not all(name in tools.names for name, _ in calls):
            return []
        return [ToolCall(name, given if isinstance(given, str) else dumps(given)) for name, given in calls]
