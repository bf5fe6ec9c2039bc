"""Read Gemma's calls: `call:NAME{key:value,...}` with strings between marks of their own instead of quotes."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of, behind_space
from .schema import Tools, dumps, strict

KEY = regex.compile(r"\s*(?P<key>[^\s:{}\[\],]++(?: ++[^\s:{}\[\],]++)*+)\s*:\s*")
SCALAR = regex.compile(r"[^,{}\[\]<]+")
# Nested values; ways to read a call's arguments, and the characters of all of them.
DEEPEST, MOST_READINGS, MOST_WRITTEN = 60, 1000, 500_000


@dataclass(frozen=True)
class GemmaCalls:
    """The format with these marks around a block of calls, and this one at both ends of a string."""

    start: str
    end: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return _opening(self.start, tuple(tools.names))

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """As `CallFormat.read`. A string ends at the first quote mark behind which the rest can be read."""
        calls: list[ToolCall] = []
        head, values, end = self.opening(tools), Values(text, self.quote), 0
        while match := head.match(text, behind_space(text, end)):
            found = self._arguments(values, match.end() - 1, head, complete)
            if found is None:
                break
            calls.append(ToolCall(match["name"], found.json))
            behind = behind_space(text, found.end)
            end = behind + len(self.end) if text.startswith(self.end, behind) else found.end
        return Reading(calls, end) if calls else None

    def _arguments(self, values: "Values", at: int, head: regex.Pattern[str], complete: bool) -> "Value | None":
        """The shortest object at `at` behind which calls go on to the end, else one behind which its call ends."""
        closed, first, written = None, None, 0
        try:
            for value in itertools.islice(values.members(at + 1, "", "}", 0), MOST_READINGS):
                is_closed = self._is_closed(values.text, value.end, head, complete)
                if is_closed and self._goes_on(values.text, value.end, head):
                    return value
                closed, first = closed or (value if is_closed else None), first or value
                if (written := written + len(value.json)) > MOST_WRITTEN:
                    break
        except RecursionError:
            return None
        return closed or first

    def _is_closed(self, text: str, at: int, head: regex.Pattern[str], complete: bool) -> bool:
        """Whether the end of a call, or the next call, is at `at`."""
        behind = behind_space(text, at)
        closed = text.startswith(self.end, behind) or (complete and behind == len(text))
        return closed or bool(head.match(text, behind))

    def _goes_on(self, text: str, at: int, head: regex.Pattern[str]) -> bool:
        """Whether nothing but further calls follows the end of a call at `at`."""
        behind = behind_space(text, at)
        behind = behind_space(text, behind + len(self.end)) if text.startswith(self.end, behind) else behind
        return behind == len(text) or bool(head.match(text, behind))


class Value(NamedTuple):
    """The JSON of a value, and the index behind it in the text."""

    json: str
    end: int


class Values:
    """The ways to read values of a text. quote: the mark at both ends of a string."""

    def __init__(self, text: str, quote: str):
        self.text, self.quote = text, quote
        self._unreadable: set[tuple[int, str]] = set()  # bounds the search

    def members(self, at: int, before: str, close: str, depth: int) -> Iterator[Value]:
        """The lists or objects whose members go on at `at`, behind those that `before` has as JSON."""
        if (at, close) in self._unreadable or depth > DEEPEST:
            return
        readable = False
        for value in self._members(behind_space(self.text, at), before, close, depth):
            readable = True
            yield value
        if not readable:
            self._unreadable.add((at, close))

    def _members(self, at: int, before: str, close: str, depth: int) -> Iterator[Value]:
        if self.text.startswith(close, at):
            yield Value(("[" if close == "]" else "{") + before + close, at + 1)
            return
        key = ""
        if close == "}":
            if not (match := KEY.match(self.text, at)):
                return
            key, at = f"{dumps(match['key'].removeprefix(self.quote).removesuffix(self.quote))}: ", match.end()
        for value in self._values(at, depth):
            behind = behind_space(self.text, value.end)
            member = f"{before}{', ' if before else ''}{key}{value.json}"
            if self.text.startswith(",", behind):
                yield from self.members(behind + 1, member, close, depth)
            elif self.text.startswith(close, behind):
                yield from self.members(behind, member, close, depth)

    def _values(self, at: int, depth: int) -> Iterator[Value]:
        """The values that may begin at `at`, the shortest first."""
        text, at = self.text, behind_space(self.text, at)
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.find(self.quote, begin)
            while end >= 0:
                yield Value(dumps(text[begin:end]), end + len(self.quote))
                end = text.find(self.quote, end + 1)
        elif text.startswith(("{", "["), at):
            yield from self.members(at + 1, "", "}" if text[at] == "{" else "]", depth + 1)
        elif scalar := SCALAR.match(text, at):
            try:
                yield Value(strict(scalar[0].strip()), scalar.end())
            except ValueError:
                yield Value(dumps(scalar[0].strip()), scalar.end())


@functools.lru_cache(maxsize=64)
def _opening(start: str, names: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile(rf"(?:{regex.escape(start)}\s*)?call:(?P<name>{any_of(list(names))})\s*\{{")
