"""Define what every format of tool calls offers to the splitter of an answer."""

from typing import NamedTuple, Protocol

import regex

from .schema import Tools

SPACE = regex.compile(r"\s*")


class ToolCall(NamedTuple):
    """One whole call. arguments: a JSON object, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str


class Reading(NamedTuple):
    """The calls at the beginning of a text, and the index behind the last of them."""

    calls: list[ToolCall]
    end: int


class CallFormat(Protocol):
    """A format in which a model writes tool calls.

    marks: the literals that begin a call anywhere in an answer.
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        """The pattern of a call's beginning, up to where text that merely mentions a mark no longer matches.

        The outer mark is optional: models leave it out at the beginning of an answer.
        """
        ...

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """Read the calls that a text begins with; None where it begins with none.

        complete: the answer ended by itself behind the text, so closing marks that are missing were left out.
        """
        ...


def any_of(names: list[str]) -> str:
    """A pattern of the offered names, the longest first; it matches nothing where none is offered."""
    return "|".join(regex.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"


def behind_space(text: str, at: int) -> int:
    """The index of the first character from `at` on that is no white space."""
    found = SPACE.match(text, at)
    return found.end() if found else at
