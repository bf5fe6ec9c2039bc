"""Serve OpenAI's chat completions API: `POST /v1/chat/completions`."""

from collections.abc import Iterable
from typing import Any

from .answer import Part, TextPart, TokenLogprob, calls_of, logprobs_of, text_of
from .api_request import ROLES, Answer, ChoicesRequest, chat_decode_requests, function_call, message_of
from .fields import (
    MOST_TOP,
    ModelInfo,
    Refused,
    boolean,
    content_with_pictures,
    fields_of,
    integer,
    items,
    plain_text,
    shown,
    stops,
    text,
    tool_content,
)
from .forms import Message
from .job import Begun, End
from .output_format import output_of
from .request_pictures import RequestPictures
from .sampling_fields import most_tokens
from .thinking import template_of
from .tool_calls.schema import dumps
from .tool_choice import openai_choice

NO_PICTURES = RequestPictures()


class ChatRequest(ChoicesRequest):
    """A request for a chat completion."""

    api, prefix, kinds = "chat", "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        if body.get("modalities") not in (None, [], ["text"]):
            raise Refused("modalities: allowed is text", param="modalities")
        tools = functions_of(items(body, "tools"), self.warnings)
        choice = openai_choice(body, tools, strict_names(tools))
        top, logprobs = integer(body, "top_logprobs", 0, MOST_TOP), boolean(body, "logprobs")
        if top and not logprobs:
            raise Refused("top_logprobs: needs logprobs=true", param="top_logprobs")
        pictures = RequestPictures(info)
        messages = messages_of(items(body, "messages"), self.warnings, pictures)
        pictures.open()
        self.requests = chat_decode_requests(
            info,
            body,
            messages,
            choice,
            template_of(body, info, self.warnings),
            self.warnings,
            self.call_ids,
            most=most_tokens(body, "max_completion_tokens", "max_tokens"),
            choices=self.choices,
            progress=self.shows_prefill,
            stops=stops(body, "stop"),
            logprobs=(top or 0) if logprobs else None,
            output=output_of(self.api, body),
        )
        self._calls = [0] * self.choices

    def begin(self, begun: Begun) -> Iterable[str]:
        for choice in range(self.choices):
            yield self._delta(choice, {"role": "assistant", "content": ""})

    def part(self, choice: int, part: Part) -> Iterable[str]:
        if isinstance(part, TextPart):
            name = "reasoning_content" if part.reasoning else "content"
            yield self._delta(choice, {name: part.text}, _logprobs(part.logprobs) if part.logprobs else None)
            return
        index = self._calls[choice]
        self._calls[choice] += 1
        call = function_call(self.call_ids.of(choice, index), part.name, "")
        yield self._delta(choice, {"tool_calls": [{"index": index, **call}]})
        yield self._delta(choice, {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]})

    def finish(self, choice: int, end: End) -> Iterable[str]:
        self.ends.append(end)
        yield self._delta(choice, {}, reason=end.reason)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        calls = [function_call(self.call_ids.of(index, i), *call) for i, call in enumerate(calls_of(answer.parts))]
        content = text_of(answer.parts) or (None if calls else "")
        message = message_of("assistant", content, text_of(answer.parts, reasoning=True), calls)
        logprobs = None if self.requests[index].logprobs is None else _logprobs(logprobs_of(answer.parts))
        fields = {"message": {**message, "refusal": None}, "logprobs": logprobs}
        return {"index": index, **fields, "finish_reason": answer.end.reason}

    def _delta(
        self, choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> str:
        return self.chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})


def _logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [{**_logprob(*each.token), "top_logprobs": [_logprob(*t) for t in each.top]} for each in tokens]
    }


def _logprob(token: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(raw)}


def strict_names(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of tools with "strict": true. tools: of a request, with fields at the top or in `function`."""
    inner = [each if isinstance(each := tool.get("function"), dict) else tool for tool in tools]
    return [each["name"] for each in inner if each.get("strict") is True and isinstance(each.get("name"), str)]


def functions_of(tools: list[dict[str, Any]], warnings: list[str], kind: str = "function") -> list[dict[str, Any]]:
    """Return the tools of type `kind` or without a type, and add a warning for each other tool.

    Raises Refused if all tools are of other types, since then the request cannot be served.
    """
    functions = [tool for tool in tools if (tool.get("type") or kind) == kind]
    others = [tool for tool in tools if (tool.get("type") or kind) != kind]
    if others and not functions:
        raise Refused(f"tools: type {shown(others[0].get('type'))}; allowed is {kind}", param="tools")
    for tool in others:
        name = f" {tool['name'][:80]!r}" if isinstance(tool.get("name"), str) else ""
        warnings.append(f"tool{name} of type {shown(tool.get('type'))} is ignored; the server takes functions")
    return functions


def messages_of(
    given: list[dict[str, Any]], warnings: list[str], pictures: RequestPictures = NO_PICTURES, result: str = "content"
) -> list[Message]:
    """Return the messages of a request in the form that the chat template receives. Raises Refused.

    Contents become `forms.Content`, the role developer becomes system, and function becomes tool. warnings: appended
    to. pictures: collects those of the messages; without it they are refused, in a tool result replaced by a line of
    text. In a message of the assistant they are always refused. result: name of the field of a tool result, for
    warnings and errors.
    """
    return [_message(message, warnings, pictures, result) for message in given]


def _message(message: dict[str, Any], warnings: list[str], pictures: RequestPictures, result: str) -> Message:
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise Refused(f"messages: role {role!r}; allowed are {', '.join(ROLES)} and developer", param="messages")
    content = message.get("content")
    if role == "tool":
        content = tool_content(content, result, warnings, pictures.add if pictures.readable else None)
    elif role == "assistant":
        content = plain_text(content, "content")
    else:
        content = content_with_pictures(content, "content", pictures.add)
    found: Message = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := text(message, name):
            found[name] = value
    if role == "assistant" and (reasoning := text(message, "reasoning")):
        found.setdefault("reasoning_content", reasoning)
    given = items(message, "tool_calls")
    if role == "assistant" and not given and (legacy := fields_of(message, "function_call")):
        given = [{"function": legacy}]
    if calls := [_call(call) for call in given]:
        found["tool_calls"] = calls
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function, custom = call.get("function"), call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):  # from a session with another server
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, dict) or not text(function, "name"):
        raise Refused("tool_calls: a call needs a function with a name", param="messages")
    given = function.get("arguments") or {}
    arguments = given if isinstance(given, str | dict) else dumps(given)
    return {"id": text(call, "id"), "type": "function", "function": {**function, "arguments": arguments}}
