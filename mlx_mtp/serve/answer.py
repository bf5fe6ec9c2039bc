"""Split the text of an answer into reasoning, content and calls of tools, and stop it at a string."""

from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

from .tool_formats import ToolFormat

STOP = "stop:"  # what states behind a stop string begin with


class Said(NamedTuple):
    """A piece of an answer; logprobs: of the tokens that came with it, if asked for."""

    text: str
    reasoning: bool = False
    logprobs: tuple["TokenLogprob", ...] = ()


class ToolCall(NamedTuple):
    """One call of a tool, whole; arguments: JSON."""

    name: str
    arguments: str


class TokenLogprob(NamedTuple):
    """A token of an answer and the likeliest in its place, each as (text, bytes, log probability)."""

    token: tuple[str, bytes, float]
    top: tuple[tuple[str, bytes, float], ...] = ()


Part = Said | ToolCall


def text_of(parts: list[Part], *, reasoning: bool = False) -> str:
    """Join what was said, or the reasoning before it."""
    return "".join(part.text for part in parts if isinstance(part, Said) and part.reasoning == reasoning)


def calls_of(parts: list[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


def logprobs_of(parts: list[Part]) -> list[TokenLogprob]:
    return [each for part in parts if isinstance(part, Said) for each in part.logprobs]


class Splitter:
    """Follows one answer; `stopped` is the stop string that ended it, if one has.

    thinking: reasoning is told apart; begun: the prompt ends within it. tools: what was offered, in OpenAI's form.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[str, ...],
        *,
        thinking: bool = False,
        begun: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Any = None,
    ):
        self.stopped: str | None = None
        self.called = False
        self._format, self._tools = tool_format if tools else None, tools
        edges: dict[str, list[tuple[str, str]]] = {"normal": [], "reasoning": [], "tool": []}
        if thinking:
            edges["normal"].append((tokenizer.think_start, "reasoning"))
            edges["reasoning"].append((tokenizer.think_end, "normal"))
        if self._format:
            edges["normal"].append((self._format.start, "tool"))
            edges["reasoning"].append((self._format.start, "tool"))
            if self._format.end:
                edges["tool"].append((self._format.end, "normal"))
        for stop in stops:
            edges["normal"].append((stop, STOP + stop))
            edges[STOP + stop] = []
        machine = TextStateMachine(edges)  # type: ignore[arg-type]
        self._state = machine.make_state("reasoning" if begun else "normal")
        self._at, self._call, self._logprobs = self._state[0], "", []
        self._trims = begun  # the line break behind a mark belongs to no text
        self._undecided = bool(self._format and self._format.whole)

    @property
    def reasoning(self) -> bool:
        """Whether the answer is within its reasoning."""
        return self._at == "reasoning"

    def feed(self, text: str, logprobs: TokenLogprob | None = None) -> list[Part]:
        """Take the next piece of the answer; return what is known now."""
        if logprobs:
            self._logprobs.append(logprobs)
        self._state, segments = TextStateMachine.split(self._state, text)
        parts: list[Part] = []
        for state, segment in segments:
            if state.startswith(STOP):
                self.stopped = state.removeprefix(STOP)
                break
            parts += self._enter(state)
            parts += self._take(segment)
        return parts

    def end(self, *, cut: bool) -> list[Part]:
        """Return what was held back; cut: the answer ended where a token limit was, not by itself."""
        text = ""
        if self.stopped is None:
            self._state, text, _ = TextStateMachine.flush(self._state)
        parts = self._take(text)
        if self._at == "tool":
            parts += self._finish_call(closed=not cut)
        if self._logprobs:
            parts.append(self._piece(""))
        return parts

    def _enter(self, state: str) -> list[Part]:
        if state == self._at:
            return []
        parts = self._finish_call(closed=True) if self._at == "tool" else []
        self._at, self._trims = state, True
        return parts

    def _take(self, text: str) -> list[Part]:
        if self._at == "tool":
            self._call += text
            return []
        if self._trims and text:
            text = text.lstrip("\n")
            self._trims = not text
        if self._undecided and text.strip() and self._at == "normal":
            self._undecided = False
            if text.lstrip().startswith("{"):
                self._state = ("tool", self._state[2]["tool"][0], self._state[2], self._state[3])
                self._at, self._call = "tool", text
                return []
        return [self._piece(text)] if text else []

    def _piece(self, text: str) -> Said:
        logprobs, self._logprobs = tuple(self._logprobs), []
        return Said(text, self._at == "reasoning", logprobs)

    def _finish_call(self, *, closed: bool) -> list[Part]:
        """Read the call; what is none is said as text, so that nothing of an answer is lost."""
        assert self._format
        text, self._call = self._call, ""
        if not text.strip():
            return []
        try:
            calls: list[Part] = [ToolCall(*call) for call in self._format.calls(text, self._tools)]
        except ValueError:
            self._at = "normal"
            start = "" if self._format.whole and text.lstrip().startswith("{") else self._format.start
            return [self._piece(start + text + (self._format.end if closed else ""))]
        self.called = True
        return calls
