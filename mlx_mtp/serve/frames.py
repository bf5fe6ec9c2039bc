"""Split answers whose reasoning and content are framed by marks, such as harmony's channels."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import regex

from .answer import MOST_UNCERTAIN, AnswerPart, Splitter, TextPart, TokenLogprob
from .tool_calls.call_format import skip_space

REASONING, CONTENT = "reasoning", "content"


class Frames(NamedTuple):
    """The marks of one format's frames, each of which contains reasoning or content.

    known_by: literals that all occur in a chat template of the format.
    reasoning, content: patterns that start a frame. end: pattern that ends content, if nothing, another end, a frame
        or a tool call follows.
    think_start, think_end: the literal marks around reasoning; think_end ends its frame.
    """

    known_by: tuple[str, ...]
    reasoning: str
    content: str
    end: str
    think_start: str
    think_end: str


HARMONY = Frames(
    ("<|channel|>", "<|message|>", "analysis"),
    r"(?:<\|start\|>assistant)?\s*<\|channel\|>analysis\s*<\|message\|>",
    r"(?:<\|start\|>assistant)?\s*<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\s*\w+)?\s*<\|message\|>",
    r"<\|(?:end|return|call)\|>",
    "<|channel|>analysis<|message|>",
    "<|end|>",
)
SOLAR = Frames(
    ("<|think|>", "<|content|>", "<|begin|>assistant"),
    r"(?:<\|begin\|>assistant)?<\|think\|>",
    r"(?:<\|begin\|>assistant)?<\|content\|>|<\|begin\|>assistant(?=<\|tool_calls\|>)",
    r"<\|(?:end|flush)\|>",
    "<|think|>",
    "<|end|>",
)
MUSE = Frames(
    ("<atem:function_calls>", "to=self<|message|>"),
    r"(?:<\|start\|>assistant)?\s*to=self<\|message\|>",
    r"(?:<\|start\|>assistant)?\s*to=[\w.-]+<\|message\|>",
    r"<\|(?:eom|eot)\|>",
    " to=self<|message|>",
    "<|eom|>",
)
KIMI_K3 = Frames(
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    r"<\|open\|>think<\|sep\|>",
    r"<\|open\|>response<\|sep\|>",
    r"<\|close\|>(?:think|response|message)<\|sep\|>|<\|end_of_msg\|>",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
)
COMMAND = Frames(
    ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>"),
    r"<\|START_THINKING\|>",
    r"<\|START_(?:RESPONSE|TEXT)\|>",
    r"<\|END_(?:THINKING|RESPONSE|TEXT)\|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
)
FRAMES = (HARMONY, SOLAR, MUSE, KIMI_K3, COMMAND)
# Marks around reasoning that mlx-lm does not detect, of formats without frames.
REASONING_MARKS = (
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<seed:think>", "</seed:think>"),
    ("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ("[THINK]", "[/THINK]"),  # Mistral
)


def frames_of(tokenizer: Any) -> Frames | None:
    """Return the frames that the chat template puts around reasoning and content; None if it uses none of FRAMES."""
    template = _source(tokenizer)
    return next((frames for frames in FRAMES if all(mark in template for mark in frames.known_by)), None)


def add_reasoning_marks(tokenizer: Any) -> None:
    """If mlx-lm found no marks around reasoning, set those of the chat template on the tokenizer, if known."""
    if tokenizer.has_thinking:
        return
    template, frames = _source(tokenizer), frames_of(tokenizer)
    found = [(frames.think_start, frames.think_end)] if frames else []
    found += [pair for pair in REASONING_MARKS if all(mark in template for mark in pair)]
    for start, end in found[:1]:
        tokenizer._think_start, tokenizer._think_end = start, end
        tokenizer._think_start_tokens, tokenizer._think_end_tokens = (
            tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (start, end)
        )


def ends_in_reasoning(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Return whether the last mark around reasoning in a prompt's tokens is a start; False if there is none."""
    thinks = getattr(tokenizer, "has_thinking", False)
    return thinks and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)


