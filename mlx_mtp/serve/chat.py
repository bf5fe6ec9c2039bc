"""Serve OpenAI's chat completions API: `POST /v1/chat/completions`."""

from collections.abc import Iterable
from typing import Any

from .answer import Part, TextPart, TokenLogprob, calls_of, logprobs_of, text_of
from .api_request import Answer, ChoicesRequest, chat_decode_requests, function_call, message_of
from .chat_messages import messages_of
from .contents import Contents
from .fields import MOST_TOP, ModelInfo, Refused, boolean, integer, items, stops
from .job import Begun, End
from .output_format import output_of
from .sampling_fields import most_tokens
from .thinking import template_of
from .tool_choice import openai_choice


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
        contents = Contents(info, self.warnings)
        messages = contents.settled(messages_of(body, contents))
        self.requests = chat_decode_requests(
            info,
            body,
            messages,
            choice,
            template_of(body, info, self.warnings),
            self.warnings,
            self.call_ids,
            most=most_tokens(body, "max_completion_tokens", "max_tokens", "n_predict"),
            choices=self.choices,
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
        raise Refused(f"tools: type {others[0].get('type')!r}; allowed is {kind}", param="tools")
    for tool in others:
        name = f" {tool['name'][:80]!r}" if isinstance(tool.get("name"), str) else ""
        warnings.append(f"tool{name} of type {repr(tool.get('type'))[:80]} is ignored; the server takes functions")
    return functions
