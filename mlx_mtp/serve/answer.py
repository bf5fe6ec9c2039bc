"""Split the text of an answer into reasoning, content and tool calls, and end it at a stop string."""

from typing import Any, NamedTuple

from .tool_calls.call_format import CallFormat, ToolCall
from .tool_calls.schema import Tools

# Bounds on the work for a hostile answer: characters read in search of calls, all attempts together (an attempt that
# finds calls counts a tenth), and the longest text that may still turn out to begin a call.
MOST_READ, MOST_UNCERTAIN = 300_000, 2000


class TextPart(NamedTuple):
    """A piece of an answer's reasoning or content. logprobs: those of its tokens, if the request asks for them."""

    text: str
    reasoning: bool = False
    logprobs: tuple["TokenLogprob", ...] = ()


class TokenLogprob(NamedTuple):
    """A token of an answer and the likeliest tokens at its position, each as (text, bytes, log probability)."""

    token: tuple[str, bytes, float]
    top: tuple[tuple[str, bytes, float], ...] = ()


AnswerPart = TextPart | ToolCall


def text_of(parts: list[AnswerPart], *, reasoning: bool = False) -> str:
    """Return the content of an answer's parts as one text, or with `reasoning` the reasoning instead; no calls."""
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.reasoning == reasoning)


