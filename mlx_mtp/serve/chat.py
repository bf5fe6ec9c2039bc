"""Speak OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterable
from typing import Any

from .answer import Part, Said, TokenLogprob
from .conversation import ROLES, asks_of
from .exchange import Answer, data, new_id, now, openai_error, parsed, usage
from .fields import (
    MOST_CHOICES,
    MOST_TOP,
    Door,
    Refused,
    boolean,
    integer,
    items,
    plain_text,
    refuse,
    stops,
    template_options,
    text,
)  # fmt: skip
from .job import Begun, End, Failed
from .prompts import Message


class ChatExchange:
    """One chat completion. body: of the request, as JSON has it. Raises Refused."""

    keep_alive = ": keep-alive\n\n"

    def __init__(self, body: dict[str, Any], door: Door):
        self.model, self.stream = door.called(body), boolean(body, "stream")
        refuse(body, "functions", "function_call", "audio", "web_search_options")
        check_format(body.get("response_format"), "response_format")
        if body.get("modalities") not in (None, [], ["text"]):
            raise Refused("modalities: allowed is text", param="modalities")
        tools, self.one_call = chosen_tools(body, items(body, "tools"))
        top = integer(body, "top_logprobs", 0, MOST_TOP)
        if top is not None and not boolean(body, "logprobs"):
            raise Refused("top_logprobs: needs logprobs=true", param="top_logprobs")
        most = [integer(body, name, 1, 2**31) for name in ("max_completion_tokens", "max_tokens")]
        self.asks = asks_of(
            door,
            body,
            messages_of(items(body, "messages")),
            tools,
            template_options(body, door),
            most=most[0] or most[1],
            choices=integer(body, "n", 1, MOST_CHOICES) or 1,
            stops=stops(body, "stop"),
            logprobs=(top or 0) if boolean(body, "logprobs") else None,
            one_call=self.one_call,
        )
        options = body.get("stream_options") or {}
        self._counts = isinstance(options, dict) and bool(options.get("include_usage"))
        self._head = {"id": new_id("chatcmpl-"), "created": now(), "model": self.model}
        self._ends: list[End] = []
        self._calls = [0] * len(self.asks)

    def begin(self, begun: Begun) -> Iterable[str]:
        for choice in range(len(self.asks)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def part(self, choice: int, part: Part) -> Iterable[str]:
        if isinstance(part, Said):
            name = "reasoning_content" if part.reasoning else "content"
            yield self._chunk(choice, {name: part.text}, logprobs=part.logprobs)
            return
        index = self._calls[choice]
        self._calls[choice] += 1
        function = {"name": part.name, "arguments": ""}
        call = {"index": index, "id": new_id("call_"), "type": "function", "function": function}
        yield self._chunk(choice, {"tool_calls": [call]})
        yield self._chunk(choice, {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]})

    def finish(self, choice: int, end: End) -> Iterable[str]:
        self._ends.append(end)
        yield self._chunk(choice, {}, reason=end.reason)

    def close(self) -> Iterable[str]:
        if self._counts:
            counts = usage(self._ends, len(self.asks[0].prompt))
            yield data({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts})
        yield data("[DONE]")

    def failed(self, failed: Failed) -> str:
        return data(openai_error(failed.status, failed.message))

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        counts = usage([answer.over for answer in answers], len(self.asks[0].prompt))
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": counts}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        calls = [
            {"id": new_id("call_"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
        message = {"role": "assistant", "content": answer.text() or (None if calls else ""), "refusal": None}
        if reasoning := answer.text(reasoning=True):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls  # type: ignore[assignment]
        logprobs = tuple(each for part in answer.parts if isinstance(part, Said) for each in part.logprobs)
        told = {"content": [_logprob(each) for each in logprobs]} if self.asks[index].logprobs is not None else None
        return {"index": index, "message": message, "logprobs": told, "finish_reason": answer.over.reason}

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> str:
        told = {"content": [_logprob(each) for each in logprobs]} if logprobs else None
        choices = [{"index": choice, "delta": delta, "logprobs": told, "finish_reason": reason}]
        return data({**self._head, "object": "chat.completion.chunk", "choices": choices})


def _logprob(each: TokenLogprob) -> dict[str, Any]:
    own, *others = (
        {"token": token, "logprob": logprob, "bytes": list(raw)} for token, raw, logprob in (each.token, *each.top)
    )
    return {**own, "top_logprobs": others}


def check_format(given: Any, name: str) -> None:
    """Refuse an output format other than text: there is no grammar yet that could force it."""
    kind = given.get("type", "text") if isinstance(given, dict) else given or "text"
    if kind != "text":
        raise Refused(f"{name}: type {kind!r} is not supported; allowed is text", param=name)


def chosen_tools(body: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[Any] | None, bool]:
    """Read which tools are offered, in OpenAI's form, and whether no more than one may be called.

    What a model cannot be forced to is refused.
    """
    for tool in tools:
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise Refused(f"tools: type {tool.get('type')!r}; allowed is function", param="tools")
        if not text(function, "name"):
            raise Refused("tools: a function needs a name", param="tools")
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none", None):
        shown = repr(choice)[:80]
        raise Refused(f"tool_choice={shown}: allowed are auto and none, a call cannot be forced", param="tool_choice")
    one = body.get("parallel_tool_calls") is False
    return (None if choice == "none" else tools or None), one


def messages_of(given: list[dict[str, Any]]) -> list[Message]:
    """Bring messages to the form that templates read: texts as content, arguments of calls as objects."""
    return [_message(message) for message in given]


def _message(message: dict[str, Any]) -> Message:
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise Refused(f"messages: role {role!r}; allowed are {', '.join(ROLES)} and developer", param="messages")
    found: Message = {"role": role, "content": plain_text(message.get("content"), "content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := text(message, name):
            found[name] = value
    if role == "assistant" and (reasoning := text(message, "reasoning")):
        found.setdefault("reasoning_content", reasoning)
    calls = [_call(call) for call in items(message, "tool_calls")]
    return {**found, **({"tool_calls": calls} if calls else {})}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not text(function, "name"):
        raise Refused("tool_calls: a call needs a function with a name", param="messages")
    arguments = parsed(function.get("arguments") or {})
    return {"id": text(call, "id") or "", "type": "function", "function": {**function, "arguments": arguments}}
