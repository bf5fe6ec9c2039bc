"""Read Gemma's tool calls: `call:NAME{key:value,...}`, whose strings are between special marks instead of quotes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of, skip_space
from .schema import PYTHON_CONSTANTS, Tools, dumps, strict

KEY = regex.compile(r"\s*(?P<key>[^\s:{}\[\],]++(?: ++[^\s:{}\[\],]++)*+)\s*:\s*")
SCALAR = regex.compile(r"[^,{}\[\]<]+")
# Bounds on the work for a hostile answer: depth of nesting, readings of a call's arguments, and their characters.
DEEPEST, MOST_READINGS, MOST_WRITTEN = 60, 1000, 500_000


@dataclass(frozen=True)
class GemmaCalls:
    """Gemma's format.

    start, end: marks before and after a block of calls. quote: the mark at both ends of a string.
    """

    start: str
    end: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return regex.compile(rf"(?:{regex.escape(self.start)}\s*)?call:(?P<name>{any_of(tools.names)})\s*\{{")

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """Implement `CallFormat.read`. A string may contain quote marks; `_arguments` chooses where strings end."""
        calls: list[ToolCall] = []
        head, values, end = self.opening(tools), ValueReader(text, self.quote), 0
        while match := head.match(text, skip_space(text, end)):
            found = self._arguments(values, match.end() - 1, head, complete)
            if found is None:
                break
            calls.append(ToolCall(match["name"], found.json))
            after = skip_space(text, found.end)
            end = after + len(self.end) if text.startswith(self.end, after) else found.end
        return Reading(calls, end) if calls else None

    def _arguments(self, values: "ValueReader", at: int, head: regex.Pattern[str], complete: bool) -> "Value | None":
        """Return the first object at `at` that only calls follow, else the first that ends a call, else the first.

        None if there is none. Objects differ in the ends of their strings; the shortest strings come first. head: the
        pattern of a call's start. complete: as in `CallFormat.read`.
        """
        closed, first, written = None, None, 0
        try:
            for value in itertools.islice(values.members(at + 1, "", "}", 0), MOST_READINGS):
                is_closed, only_calls = self._follows(values.text, value.end, head, complete)
                if is_closed and only_calls:
                    return value
                closed, first = closed or (value if is_closed else None), first or value
                if (written := written + len(value.json)) > MOST_WRITTEN:
                    break
        except RecursionError:
            return None
        return closed or first

    def _follows(self, text: str, at: int, head: regex.Pattern[str], complete: bool) -> tuple[bool, bool]:
        """Return whether a call ends at `at`, and whether only calls follow it, as far as the next one shows.

        A call ends before an end mark, the next call or the end of a complete answer.
        """
        at = skip_space(text, at)
        marked = text.startswith(self.end, at)
        after = skip_space(text, at + len(self.end)) if marked else at
        is_call, ends = bool(head.match(text, after)), after == len(text)
        return marked or is_call or (complete and ends), is_call or ends


class Value(NamedTuple):
    """A value as JSON, and the index after it in the model's text."""

    json: str
    end: int


class ValueReader:
    """Yields every possible reading of the values in a text. quote: the mark at both ends of a string."""

    def __init__(self, text: str, quote: str):
        self.text, self.quote = text, quote
        self._unreadable: set[tuple[int, str]] = set()  # bounds the search

    def members(self, at: int, before: str, close: str, depth: int) -> Iterator[Value]:
        """Yield the readings of a list or an object from its member at `at` on; none if nested deeper than DEEPEST.

        before: its earlier members as JSON. close: the bracket that ends it, which states its kind. depth: number of
        lists and objects that contain the list or object.
        """
        if (at, close) in self._unreadable or depth > DEEPEST:
            return
        readable = False
        for value in self._members(skip_space(self.text, at), before, close, depth):
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
            after = skip_space(self.text, value.end)
            member = f"{before}{', ' if before else ''}{key}{value.json}"
            if self.text.startswith(",", after):
                yield from self.members(after + 1, member, close, depth)
            elif self.text.startswith(close, after):
                yield from self.members(after, member, close, depth)

    def _values(self, at: int, depth: int) -> Iterator[Value]:
        """Yield the readings of the value at `at`, the shortest first."""
        text, at = self.text, skip_space(self.text, at)
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.find(self.quote, begin)
            while end >= 0:
                yield Value(dumps(text[begin:end]), end + len(self.quote))
                end = text.find(self.quote, end + 1)
        elif text.startswith(("{", "["), at):
            yield from self.members(at + 1, "", "}" if text[at] == "{" else "]", depth + 1)
        elif scalar := SCALAR.match(text, at):
            written = scalar[0].strip()
            try:
                yield Value(strict(PYTHON_CONSTANTS.get(written, written)), scalar.end())
            except ValueError:
                yield Value(dumps(written), scalar.end())