def calls_of(parts: list[AnswerPart]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


def logprobs_of(parts: list[AnswerPart]) -> list[TokenLogprob]:
    return [each for part in parts if isinstance(part, TextPart) for each in part.logprobs]


class Splitter:
    """Splits a streamed answer into reasoning, content and tool calls, the same for pieces of any size.

    Reasoning can only start the answer, and lasts until its end mark. Tool calls are returned once the answer has
    ended (with one_call, once a second one starts), since their arguments may contain any mark; other text is
    returned as it arrives. The first of `stops` in the content ends the answer; it is not searched in reasoning.

    thinking: separate the reasoning, else it is content. begun: the prompt ends inside reasoning. tools: those
        offered, in OpenAI's form; without tools or tool_format, calls are content. one_call: return only one call.
    stopped: the stop string that was found. called: a call was returned.
    opening: the pattern of a call's start, None if no call is searched. holding: the pending text starts a call.
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
        self.called = self.holding = False
        self._think_start, self._think_end = (tokenizer.think_start, tokenizer.think_end) if thinking else ("", "")
        self._stops, self._tools, self._one_call = stops, Tools(tools), one_call
        self._format = tool_format if self._tools.names else None
        self.opening = self._format.opening(self._tools) if self._format else None
        self._step = self._in_reasoning if begun else self._at_start
        self._text = ""  # received, but not emitted
        self._trims = begun  # drops line breaks after a mark of reasoning
        self._space = ""  # white space before the pending text; content if that text is no call
        self._aside: tuple[str, list[ToolCall]] | None = None  # text and calls at the end of reasoning
        self._searched = 1  # characters of the pending call that contain no second call
        self._tried = 0  # characters that were read in search of a second call
        self._read = 0  # characters that were read, counted for MOST_READ
        self._logprobs: list[TokenLogprob] = []

    @property
    def reasoning(self) -> bool:
        """Whether the text received so far ends inside reasoning."""
        return self._step == self._in_reasoning

    def feed(self, text: str, logprobs: TokenLogprob | None = None) -> list[AnswerPart]:
        """Add the next piece of the answer; return the parts that later pieces cannot change, [] if there are none.

        After a stop string the rest is ignored. logprobs: of the piece's token; they are returned with the next text.
        """
        if logprobs:
            self._logprobs.append(logprobs)
        self._text += text
        return self._advance(None)

    def end(self, *, cut: bool) -> list[AnswerPart]:
        """Return the remaining parts; left-over log probabilities form an empty TextPart.

        cut: a token limit ended the answer, so the last call may be incomplete.
        """
        parts = self._advance(not cut)
        if self._logprobs:
            parts.append(TextPart("", self.reasoning, self._take_logprobs()))
        return parts

    def _advance(self, complete: bool | None) -> list[AnswerPart]:
        """Return the parts that later text cannot change, [] if there are none.

        complete, here and in each step: None before the answer's end; then True, or False if a token limit cut it.
        """
        parts: list[AnswerPart] = []
        while self.stopped is None and self._text and (found := self._step(complete)) is not None:
            parts += found
        if complete is not None and self._aside:
            parts += self._calls(self._aside[1])
            self._aside = None
        return parts

    def _at_start(self, complete: bool | None) -> list[AnswerPart] | None:
        """Choose whether reasoning, a call or content starts the answer; return [], or None if more text is needed.

        Reasoning starts with its mark, which is dropped; a call may lack its mark, and is held. After more than
        MOST_UNCERTAIN characters of white space the answer starts with content.
        """
        text = self._text.lstrip()
        if len(self._text) - len(text) > MOST_UNCERTAIN:
            self._step = self._in_content
            return []
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
            self._text, self.holding = text, True
        self._step = self._in_content
        return []

    def _in_reasoning(self, complete: bool | None) -> list[AnswerPart] | None:
        if self.holding:
            return self._read_calls_in_reasoning(complete)
        at, mark = self._first(self._text, (self._think_end, *self._call_marks()))
        if mark == self._think_end and mark:
            parts = self._emit(at, reasoning=True)
            self._text, self._step, self._trims = self._text.removeprefix(mark), self._after_reasoning, True
            return parts
        return self._until_call(at, mark, complete, reasoning=True)

    def _read_calls_in_reasoning(self, complete: bool | None) -> list[AnswerPart] | None:
        """Read the calls at the end of reasoning, and put them aside; return [], or None before reasoning has ended.

        If no call can be read, return `_no_call`. If content follows the calls, their text is reasoning.
        """
        end = self._text.find(self._think_end)
        if end < 0 and complete is None:
            return None
        block = self._text if end < 0 else self._text[:end]
        calls = self._read_to_end(block, complete=complete is not False or end >= 0)
        if not calls:
            return self._no_call(reasoning=True)
        self.holding, self._aside = False, (block, calls)
        self._text = "" if end < 0 else self._text[end + len(self._think_end) :]
        self._step, self._trims = self._after_reasoning, True
        return []

    def _after_reasoning(self, complete: bool | None) -> list[AnswerPart] | None:
        """Drop the line breaks after reasoning; all white space if calls ended it and nothing else follows.

        Return [] or, if text follows such calls, their text as reasoning; None if more text is needed.
        """
        if not self._text.strip() and complete is None and not self._first(self._text, self._stops)[1]:
            return None
        if not self._text.strip() and self._aside:
            self._text = ""
            return []
        parts: list[AnswerPart] = []
        if self._aside:
            parts, self._aside = [TextPart(self._aside[0], True, self._take_logprobs())], None
        if self._trims:
            self._text, self._trims = self._text.lstrip("\n"), False
        self._think_start, self._step = "", self._at_start
        return parts

    def _in_content(self, complete: bool | None) -> list[AnswerPart] | None:
        if self.holding:
            return self._read_calls(complete)
        at, mark = self._first(self._text, (*self._stops, *self._call_marks()))
        if mark in self._stops and mark:
            self.stopped = mark
            return self._emit(at)
        return self._until_call(at, mark, complete)

    def _until_call(
        self, at: int, mark: str, complete: bool | None, *, reasoning: bool = False
    ) -> list[AnswerPart] | None:
        """Remove and return the pending text before a possible call at `at`; None if more text is needed.

        If `at` starts no call, that is the text up to and with the mark's first character; without a mark, all but a
        mark's start at the text's end. From the start of a call on, text is held. mark: found at `at`; "" for none,
        `at` is then ignored. complete: as in `_advance`. reasoning: return the text as reasoning, and hold back the
        start of its end mark instead of a stop string's.
        """
        if mark and (begins := self._begins_call(self._text, at)) is not False:
            self.holding = bool(begins) or complete is not None
            return self._emit(at, reasoning) if at or self.holding else None
        end = at + 1 if mark else len(self._text)
        if not mark and complete is None:
            marks = (self._think_end, *self._call_marks()) if reasoning else (*self._stops, *self._call_marks())
            end -= _begun(self._text, marks)
        return self._emit(end, reasoning) if end else None

    def _read_calls(self, complete: bool | None) -> list[AnswerPart] | None:
        """Return the calls at the start of the text once the answer has ended; None before.

        With one_call return the first call alone, at the answer's end or once a second call starts. If no call can be
        read at the end, return the parts that `_no_call` returns. complete: as in `_advance`.
        """
        assert self._format
        if complete is None:
            return self._first_of_two() if self._one_call else None
        reading = self._format.read(self._text, self._tools, complete=complete)
        if reading is None:
            return self._no_call()
        self._count(len(self._text) // 10)
        self._searched = 1
        self.holding, self._space, self._text = False, "", self._text[reading.end :].lstrip()
        if self._one_call:
            self._text = ""
        return self._calls(reading.calls)

    def _first_of_two(self) -> list[AnswerPart] | None:
        """Return the first call once a second one has started; None before."""
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
        """Return the calls of a text, [] if it contains anything else. complete: as in `CallFormat.read`."""
        reading = self._format.read(text, self._tools, complete=complete) if self._format else None
        return reading.calls if reading and not text[reading.end :].strip() else []

    def _no_call(self, *, reasoning: bool = False) -> list[AnswerPart]:
        """Emit the first character of a text that proved to be no call, so that the search continues after it.

        reasoning: as in `_emit`.
        """
        self.holding = False
        self._count(len(self._text))
        self._searched, end = 1, len(self._space) + 1
        self._text, self._space = self._space + self._text, ""
        return self._emit(end, reasoning)

    def _count(self, read: int) -> None:
        """Count `read` characters that were read in search of calls; above MOST_READ the rest is not searched."""
        self._read += read
        if self._read > MOST_READ:
            self._format = self.opening = None

    def _begins_call(self, text: str, at: int) -> bool | None:
        """Return whether a call starts at `at`; None if more text is needed."""
        match = self.opening.match(text, at, partial=True) if self.opening else None
        if match is None or (match.partial and len(text) - at > MOST_UNCERTAIN):
            return False
        return None if match.partial else True

    def _call_marks(self) -> tuple[str, ...]:
        return self._format.marks if self._format else ()

    @staticmethod
    def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
        """Return the index of the first mark in a text, and the mark; without one, the text's length and ""."""
        found = [(at, mark) for mark in marks if mark and (at := text.find(mark)) >= 0]
        return min(found, default=(len(text), ""))

    def _emit(self, end: int, reasoning: bool = False) -> list[AnswerPart]:
        """Remove and return the first `end` characters of the text, without line breaks after a mark of reasoning.

        reasoning: return them as reasoning, else as content.
        """
        text, self._text = self._text[:end], self._text[end:]
        if self._trims and text:
            text = text.lstrip("\n")
            self._trims = not text
        return [TextPart(text, reasoning, self._take_logprobs())] if text else []

    def _calls(self, calls: list[ToolCall]) -> list[AnswerPart]:
        self.called = True
        return list(calls[:1] if self._one_call else calls)

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        logprobs, self._logprobs = tuple(self._logprobs), []
        return logprobs


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text that is the start of a mark; 0 if there is none."""
    longest = max(map(len, marks), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)
