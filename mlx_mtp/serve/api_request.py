"""State what an API's module makes of a request: what to answer, and how its client is told."""

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from ..decoding.stats import Stats
from ..decoding.summary import paused
from .answer import Part, calls_of, text_of
from .continued import finished, is_begun
from .field_table import check_fields
from .fields import MOST_CHOICES, ModelInfo, Refused, boolean, integer
from .forms import Message
from .job import Begun, DecodeRequest, End, Failed
from .prompts import Prompt, encode_chat
from .sampling_fields import decode_requests
from .template_probes import renders_tools
from .template_traits import traits_of
from .thinking import switch_of

ROLES = ("system", "user", "assistant", "tool")


class Answer(NamedTuple):
    """All that an answer's events told: its parts, and how it ended."""

    parts: list[Part]
    end: End


class CallIds:
    """The ids of the calls in a request's answers, in the form that the model's chat template takes."""

    def __init__(self, info: ModelInfo, prefix: str):
        self._prefix, self._nonce = prefix, secrets.token_hex(12)
        self._short = traits_of(info.tokenizer).ids == "short"

    def of(self, choice: int, index: int) -> str:
        """The id of the call with this index in an answer."""
        digest = hashlib.sha256(f"{self._nonce}/{choice}/{index}".encode()).hexdigest()
        return digest[:9] if self._short else self._prefix + digest[:24]


class ApiRequest:
    """A request as one API reads it, and its answers as that API writes them.

    body: of the request, as JSON has it; raises Refused.
    asks: one for each choice. stream: the answer is told as server-sent events, of which the methods return the
    lines, in this order: begin, part or finish of the choices, close.
    keep_alive: an event that says nothing, for when nothing else is said.
    api: of `field_table.APIS`. warnings: of fields and parts of the request that have no effect.
    """

    api: str
    requests: list[DecodeRequest]
    call_prefix = "call_"
    keep_alive = ": keep-alive\n\n"

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        self.model, self.warnings = info.called(body), check_fields(self.api, body)
        self.stream = boolean(body, "stream")
        self.call_ids = CallIds(info, self.call_prefix)

    def begin(self, begun: Begun) -> Iterable[str]: ...

    def part(self, choice: int, part: Part) -> Iterable[str]: ...

    def finish(self, choice: int, end: End) -> Iterable[str]: ...

    def close(self) -> Iterable[str]: ...

    def failed(self, failed: Failed) -> str: ...

    def whole(self, answers: list[Answer]) -> dict[str, Any]: ...


class ChoicesRequest(ApiRequest):
    """A request for choices, each of which is told in chunks: what OpenAI's two completions have in common."""

    prefix: str  # of ids
    kinds: tuple[str, str]  # names of the whole and of a chunk

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        self.choices = integer(body, "n", 1, MOST_CHOICES) or 1
        options = body.get("stream_options") or {}
        self._counts = isinstance(options, dict) and bool(options.get("include_usage"))
        self._head = {"id": new_id(self.prefix), "created": int(time.time()), "model": self.model}
        self.ends: list[End] = []

    def close(self) -> Iterable[str]:
        if self._counts:
            yield self.chunk(usage=self.usage(self.ends))
        yield data("[DONE]")

    def failed(self, failed: Failed) -> str:
        return data(openai_error(failed.status, failed.message))

    def chunk(self, *choices: dict[str, Any], **more: Any) -> str:
        return data({**self._head, "object": self.kinds[1], "choices": choices, **more})

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
        counts = self.usage([answer.end for answer in answers])
        return {**self._head, "object": self.kinds[0], "choices": choices, "usage": counts}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]: ...

    def usage(self, ends: list[End]) -> dict[str, Any]:
        """Count tokens as OpenAI does, all choices together, and beside them what the drafts did."""
        prompt = sum(len(request.prompt) for request in self.requests) // self.choices
        made, drafts = sum(end.stats.generation_tokens for end in ends), figures(ends)
        accepted = drafts["draft_n_accepted"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": min((end.cached for end in ends), default=0)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafts["draft_n"] - accepted,
            },
            "mlx_mtp": drafts,
        }


