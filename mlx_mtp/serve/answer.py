"""Split the text of an answer into reasoning, content and tool calls, and stop it at a string."""

from typing import Any, NamedTuple

from .tool_calls.call_format import CallFormat, ToolCall
from .tool_calls.schema import Tools

# These bound the time that a hostile answer takes: characters of all attempts to read calls together (a tenth of
# those that find calls), and characters of a text that may still become the beginning of a call.
MOST_READ, MOST_UNCERTAIN = 300_000, 2000


class TextPart(NamedTuple):
    """A piece of an answer; logprobs: of the tokens that came with it, if asked for."""

    text: str
    reasoning: bool = False
    logprobs: tuple["TokenLogprob", ...] = ()


class TokenLogprob(NamedTuple):
    """A token of an answer and the likeliest in its place, each as (text, bytes, log probability)."""

    token: tuple[str, bytes, float]
    top: tuple[tuple[str, bytes, float], ...] = ()


Part = TextPart | ToolCall


def text_of(parts: list[Part], *, reasoning: bool = False) -> str:
    """Join what was said, or the reasoning before it."""
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.reasoning == reasoning)


def calls_of(parts: list[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


def logprobs_of(parts: list[Part]) -> list[TokenLogprob]:
    return [each for part in parts if isinstance(part, TextPart) for each in part.logprobs]


class Splitter:
    """Splits one answer into its parts, however it is cut into pieces.

    Reasoning begins at the beginning of the answer only, and ends at its end mark, whatever was in between. A call is
    read when the answer has ended, since its arguments may contain any mark; other text is not held back.

    thinking: reasoning is separated; begun: the prompt ends within it. tools: those offered, in OpenAI's form.
    one_call: only the first call counts. stopped: the stop string that ended the answer. called: there was a call.
    opening: the pattern of a call's beginning, None where no call is looked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[str, ...],
        *,
        thinking: bool = False,
        begun: bool = False,
        tool_format: CallFormat | None = None,
        tools: Any = None,
        one_call: bool = False,
    ):
        self.stopped: str | None = None
        self.called = False
        self._think_start, self._think_end = (tokenizer.think_start, tokenizer.think_end) if thinking else ("", "")
        self._stops, self._tools, self._one_call = stops, Tools(tools), one_call
        self._format = tool_format if self._tools.names else None
        self.opening = self._format.opening(self._tools) if self._format else None
        self._step = self._in_reasoning if begun else self._at_beginning
        self._text = ""  # arrived, and in no part yet
        self._trims = begun  # line breaks behind a mark of reasoning belong to no part
        self._holds = False  # the text begins a call, as far as it has arrived
        self._space = ""  # white space in front of a text that is held, which is content if that is no call
        self._aside: tuple[str, list[ToolCall]] | None = None  # a call at the end of reasoning
        self._searched = 1  # characters of a call that is held in which no second call begins
        self._tried = 0  # characters that were read in search of a second call
        self._read = 0  # characters, as MOST_READ counts them
        self._logprobs: list[TokenLogprob] = []

    @property
    def reasoning(self) -> bool:
        """Whether the answer is within its reasoning."""
        return self._step == self._in_reasoning

    @property
    def holding(self) -> bool:
        """Whether the text that is held back begins a call."""
        return self._holds

    def feed(self, text: str, logprobs: TokenLogprob | None = None) -> list[Part]:
        """Add the next piece of the answer; return the parts that are certain now."""
        if logprobs:
            self._logprobs.append(logprobs)
        self._text += text
        return self._advance(None)

    def end(self, *, cut: bool) -> list[Part]:
        """Return the rest. cut: a token limit ended the answer, so that a call may be incomplete."""
        parts = self._advance(not cut)
        if self._logprobs:
            parts.append(self._piece(""))
        return parts

    def _advance(self, complete: bool | None) -> list[Part]:
        """Take the steps that the text suffices for. complete: None while more may come, else whether all came."""
        parts: list[Part] = []
        while self.stopped is None and self._text and (found := self._step(complete)) is not None:
            parts += found
        if complete is not None and self._aside:
            parts += self._calls(self._aside[1])
            self._aside = None
        return parts

    def _at_beginning(self, complete: bool | None) -> list[Part] | None:
        """Look for reasoning, or a call that needs no mark, behind the white space that an answer begins with."""
        text = self._text.lstrip()
        waits = complete is None and not self._first(self._text, self._stops)[1]
        if self._think_start and waits and self._think_start.startswith(text):
            return None
        if self._think_start and text.startswith(self._think_start):
            self._text, self._step, self._trims = text.removeprefix(self._think_start), self._in_reasoning, True
            return []
        begins = self._begins_call(text, 0)
        if waits and (begins is None or (not text and self._think_start)):
            return None
        if begins:
            self._space = self._text[: len(self._text) - len(text)]
            self._text, self._holds = text, True
        self._step = self._in_content
        return []

    def _in_reasoning(self, complete: bool | None) -> list[Part] | None:
        if self._holds:
            return self._holding_in_reasoning(complete)
        at, mark = self._first(self._text, (self._think_end, *self._call_marks()))
        if mark == self._think_end and mark:
            said, self._text = self._text[:at], self._text[at + len(mark) :]
            parts, self._step, self._trims = self._said(said, reasoning=True), self._behind_reasoning, True
            return parts
        return self._until_call(at, mark, complete, reasoning=True)

    def _holding_in_reasoning(self, complete: bool | None) -> list[Part] | None:
        """A call in reasoning is text, unless it is the last of the reasoning and of the answer."""
        end = self._text.find(self._think_end)
        if end < 0 and complete is None:
            return None
        block = self._text if end < 0 else self._text[:end]
        calls = self._read_to_end(block, complete=complete is not False or end >= 0)
        if not calls:
            return self._no_call(reasoning=True)
        self._holds, self._aside = False, (block, calls)
        self._text = "" if end < 0 else self._text[end + len(self._think_end) :]
        self._step, self._trims = self._behind_reasoning, True
        return []

    def _behind_reasoning(self, complete: bool | None) -> list[Part] | None:
        """Drop the white space behind reasoning if nothing else follows, and line breaks where something does."""
        if not self._text.strip() and complete is None and not self._first(self._text, self._stops)[1]:
            return None
        if not self._text.strip() and self._aside:
            self._text = ""
            return []
        parts: list[Part] = []
        if self._aside:
            parts, self._aside = [TextPart(self._aside[0], True, self._taken_logprobs())], None
        if self._trims:
            self._text, self._trims = self._text.lstrip("\n"), False
        self._think_start = ""
        self._step = self._at_beginning
        return parts

    def _in_content(self, complete: bool | None) -> list[Part] | None:
        if self._holds:
            return self._holding(complete)
        at, mark = self._first(self._text, (*self._stops, *self._call_marks()))
        if mark in self._stops and mark:
            self.stopped = mark
            return self._said(self._text[:at])
        return self._until_call(at, mark, complete)

    def _until_call(self, at: int, mark: str, complete: bool | None, *, reasoning: bool = False) -> list[Part] | None:
        """Emit the text up to a call that may begin at `at`, or up to where a mark may begin."""
        if mark and (begins := self._begins_call(self._text, at)) is not False:
            self._holds = bool(begins) or complete is not None
            said, self._text = self._text[:at], self._text[at:]
            return self._said(said, reasoning) if said or self._holds else None
        end = at + 1 if mark else len(self._text)
        if not mark and complete is None:
            marks = (self._think_end, *self._call_marks()) if reasoning else (*self._stops, *self._call_marks())
            end -= _begun(self._text, marks)
        said, self._text = self._text[:end], self._text[end:]
        return self._said(said, reasoning) if said else None

    def _holding(self, complete: bool | None) -> list[Part] | None:
        """Read the calls that the text begins with, when all of it is there or a second call is not wanted."""
        assert self._format
        if complete is None:
            return self._first_of_two() if self._one_call else None
        reading = self._format.read(self._text, self._tools, complete=complete)
        if reading is None:
            return self._no_call()
        self._count(len(self._text) // 10)
        self._searched = 1
        self._holds, self._space, self._text = False, "", self._text[reading.end :].lstrip()
        if self._one_call:
            self._text = ""
        return self._calls(reading.calls)

    def _first_of_two(self) -> list[Part] | None:
        """The first call, once a second one has begun."""
        marks = self._call_marks()
        while True:
            at, mark = self._first(self._text[self._searched :], marks)
            at += self._searched
            begins = self._begins_call(self._text, at) if mark else None
            if begins is None or self._tried > MOST_READ:
                return None
            self._tried += at if begins else 0
            if begins and (calls := self._read_to_end(self._text[:at], complete=True)):
                self._text = ""
                return self._calls(calls)
            self._searched = at + 1

    def _read_to_end(self, text: str, *, complete: bool) -> list[ToolCall]:
        """The calls of a text that has nothing else; none where it has."""
        reading = self._format.read(text, self._tools, complete=complete) if self._format else None
        return reading.calls if reading and not text[reading.end :].strip() else []

    def _no_call(self, *, reasoning: bool = False) -> list[Part]:
        """Go on behind the first letter of a text that turned out to be no call."""
        self._holds = False
        self._count(len(self._text))
        self._searched = 1
        said, self._text, self._space = self._space + self._text[:1], self._text[1:], ""
        return self._said(said, reasoning)

    def _count(self, read: int) -> None:
        """Count characters that were read; look for no further call where they are too many."""
        self._read += read
        if self._read > MOST_READ:
            self._format = self.opening = None

    def _begins_call(self, text: str, at: int) -> bool | None:
        """Whether a call begins at `at`; None where that is not certain yet."""
        match = self.opening.match(text, at, partial=True) if self.opening else None
        if match is None or (match.partial and len(text) - at > MOST_UNCERTAIN):
            return False
        return None if match.partial else True

    def _call_marks(self) -> tuple[str, ...]:
        return self._format.marks if self._format else ()

    @staticmethod
    def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
        """The index of the first mark in a text, and the mark; the text's length and "" where there is none."""
        found = [(at, mark) for mark in marks if mark and (at := text.find(mark)) >= 0]
        return min(found, default=(len(text), ""))

    def _said(self, text: str, reasoning: bool = False) -> list[Part]:
        if self._trims and text:
            text = text.lstrip("\n")
            self._trims = not text
        return [TextPart(text, reasoning, self._taken_logprobs())] if text else []

    def _calls(self, calls: list[ToolCall]) -> list[Part]:
        self.called = True
        return list(calls[:1] if self._one_call else calls)

    def _piece(self, text: str) -> TextPart:
        return TextPart(text, self.reasoning, self._taken_logprobs())

    def _taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        taken, self._logprobs = tuple(self._logprobs), []
        return taken


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest end of a text that a mark begins with."""
    longest = max(map(len, marks), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)
