"""Define the interface of every tool-call format, and helpers that all formats use."""

from typing import NamedTuple, Protocol

import regex

from .schema import Tools

SPACE = regex.compile(r"\s*")


class ToolCall(NamedTuple):
    """A tool call. arguments: the text of a JSON object, as the model wrote it if that was valid JSON."""

    name: str
    arguments: str


class Reading(NamedTuple):
    """The calls at the start of a text, at least one, and the index after the last of them and its end mark."""

    calls: list[ToolCall]
    end: int


class CallFormat(Protocol):
    """A format in which a model writes tool calls. marks: literals that start a call anywhere in an answer."""

    @property
    def marks(self) -> tuple[str, ...]: ...

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        """Return the pattern of a call's start, up to an offered name or a key, so that a mark alone does not match.

        The outer mark is optional, because models omit it at the start of an answer.
        """
        ...

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """Read the calls at the start of a text, up to the end mark after the last one; None if it starts with none.

        complete: the model ended the answer after the text, so missing end marks were omitted, not cut off.
        """
        ...


def any_of(names: list[str]) -> str:
    """Return a regular expression for one of these names, the longest first; without names it never matches."""
    return "|".join(regex.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"


def skip_space(text: str, at: int) -> int:
    """Return the index of the first character at or after `at` that is not white space; without one, the length."""
    found = SPACE.match(text, at)
    return found.end() if found else at