def data(event: dict[str, Any] | str) -> str:
    """Write one server-sent event, in ASCII: some clients end a line at any of Unicode's separators."""
    if isinstance(event, str):
        return f"data: {event}\n\n"
    named = f"event: {event['type']}\n" if "type" in event else ""
    return f"{named}data: {json.dumps(event, separators=(',', ':'))}\n\n"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Write an error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def figures(ends: list[End]) -> dict[str, Any]:
    """Say what the drafts did and how fast it went; clients ignore fields that they do not know."""
    total = Stats()
    for end in ends:
        total.add(end.stats)
    return {
        "draft_n": sum(end.drafts[0] for end in ends),
        "draft_n_accepted": sum(end.drafts[1] for end in ends),
        "paused": paused(total.paused),
        "tokens_per_cycle": round(total.tokens_per_cycle or 1.0, 3),
        "time_to_first_token": round(min((end.first_token for end in ends), default=0.0), 4),
        "tokens_per_second": round(total.generation_tokens / total.decode_time, 2) if total.decode_time else 0.0,
    }


def chat_decode_requests(
    info: ModelInfo,
    body: dict[str, Any],
    messages: list[Message],
    tools: list[Any] | None,
    template: dict[str, Any],
    warnings: list[str],
    ids: CallIds,
    **more: Any,
) -> list[DecodeRequest]:
    """Make what is to be answered of a conversation, in the form that all APIs are brought to; raises Refused.

    messages: with texts as content. ids: of the answers' calls. more: of `asks_for`.
    """
    how = end_of_prompt(body, messages)
    prompt = prompt_of(info, messages, tools, template, turns=info.turns, **how)
    if tools and not renders_tools(info.tokenizer, template):
        warnings.append("tools are not in the prompt: the chat template has no place for them")
    elif tools and info.unread_calls:
        warnings.append(f"tool calls may come back as text: {info.unread_calls}")
    known, tokens = info.tokenizer, prompt.tokens
    thinking = known.has_thinking and known.rfind_think_start(tokens) > known.rfind_think_end(tokens)
    continues = how["continues"] and is_begun(messages)
    follows = partial(_next_prompt, info, messages, tools, template, ids, continues=continues)
    more |= {"chat": True, "thinking": thinking, "continues": continues, "tools": tools, "follows": follows}
    more["after_tool"] = _after_tool(messages)
    return decode_requests(info, prompt, body, **more)


def end_of_prompt(body: dict[str, Any], messages: list[Message]) -> dict[str, bool]:
    """How a prompt ends: within the last message, behind it, or where an answer begins; keywords of `encode_chat`."""
    asked, prompted = (switch_of(body, name) for name in ("continue_final_message", "add_generation_prompt"))
    if asked and prompted:
        raise Refused("continue_final_message: not with add_generation_prompt", param="continue_final_message")
    if asked and not is_begun(messages):
        why = "the last message must be the assistant's, without tool calls"
        raise Refused(f"continue_final_message: {why}", param="continue_final_message")
    continues = asked is not False and not prompted
    return {"continues": continues, "answers": prompted is not False or (continues and is_begun(messages))}


def _after_tool(messages: list[Message]) -> bool:
    """Return whether a tool result follows the last answer; a client may add text of the user's behind it."""
    roles = [message["role"] for message in messages]
    return "tool" in roles[len(roles) - [*roles[::-1], "assistant"].index("assistant") :]


def prompt_of(
    info: ModelInfo, messages: list[Message], tools: list[Any] | None, template: dict[str, Any], **how: bool
) -> Prompt:
    """Encode a conversation; raises Refused."""
    if not messages:
        raise Refused("messages: allowed is one or more", param="messages")
    try:
        return encode_chat(info.tokenizer, info.marks, messages, tools, template, **how)
    except ValueError as e:
        raise Refused(str(e), param="messages") from e


def _next_prompt(
    info: ModelInfo,
    messages: list[Message],
    tools: list[Any] | None,
    template: dict[str, Any],
    ids: CallIds,
    parts: list[Part],
    *,
    continues: bool,
) -> list[int]:
    """Encode the conversation with its answer, as the next turn will begin: with results of its calls if it has any.

    Templates drop the reasoning in front of a question, and keep that in front of a tool result.
    """
    calls = [function_call(ids.of(0, i), name, given) for i, (name, given) in enumerate(calls_of(parts))]
    answer = message_of("assistant", text_of(parts), text_of(parts, reasoning=True), calls)
    told = finished(messages, answer) if continues else [*messages, answer]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    asked = [*told, *(results or [{"role": "user", "content": ""}])]
    return encode_chat(info.tokenizer, info.marks, asked, tools, template, turns=False, answers=False).tokens


def message_of(role: str, content: str | None, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    """Write a message of a conversation as OpenAI's chat completions do; reasoning and calls where there are any."""
    more = {"reasoning_content": reasoning, "tool_calls": calls}
    return {"role": role, "content": content, **{name: value for name, value in more.items() if value}}


def function_call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    """Write a call of a tool as OpenAI's chat completions do."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
