"""Define the interface of the APIs: parse a request body, and write the response as JSON or as server-sent events."""

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from ..checkpoint.chat_template import parts_with_pictures
from ..checkpoint.template_process import rendered_within
from ..decoding.stats import Stats
from ..decoding.summary import paused
from .answer import AnswerPart, calls_of, text_of
from .continued import finished, is_begun
from .field_table import check_fields
from .fields import MOST_CHOICES, ModelInfo, Refused, boolean, check_characters, fields_of, integer
from .forms import Content, Message, past_pictures, without_oldest_pictures
from .frames import ends_in_reasoning
from .job import Begun, DecodeRequest, End, Prefilled, RequestFailed
from .prompts import EncodedPrompt, encode_chat
from .request_pictures import BLOCK
from .sampling_fields import decode_requests, refusing_long
from .structured import RequiredOutput, constraint_of
from .template_traits import renders_tools, traits_of
from .thinking import switch_of, template_of
from .tool_calls.schema import dumps
from .tool_calls.table import GENERIC
from .tool_choice import ToolChoice, call_output, with_tools

IDLE_SECONDS = 1.0  # limit of the chat template for a prompt that was not requested; no request begins meanwhile
ROLES = ("system", "user", "assistant", "tool")


class Answer(NamedTuple):
    """The complete answer of one choice: its parts and its last event."""

    parts: list[AnswerPart]
    end: End


class CallIds:
    """Generates the ids of a response's tool calls: `prefix` and 24 hex digits.

    If the model's chat template needs short ids: 9 hex digits without the prefix.
    """

    def __init__(self, info: ModelInfo, prefix: str):
        self._prefix, self._nonce = prefix, secrets.token_hex(12)
        self._short = traits_of(info.tokenizer).ids == "short"

    def of(self, choice: int, index: int) -> str:
        """Return the id of a choice's call number `index`, from 0 on; always the same one from this object."""
        digest = hashlib.sha256(f"{self._nonce}/{choice}/{index}".encode()).hexdigest()
        return digest[:9] if self._short else self._prefix + digest[:24]


class ApiRequest:
    """A parsed request body of one API, and the writer of its response; creating one may raise Refused.

    api: one of `field_table.APIS`. requests: one per choice. warnings: about fields and parts that have no effect.
    stream: the client requests a stream: server-sent events, in Ollama's API lines of JSON. Its text is that of
    `begin` (once), then of `prefilled`, `part` and `finish` for each choice, then of `close` (once). A failure ends
    the stream with the text of `failed`.
    waiting: the start of a stream without an event in the first `app.PATIENCE` seconds, "" for none. keep_alive: text
    after each later pause of `app.SILENCE` seconds. whole: the JSON body of a response that is not streamed.
    begun: time.monotonic() at which the body had arrived. load_seconds: from then until the model was ready for it.
    idle: seconds without a job after which the model is to be unloaded; None: the server's default.
    """

    api: str
    requests: list[DecodeRequest]
    call_prefix = "call_"
    media_type = "text/event-stream"
    waiting, keep_alive = ": waiting\n\n", ": keep-alive\n\n"
    begun = load_seconds = 0.0
    idle: float | None = None

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        self.model, self.warnings = info.called(body), check_fields(self.api, body)
        self.stream = boolean(body, "stream")
        self.call_ids = CallIds(info, self.call_prefix)

    def begin(self, begun: Begun) -> Iterable[str]: ...

    def prefilled(self, choice: int, event: Prefilled) -> Iterable[str]:
        """Return texts to stream after a prefill chunk of the choice with index `choice`; none in this base class."""
        return ()

    def part(self, choice: int, part: AnswerPart) -> Iterable[str]: ...
    def finish(self, choice: int, end: End) -> Iterable[str]: ...
    def close(self) -> Iterable[str]: ...
    def failed(self, failed: RequestFailed) -> str: ...
    def whole(self, answers: list[Answer]) -> dict[str, Any]: ...


