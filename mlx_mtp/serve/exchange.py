"""State what an API's module makes of a request: what to answer, and how its client is told."""

import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .answer import Part, Said, ToolCall
from .job import Ask, Begun, End, Failed
from .prompts import Message


@dataclass
class Answer:
    """All that an answer's events told: its parts, and how it ended."""

    parts: list[Part] = field(default_factory=list)
    end: End | None = None

    def text(self, *, reasoning: bool = False) -> str:
        """Join what was said, or the reasoning before it."""
        return "".join(part.text for part in self.parts if isinstance(part, Said) and part.reasoning == reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def over(self) -> End:
        assert self.end is not None
        return self.end


class Exchange(Protocol):
    """A request as one API reads it, and its answers as that API writes them.

    asks: one for each choice. stream: the answer is told as server-sent events, of which the methods return the
    lines, in this order: begin, part or finish of the choices, close.
    keep_alive: an event that says nothing, for when nothing else is said.
    """

    asks: list[Ask]
    stream: bool
    keep_alive: str

    def begin(self, begun: Begun) -> Iterable[str]: ...

    def part(self, choice: int, part: Part) -> Iterable[str]: ...

    def finish(self, choice: int, end: End) -> Iterable[str]: ...

    def close(self) -> Iterable[str]: ...

    def failed(self, failed: Failed) -> str: ...

    def whole(self, answers: list[Answer]) -> dict[str, Any]: ...


def data(value: Any, event: str = "") -> str:
    """Write one server-sent event, in ASCII: some clients end a line at any of Unicode's separators."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    return int(time.time())


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Write an error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(ends: list[End], prompt_tokens: int) -> dict[str, Any]:
    """Count tokens as OpenAI does, all choices together, and beside them what the drafts did and how fast it went."""
    made = sum(end.stats.generation_tokens for end in ends)
    drafted = sum(sum(end.stats.drafted) + end.stats.lookup_drafted for end in ends)
    accepted = sum(sum(end.stats.accepted) + end.stats.lookup_accepted for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": min((end.cached for end in ends), default=0)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "mlx_mtp": figures(ends),
    }


def figures(ends: list[End]) -> dict[str, Any]:
    """Say what the drafts did and how fast it went; clients ignore fields that they do not know."""
    cycles = sum(end.stats.cycles for end in ends)
    accepted = sum(sum(end.stats.accepted) + end.stats.lookup_accepted for end in ends)
    made, seconds = sum(end.stats.generation_tokens for end in ends), sum(end.stats.decode_time for end in ends)
    return {
        "draft_n": sum(sum(end.stats.drafted) + end.stats.lookup_drafted for end in ends),
        "draft_n_accepted": accepted,
        "tokens_per_cycle": round(1 + accepted / cycles, 3) if cycles else 1.0,
        "time_to_first_token": round(min((end.first_token for end in ends), default=0.0), 4),
        "tokens_per_second": round(made / seconds, 2) if seconds else 0.0,
    }


def said(parts: list[Part]) -> Message:
    """Write an answer as the message of a conversation that goes on."""
    answer = Answer(parts)
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": parsed(call.arguments)}}
        for i, call in enumerate(answer.calls)
    ]
    reasoning = answer.text(reasoning=True)
    message: Message = {"role": "assistant", "content": answer.text()}
    return {
        **message,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def parsed(arguments: Any) -> Any:
    """Read the arguments of a call, which are JSON where they are an object; else they stay what they are."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
