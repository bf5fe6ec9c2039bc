"""Serve OpenAI's responses API, text and tools, without stored responses: `POST /v1/responses`."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from .answer import Part, ToolCall
from .api_request import Answer, ApiRequest, chat_decode_requests, data, figures, new_id, openai_error
from .chat import functions_of, strict_names
from .contents import Contents
from .fields import ModelInfo, Refused, items, stops
from .job import Begun, End, Failed
from .output_format import output_of
from .response_items import conversation_of
from .sampling_fields import most_tokens
from .thinking import template_of
from .tool_choice import openai_choice


class ResponsesRequest(ApiRequest):
    """A request of OpenAI's responses API, for one response."""

    api = "responses"

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        _check_include(body.get("include"))
        functions = functions_of(items(body, "tools"), self.warnings)
        choice = openai_choice(body, [_tool(tool) for tool in functions], strict_names(functions))
        template = template_of(body, info, self.warnings)
        most, ends = most_tokens(body, "max_output_tokens", "max_tokens"), stops(body, "stop")
        more: dict[str, Any] = {"most": most, "stops": ends, "output": output_of(self.api, body)}
        found = conversation_of(body, Contents(info, self.warnings))
        self.requests = chat_decode_requests(
            info, body, found, choice, template, self.warnings, self.call_ids, **more
        )
        self._body, self._id, self._created = body, new_id("resp_"), int(time.time())
        self._items: list[dict[str, Any]] = []
        self._kind, self._text, self._number, self._calls = "", "", 0, 0

    def begin(self, begun: Begun) -> Iterable[str]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def part(self, choice: int, part: Part) -> Iterable[str]:
        if isinstance(part, ToolCall):
            yield from self._close_item()
            item = self._call_item(part)
            yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
            at = {"item_id": item["id"], "output_index": len(self._items)}
            yield self._event("response.function_call_arguments.delta", delta=part.arguments, **at)
            done = {"arguments": part.arguments, "name": part.name}
            yield self._event("response.function_call_arguments.done", **done, **at)
            yield self._item_event("done", item)
            self._items.append(item)
            return
        if not part.text:
            return
        yield from self._open_item("reasoning" if part.reasoning else "message")
        self._text += part.text
        name = "response.reasoning_text.delta" if part.reasoning else "response.output_text.delta"
        yield self._event(name, delta=part.text, **self._at(), **({} if part.reasoning else {"logprobs": []}))

    def finish(self, choice: int, end: End) -> Iterable[str]:
        cut = end.reason == "length"
        if not (self._items or self._kind or cut):
            yield from self._open_item("message")
        yield from self._close_item("incomplete" if cut else "completed")
        self._end = end

    def close(self) -> Iterable[str]:
        # Also sent after an answer that was cut, because OpenAI's client waits for this event only.
        yield self._event("response.completed", response=self._ended(self._end))

    def failed(self, failed: Failed) -> str:
        error = openai_error(failed.status, failed.message)["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        ((parts, end),) = answers
        for part in parts:
            deque(self.part(0, part), maxlen=0)  # which completes the items
        deque(self.finish(0, end), maxlen=0)
        return self._ended(end)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": len(self._items), "content_index": 0}

    def _open_item(self, kind: str) -> Iterable[str]:
        if self._kind == kind:
            return
        yield from self._close_item()
        self._kind, self._text = kind, ""
        self._item = new_id("rs_" if kind == "reasoning" else "msg_")
        yield self._item_event("added", {**_text_item(kind, self._item, ""), "content": [], "status": "in_progress"})
        if kind == "message":
            yield self._event("response.content_part.added", part=_content(""), **self._at())

    def _close_item(self, status: str = "completed") -> Iterable[str]:
        """Yield the events that close the open item, if there is one. status: its own."""
        if not self._kind:
            return
        item = {**_text_item(self._kind, self._item, self._text), "status": status}
        if self._kind == "message":
            yield self._event("response.output_text.done", text=self._text, logprobs=[], **self._at())
            yield self._event("response.content_part.done", part=_content(self._text), **self._at())
        else:
            yield self._event("response.reasoning_text.done", text=self._text, **self._at())
        yield self._item_event("done", item)
        self._items.append(item)
        self._kind = ""

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        self._calls += 1
        fields = {"call_id": self.call_ids.of(0, self._calls - 1), "name": call.name, "arguments": call.arguments}
        return {"type": "function_call", "id": new_id("fc_"), "status": "completed", **fields}

    def _item_event(self, change: str, item: dict[str, Any]) -> str:
        return self._event(f"response.output_item.{change}", output_index=len(self._items), item=item)

    def _event(self, name: str, /, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return data({"type": name, "sequence_number": number, **fields})

    def _ended(self, end: End) -> dict[str, Any]:
        made, prompt = end.stats.generation_tokens, len(self.requests[0].prompt)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": end.cached},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": prompt + made,
            "mlx_mtp": figures([end]),
        }
        if end.reason == "length":
            return self._response("incomplete", usage, {"reason": "max_output_tokens"})
        return self._response("completed", usage)

    def _response(self, status: str, usage: Any = None, cut: Any = None) -> dict[str, Any]:
        body, copied = self._body, ("instructions", "max_output_tokens", "temperature", "top_p")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "metadata": body.get("metadata") or {},
            "model": self.model,
            "output": self._items,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "usage": usage,
            **{name: body.get(name) for name in copied},
        }


def _content(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(kind: str, id: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": kind, "id": id, "summary": [], "content": content, "status": "completed"}
    return {"type": kind, "id": id, "role": "assistant", "status": "completed", "content": [_content(text)]}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool to the form of chat completions, with its fields, except `strict`, under `function`."""
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _check_include(given: Any) -> None:
    """Raise Refused for log probabilities, which are not returned here; other values have no effect."""
    for name in given if isinstance(given, list) else []:
        if isinstance(name, str) and name.endswith("logprobs"):
            raise Refused(f"include: {name[:80]!r} is not supported; leave it out", param="include")