class ChoicesRequest(ApiRequest):
    """Base class of requests for OpenAI's chat completions and completions: choices, chunks, errors, token counts."""

    prefix: str  # of ids
    kinds: tuple[str, str]  # `object` of a whole response and of a chunk

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        self.choices = integer(body, "n", 1, MOST_CHOICES) or 1
        self._counts = boolean(fields_of(body, "stream_options"), "include_usage")
        self.shows_prefill = boolean(body, "return_progress")
        self._head = {"id": new_id(self.prefix), "created": int(time.time()), "model": self.model}
        self.ends: list[End] = []

    def prefilled(self, choice: int, event: Prefilled) -> Iterable[str]:
        if self.shows_prefill:
            total = len(self.requests[choice].prompt)
            yield self.chunk(prompt_progress={"total": total, "processed": event.done, "choice": choice})

    def close(self) -> Iterable[str]:
        if self._counts:
            yield self.chunk(usage=self.usage(self.ends))
        yield data("[DONE]")

    def failed(self, failed: RequestFailed) -> str:
        return data(openai_error(failed.status, failed.message))

    def chunk(self, *choices: dict[str, Any], **more: Any) -> str:
        return data({**self._head, "object": self.kinds[1], "choices": choices, **more})

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
        counts = self.usage([answer.end for answer in answers])
        return {**self._head, "object": self.kinds[0], "choices": choices, "usage": counts}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]: ...

    def usage(self, ends: list[End]) -> dict[str, Any]:
        """Return OpenAI's token counts, and the statistics of drafting under `mlx_mtp`.

        Generated tokens of all choices are summed; each prompt counts once. cached_tokens: the least of all choices.
        """
        prompt = sum(len(request.prompt) for request in self.requests) // self.choices
        generated, drafts = sum(end.stats.generation_tokens for end in ends), figures(ends)
        accepted = drafts["draft_n_accepted"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": min((end.cached for end in ends), default=0)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafts["draft_n"] - accepted,
            },
            "mlx_mtp": drafts,
        }


def data(event: dict[str, Any] | str) -> str:
    """Return the text of a server-sent event: JSON in ASCII, as some clients end lines at Unicode's separators.

    event: an object, whose `type`, if any, is the event's name; or a text, which is sent unchanged, without a name.
    """
    if isinstance(event, str):
        return f"data: {event}\n\n"
    named = f"event: {event['type']}\n" if "type" in event else ""
    return f"{named}data: {json.dumps(event, separators=(',', ':'))}\n\n"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error body in OpenAI's form, whose type follows from the status. param, code: as in `Refused`."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def figures(ends: list[End]) -> dict[str, Any]:
    """Return drafting statistics and speed of all choices together, for the field `mlx_mtp` of a response.

    The time to the first token is the shortest of the choices.
    """
    total = Stats()
    for end in ends:
        total.add(end.stats)
    return {
        "draft_n": sum(end.drafts[0] for end in ends),
        "draft_n_accepted": sum(end.drafts[1] for end in ends),
        "grammar_n": total.grammar_drafted,
        "grammar_n_accepted": total.grammar_accepted,
        "mask_seconds": round(total.mask_time, 6),
        "paused": paused(total.paused),
        "tokens_per_cycle": round(total.tokens_per_cycle or 1.0, 3),
        "time_to_first_token": round(min((end.first_token for end in ends), default=0.0), 4),
        "tokens_per_second": round(total.generation_tokens / total.decode_time, 2) if total.decode_time else 0.0,
    }


def chat_decode_requests(
    api: ApiRequest, info: ModelInfo, body: dict[str, Any], messages: list[Message], choice: ToolChoice,
    output: RequiredOutput | None = None, **more: Any,
) -> list[DecodeRequest]:  # fmt: skip
    """Encode a conversation in OpenAI's form; return one request per choice. Raises Refused.

    api: its warnings are appended to, and its ids are those of tool calls in the response. messages: as `messages_of`
    returns them. choice: the offered tools, and how the answer may call them. output: the grammar of the content,
    None for free text; `call_output` combines it with that of calls. more: options of `decode_requests`: `most` is
    required, `choices` is 1 by default (the body's `n` is not read).
    """
    warnings, ids, tools = api.warnings, api.call_ids, choice.offered
    template, how = template_of(body, info, warnings), end_of_prompt(body, messages)
    output = call_output(info, choice, output, warnings)
    messages, prompt = fitting_prompt(info, body, messages, tools, template, warnings, turns=info.turns, **how)
    if refused := len(parts_with_pictures(messages)) - len(prompt.pictures):
        what = f"{refused} pictures of earlier messages"
        warnings.append(f"{what} were replaced by lines of text: the chat template refuses them")
    prints, generic = renders_tools(info.tokenizer, template) if tools else True, info.tool_format is GENERIC
    if not prints and generic:
        warnings.append(
            "tools and a generic format of calls are in the system prompt: the template has no place for them"
        )
    elif not prints:
        warnings.append("tools are not in the prompt: the chat template has no place for them")
    elif tools and generic:
        warnings.append(f"tool calls have a generic format, which the system prompt describes: {info.unread_calls}")
    elif tools and info.unread_calls:
        warnings.append(f"tool calls may come back as text: {info.unread_calls}")
    thinking = ends_in_reasoning(info.tokenizer, prompt.tokens)
    continues = how["continues"] and is_begun(messages)
    follows = partial(_next_prompt, info, messages, tools, template, ids, continues=continues)
    more |= {"chat": True, "thinking": thinking, "continues": continues, "follows": follows}
    more |= {"tools": choice.allowed, "one_call": choice.one}
    more["after_tool"] = _after_tool(messages)
    if output:
        more["grammar"] = constraint_of(info, output, prompt.tokens, messages[-1] if continues else None, chat=True)
    return decode_requests(info, prompt, body, **more)