def _source(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else ""


class FramedSplitter:
    """Splits a streamed answer with frames into the parts of a `Splitter`, to which it passes the content.

    Text outside frames is content. begun: REASONING or CONTENT, the frame in which the prompt ends; None: outside.
    """

    def __init__(self, frames: Frames, inner: Splitter, begun: str | None = None):
        self._inner, self._patterns, self._kind = inner, _patterns(frames), begun
        self._text, self._logprobs = "", list[TokenLogprob]()

    @property
    def stopped(self) -> str | None:
        return self._inner.stopped

    @property
    def called(self) -> bool:
        return self._inner.called

    @property
    def reasoning(self) -> bool:
        """Whether the text received so far ends inside reasoning."""
        return self._kind == REASONING

    def feed(self, text: str, logprobs: TokenLogprob | None = None) -> list[AnswerPart]:
        """Add a piece of the answer and its token's logprobs; return the parts that later pieces cannot change."""
        if logprobs:
            self._logprobs.append(logprobs)
        self._text += text
        return self._advance(False)

    def end(self, *, cut: bool) -> list[AnswerPart]:
        """Return the remaining parts. cut: a token limit ended the answer, so the last call may be incomplete."""
        return self._advance(True) + self._feed_inner("") + self._inner.end(cut=cut)

    def _advance(self, final: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while self._text and self._inner.stopped is None:
            found = self._between(final) if self._kind is None else self._inside(final)
            if found is None:
                break
            parts += found
        return parts

    def _between(self, final: bool) -> list[AnswerPart] | None:
        """Enter the frame that starts the text, or content without one; return [], or None if more text is needed.

        final, here and in the next two: the answer has ended.
        """
        begin = self._patterns.begin.match(self._text, partial=True)
        if begin and begin.partial and not final and len(self._text) < MOST_UNCERTAIN:
            return None
        self._kind = CONTENT
        if begin and not begin.partial:
            self._kind = REASONING if begin["reasoning"] is not None else CONTENT
            self._text = self._text[begin.end() :]
        return []

    def _inside(self, final: bool) -> list[AnswerPart] | None:
        """Return the parts of the text before the open frame's end; at the end, leave the frame and return [].

        None if more text is needed to find the end.
        """
        pattern = self._patterns.think_end if self._kind == REASONING else self._patterns.end
        end = pattern.search(self._text, partial=not final)
        if end is None:
            return self._emit(len(self._text))
        if end.start() > 0:
            return self._emit(end.start())
        if end.partial:
            return None
        if self._kind == CONTENT and (follows := self._follows(end.end(), final)) is not True:
            return None if follows is None else self._emit(end.end())
        self._text, self._kind = self._text[end.end() :], None
        return []

    def _follows(self, at: int, final: bool) -> bool | None:
        """Return whether the answer's end, an end mark, a frame or a call follows at `at`; None: more text is needed.

        While the pending text starts a call, frames and calls are text.
        """
        at = skip_space(self._text, at)
        if at == len(self._text):
            return True if final else None
        begins = [] if self._inner.holding else [self._patterns.begin, self._inner.opening]
        for pattern in (self._patterns.end, *begins):
            found = pattern.match(self._text, at, partial=not final) if pattern else None
            if found and not (found.partial and len(self._text) - at > MOST_UNCERTAIN):
                return None if found.partial else True
        return False

    def _emit(self, end: int) -> list[AnswerPart]:
        """Remove the first `end` characters of the text; return them as reasoning, or the inner splitter's parts."""
        text, self._text = self._text[:end], self._text[end:]
        if self._kind != REASONING:
            return self._feed_inner(text)
        logprobs, self._logprobs = tuple(self._logprobs), []
        return [TextPart(text, True, logprobs)]

    def _feed_inner(self, text: str) -> list[AnswerPart]:
        for each in self._logprobs:
            self._inner.feed("", each)
        self._logprobs = []
        return self._inner.feed(text)


class FramePatterns(NamedTuple):
    """Compiled patterns of a format's frames; `end` matches a run of consecutive ends."""

    begin: regex.Pattern[str]
    end: regex.Pattern[str]
    think_end: regex.Pattern[str]


@functools.lru_cache(maxsize=8)
def _patterns(frames: Frames) -> FramePatterns:
    begin = rf"\s*(?:(?P<reasoning>{frames.reasoning})|(?P<content>{frames.content}))"
    end = rf"(?:{frames.end})(?:\s*(?:{frames.end}))*"
    return FramePatterns(*map(regex.compile, (begin, end, regex.escape(frames.think_end))))


def begun_in(frames: Frames, prompt: str) -> str | None:
    """Return REASONING or CONTENT, the frame in which a prompt ends; None if it ends outside of frames."""
    patterns, kind, at = _patterns(frames), None, 0
    for begin in patterns.begin.finditer(prompt):
        kind, at = (REASONING if begin["reasoning"] is not None else CONTENT), begin.end()
    return None if patterns.end.search(prompt, at) else kind
