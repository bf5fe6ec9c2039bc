"""Serve OpenAI's responses API, text and tools, without stored responses: `POST /v1/responses`."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from .answer import AnswerPart, ToolCall
from .api_request import Answer, ApiRequest, chat_decode_requests, data, figures, function_call, new_id, openai_error
from .chat import functions_of, message_of_chat, side_of, strict_names
from .contents import ENCRYPTED, MessageContents, kind_of
from .fields import ModelInfo, Refused, items, stops, text
from .forms import Message, joined
from .job import Begun, End, RequestFailed
from .output_format import output_of
from .places import ANSWER, CALL, OTHER, UNKNOWN, RequestPlace, entries_of
from .sampling_fields import most_tokens
from .tool_calls.schema import dumps
from .tool_choice import openai_choice

# Types of items that are calls: the function's name, None if the item states it, and the key of the arguments.
CALLS = {
    "function_call": (None, "arguments"),
    "custom_tool_call": (None, "input"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
OUTPUTS = {f"{kind.removesuffix('_call')}_call_output" for kind in CALLS} | {"tool_search_output"}


class ResponsesRequest(ApiRequest):
    """A request of OpenAI's responses API, for one response."""

    api = "responses"

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        _check_include(body.get("include"))
        functions = functions_of(items(body, "tools"), self.warnings)
        choice = openai_choice(body, [_tool(tool) for tool in functions], strict_names(functions))
        most, ends = most_tokens(body, "max_output_tokens", "max_tokens"), stops(body, "stop")
        more: dict[str, Any] = {"most": most, "stops": ends, "output": output_of(self.api, body)}
        found = conversation_of(body, MessageContents(info, self.warnings))
        self.requests = chat_decode_requests(self, info, body, found, choice, **more)
        self._body = {name: each for name, each in body.items() if name != "input"}  # which may be large
        self._id, self._created = new_id("resp_"), int(time.time())
        self._items: list[dict[str, Any]] = []
        self._kind, self._text, self._number, self._calls = "", "", 0, 0

    def begin(self, begun: Begun) -> Iterable[str]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def part(self, choice: int, part: AnswerPart) -> Iterable[str]:
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

    def failed(self, failed: RequestFailed) -> str:
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


def conversation_of(body: dict[str, Any], contents: MessageContents) -> list[Message]:
    """Return `instructions` and `input`, a text or items, as messages of chat completions. Raises Refused.

    Adjacent messages of the assistant are merged.
    """
    instructions, given = text(body, "instructions"), body.get("input")
    found: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    found += [_message(item, place, contents) for item, place in entries_of(body, "input", _side)]
    return joined(contents.settled(found), "assistant")


def _kind(item: Any) -> Any:
    """Return an item's type, "message" for an item with a role and no type."""
    return kind_of(item) or ("message" if isinstance(item, dict) and "role" in item else None)


def _side(item: Any) -> str:
    kind = _kind(item)
    if kind == "message":
        return side_of(item)
    if kind == "reasoning":
        return ANSWER
    if not isinstance(kind, str) or kind == "mcp_approval_response":
        return UNKNOWN
    if kind.endswith("_output"):
        return OTHER
    return CALL if kind.endswith("_call") or kind.startswith("mcp_") else UNKNOWN


def _message(item: Any, place: RequestPlace, contents: MessageContents) -> Message:
    """Return an item as a message; reasoning, text and calls are separate items and messages.

    Calls of other tools in CALLS, from a session with another server, become function calls. An item that is not read
    becomes a line of text in a message of the assistant.
    """
    kind = _kind(item)
    if kind == "message":
        return message_of_chat(item, place, contents)
    if isinstance(kind, str) and kind in OUTPUTS:
        given = dumps(item.get("tools")) if kind == "tool_search_output" else item.get("output")
        output = contents.result(given, place.at("output"))
        return {"role": "tool", "tool_call_id": contents.word(item, "call_id", place), "content": output}
    found: Message = {"role": "assistant", "content": ""}
    if kind == "reasoning":
        return found | _reasoning(item, place, contents)
    name, key = CALLS.get(kind, (None, "")) if isinstance(kind, str) else (None, "")
    function = name or (item.get("name") if key else None)
    if not isinstance(function, str) or not function:
        what = f"an item of type {repr(kind)[:80]}"
        why = "it has no function's name" if key else "the server has no such tool, and does not read this type"
        return found | {"content": contents.line(what, why, place, item)}
    arguments = (item.get(key) or {}) if kind == "function_call" else {key: item.get(key)}
    return found | {"tool_calls": [function_call(contents.word(item, "call_id", place), function, arguments)]}


def _reasoning(item: dict[str, Any], place: RequestPlace, contents: MessageContents) -> dict[str, Any]:
    """Return {"reasoning_content": text} for reasoning; {}, with a warning, if it is only there in encrypted form."""
    given = item.get("content")
    texts = (
        [part.get("text") if isinstance(part, dict) else part for part in given] if isinstance(given, list) else []
    )
    reasoning = "".join(each for each in texts if isinstance(each, str))
    if not all(isinstance(each, str | None) for each in texts) or not isinstance(given, list | None):
        contents.note(place.at("content"), "reasoning that is no list of texts was left out")
    if item.get("encrypted_content") and not reasoning:
        contents.note(place, f"an item of type 'reasoning' was left out; {ENCRYPTED}")
    return {"reasoning_content": reasoning} if reasoning else {}