def end_of_prompt(body: dict[str, Any], messages: list[Message]) -> dict[str, bool]:
    """Return `continues` and `answers` of `encode_chat`, from continue_final_message and add_generation_prompt.

    Without these fields a last message of the assistant is continued. Raises Refused if both are true, or if
    continue_final_message is true and the last message cannot be continued.
    """
    continued, prompted = (switch_of(body, name) for name in ("continue_final_message", "add_generation_prompt"))
    if continued and prompted:
        raise Refused("continue_final_message: not with add_generation_prompt=true", param="continue_final_message")
    if continued and not is_begun(messages):
        why = "the last message must be the assistant's, without tool calls"
        raise Refused(f"continue_final_message: {why}", param="continue_final_message")
    continues = continued is not False and not prompted
    return {"continues": continues, "answers": prompted is not False or (continues and is_begun(messages))}


def fitting_prompt(
    info: ModelInfo,
    body: dict[str, Any],
    messages: list[Message],
    tools: list[Any] | None,
    template: dict[str, Any],
    warnings: list[str],
    **how: bool,
) -> tuple[list[Message], EncodedPrompt]:
    """Return a conversation and its prompt; if it is too long, without the oldest pictures of earlier messages.

    A prompt that is too long without them is returned, or refused by `prompt_of`. warnings: appended to. how: of
    `encode_chat`.
    """
    left = 0
    while True:
        count = len([*past_pictures(messages)][:BLOCK])
        try:
            with refusing_long(info, body):
                prompt = prompt_of(info, messages, tools, template, **how)
            if len(prompt.tokens) < info.positions or not count:
                break
        except Refused as e:
            if e.code != "context_length_exceeded" or not count:
                raise
        messages, left = without_oldest_pictures(messages, count), left + count
    if left:
        why = "the conversation is longer than the model's context"
        warnings.append(f"the oldest {left} pictures were left out, replaced by lines of text: {why}")
    return messages, prompt


def _after_tool(messages: list[Message]) -> bool:
    """Return whether a tool result follows the last answer, also if a user message follows that result."""
    roles = [message["role"] for message in messages]
    return "tool" in roles[len(roles) - [*roles[::-1], "assistant"].index("assistant") :]


def prompt_of(
    info: ModelInfo, messages: list[Message], tools: list[Any] | None, template: dict[str, Any], **how: bool
) -> EncodedPrompt:
    """Encode a conversation; raises Refused if it is empty or the template refuses it. how: of `encode_chat`."""
    if not messages:
        raise Refused(
            "messages: the conversation is empty; it needs at least one message (`input` in /v1/responses)",
            param="messages",
        )
    check_characters([messages, tools], "messages")
    messages, tools = with_tools(info, messages, tools, template)
    try:
        return encode_chat(info.tokenizer, info.marks, messages, tools, template, positions=info.positions, **how)
    except ValueError as e:
        raise Refused(str(e), param="messages") from e


def _next_prompt(
    info: ModelInfo,
    messages: list[Message],
    tools: list[Any] | None,
    template: dict[str, Any],
    ids: CallIds,
    parts: list[AnswerPart],
    *,
    continues: bool,
) -> list[int]:
    """Return the tokens of the expected prompt of the next turn, with an empty new message, for a prefill in advance.

    It contains the conversation, the answer of `parts`, and empty results of its calls or, without calls, an empty
    question: templates drop the reasoning before a question, and keep it before a tool result. ids: of the response's
    calls. continues: the answer continues the last message.
    """
    calls = [function_call(ids.of(0, i), name, given) for i, (name, given) in enumerate(calls_of(parts))]
    answer = message_of("assistant", text_of(parts), text_of(parts, reasoning=True), calls)
    turns = finished(messages, answer) if continues else [*messages, answer]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    turns += results or [{"role": "user", "content": ""}]
    turns, tools = with_tools(info, turns, tools, template)
    with rendered_within(IDLE_SECONDS):
        return encode_chat(info.tokenizer, info.marks, turns, tools, template, turns=False, answers=False).tokens


def message_of(role: str, content: Content | None, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    """Return a message in OpenAI's form, without reasoning or tool calls if they are empty; content None is kept."""
    more = {"reasoning_content": reasoning, "tool_calls": calls}
    return {"role": role, "content": content, **{name: value for name, value in more.items() if value}}


def function_call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, whose arguments are a text or an object; any other value becomes its JSON.

    name: its id. function: the function's name.
    """
    given = {} if arguments is None else arguments if isinstance(arguments, str | dict) else dumps(arguments)
    return {"id": name, "type": "function", "function": {"name": function, "arguments": given}}
