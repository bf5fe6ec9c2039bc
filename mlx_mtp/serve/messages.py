"""Serve Anthropic's messages API: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Iterable
from typing import Any

from .answer import AnswerPart, ToolCall
from .api_request import (
    Answer,
    ApiRequest,
    chat_decode_requests,
    data,
    end_of_prompt,
    figures,
    fitting_prompt,
    function_call,
    message_of,
    new_id,
)  # fmt: skip
from .chat import functions_of, role_of, strict_names
from .contents import ENCRYPTED, MessageContents, kind_of
from .field_table import check_fields
from .fields import ModelInfo, Refused, items, stops, text
from .forms import Message, joined_contents
from .history import parsed
from .job import Begun, End, RequestFailed
from .output_format import output_of
from .places import ANSWER, CALL, OTHER, UNKNOWN, USER, RequestPlace, entries_of
from .sampling_fields import most_tokens
from .thinking import template_of
from .tool_choice import ToolChoice, anthropic_choice

BILLING = "x-anthropic-billing-header:"  # Claude Code's first system line; it differs between requests
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
ROLES = {role: role for role in ("system", "user", "assistant")}
SIDES = {"user": USER, "assistant": ANSWER, "system": OTHER}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(ApiRequest):
    """A request of Anthropic's messages API, for one answer."""

    api = "messages"
    call_prefix = "toolu_"

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        choice = _choice(body, self.warnings)
        found = conversation_of(body, MessageContents(info, self.warnings))
        most, ends = most_tokens(body, "max_tokens"), stops(body, "stop_sequences")
        more: dict[str, Any] = {"most": most, "stops": ends, "output": output_of(self.api, body)}
        self.requests = chat_decode_requests(self, info, body, found, choice, **more)
        self.keep_alive = data({"type": "ping"})
        self._id, self._open, self._index, self._calls = new_id("msg_"), "", -1, 0

    def begin(self, begun: Begun) -> Iterable[str]:
        head = {**self._message([]), "usage": self._usage(begun.cached, 0)}
        yield data({"type": "message_start", "message": head})

    def part(self, choice: int, part: AnswerPart) -> Iterable[str]:
        if not isinstance(part, ToolCall) and not part.text:
            return
        block = self._block(part)
        kind = block["type"]
        if isinstance(part, ToolCall) or kind != self._open:
            yield from self._close_block()
            self._open, self._index = kind, self._index + 1
            yield data({"type": "content_block_start", "index": self._index, "content_block": block})
        if isinstance(part, ToolCall):
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        else:
            yield self._delta({"type": f"{kind}_delta", kind: part.text})

    def finish(self, choice: int, end: End) -> Iterable[str]:
        yield from self._close_block()
        yield data({"type": "message_delta", "delta": _reason(end), "usage": self._usage_of(end)})

    def close(self) -> Iterable[str]:
        yield data({"type": "message_stop"})

    def failed(self, failed: RequestFailed) -> str:
        return data(anthropic_error(failed.status, failed.message))

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        ((parts, end),) = answers
        content: list[dict[str, Any]] = []
        for part in parts:
            block = self._block(part)
            kind = block["type"]
            if isinstance(part, ToolCall):
                given = parsed(part.arguments)
                content.append({**block, "input": given if isinstance(given, dict) else {}})
            elif part.text:
                if not content or content[-1]["type"] != kind:
                    content.append(block)
                content[-1][kind] += part.text
        return {**self._message(content), **_reason(end), "usage": self._usage_of(end)}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**message, "stop_reason": None, "stop_sequence": None}

    def _usage(self, cached: int, made: int) -> dict[str, Any]:
        """Return Anthropic's token counts. cached: prompt tokens not in input_tokens. made: output tokens."""
        prompt = {"input_tokens": len(self.requests[0].prompt) - cached, "cache_read_input_tokens": cached}
        return {**prompt, "cache_creation_input_tokens": 0, "output_tokens": made}

    def _usage_of(self, end: End) -> dict[str, Any]:
        return {**self._usage(end.cached, end.stats.generation_tokens), "mlx_mtp": figures([end])}

    def _close_block(self) -> Iterable[str]:
        """Yield the events that close the open block, if there is one."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open:
            yield data({"type": "content_block_stop", "index": self._index})
        self._open = ""

    def _block(self, part: AnswerPart) -> dict[str, Any]:
        """Return a new block without content, of a part's type; a tool call gets the next id."""
        if isinstance(part, ToolCall):
            self._calls += 1
            name = self.call_ids.of(0, self._calls - 1)
            return {"type": "tool_use", "id": name, "name": part.name, "input": {}}
        if part.reasoning:
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _delta(self, delta: dict[str, Any]) -> str:
        return data({"type": "content_block_delta", "index": self._index, "delta": delta})


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error body in Anthropic's form, whose type follows from the HTTP status."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": new_id("req_")}


def count_tokens(body: dict[str, Any], info: ModelInfo) -> tuple[dict[str, int], list[str]]:
    """Return ({"input_tokens": the prompt's length}, the request's warnings). Raises Refused.

    Pictures of URLs are fetched; of each picture only the header is read.
    """
    info.called(body)
    info.adapter_of(body)
    warnings = check_fields("messages", body)
    tools = _choice(body, warnings).offered
    messages = conversation_of(body, MessageContents(info, warnings), count=True)
    template, how = template_of(body, info, warnings), end_of_prompt(body, messages)
    _, prompt = fitting_prompt(info, body, messages, tools, template, warnings, turns=False, **how)
    return {"input_tokens": len(prompt.tokens)}, warnings


def _reason(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop is not None and end.reason == "stop" else REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _choice(body: dict[str, Any], warnings: list[str]) -> ToolChoice:
    """Return the `ToolChoice` of a body: its tools, converted to OpenAI's form, and how the answer may call them.

    warnings: appended to. Raises Refused for a tool without a name, and as `anthropic_choice`.
    """
    tools, given = [], functions_of(items(body, "tools"), warnings, "custom")
    for tool in given:
        if not text(tool, "name"):
            raise Refused("tools: a tool needs a name", param="tools")
        schema = tool.get("input_schema") or {"type": "object", "properties": {}}
        function = {"name": tool["name"], "description": text(tool, "description"), "parameters": schema}
        tools.append({"type": "function", "function": function})
    return anthropic_choice(body, tools, strict_names(given))


def conversation_of(body: dict[str, Any], contents: MessageContents, *, count: bool = False) -> list[Message]:
    """Return a body's `system` and `messages` in OpenAI's form, with `Content`.

    count: as in `MessageContents.settled`. Raises Refused for what is not read in `system` or in the newest message
    of the user, and if there are only system messages, or none.
    """
    found: list[Message] = []
    if system := _system(body.get("system"), contents):
        found.append({"role": "system", "content": system})
    for message, place in entries_of(body, "messages", _side):
        found += _messages(message, place, contents)
    if not any(message["role"] != "system" for message in found):
        raise Refused("messages: at least one message of the user or the assistant is required", param="messages")
    return contents.settled(found, count=count)


def _system(given: Any, contents: MessageContents) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    place = RequestPlace("system", new=True)
    blocks = contents.blocks(given, place)
    texts = [joined_contents(contents.part(each, place.at(i), sees=False)) for i, each in enumerate(blocks)]
    return "\n".join(each for each in map(str, texts) if not each.startswith(BILLING))


def _side(message: Any) -> str:
    found = SIDES.get(str(message.get("role")), UNKNOWN) if isinstance(message, dict) else UNKNOWN
    content = message.get("content") if found == ANSWER else None
    called = isinstance(content, list) and any(str(kind_of(block)).endswith("tool_use") for block in content)
    return CALL if called else found


def _messages(message: Any, place: RequestPlace, contents: MessageContents) -> list[Message]:
    """Return a message as messages in OpenAI's form: one per tool result, then one of all its other blocks.

    The last one is left out if there are results and it would have neither text, pictures nor calls.
    """
    message = message if isinstance(message, dict) else {"content": message}
    role, given, at = role_of(message, place, contents, ROLES), message.get("content"), place.at("content")
    if given is None or isinstance(given, str):
        return [{"role": role, "content": given or ""}]
    found, reasoning, calls, results = list[Any](), [], [], []
    for i, block in enumerate(contents.blocks(given, at)):
        kind, spot = kind_of(block), at.at(i)
        if role == "user" and kind == "tool_result":
            results.append(_tool_result(block, spot.past(), contents))
        elif role == "assistant" and kind == "tool_use" and isinstance(block.get("name"), str) and block["name"]:
            calls.append(function_call(contents.word(block, "id", spot), block["name"], block.get("input") or {}))
        elif role == "assistant" and (kind == "redacted_thinking" or (kind == "thinking" and _is_encrypted(block))):
            contents.note(spot, f"a block of type {kind!r} was left out; {ENCRYPTED}")
        elif role == "assistant" and kind == "thinking" and isinstance(block.get("thinking"), str | None):
            reasoning.append(block.get("thinking") or "")
        else:
            found += contents.part(block, spot, sees=role != "assistant")
    rest = message_of(role, joined_contents(found, "\n"), "\n".join(reasoning), calls)
    return [*results, rest] if found or calls or not results else results


def _is_encrypted(block: dict[str, Any]) -> bool:
    """Return whether a server sent only the signature of a block of reasoning, an encrypted form."""
    return not block.get("thinking") and bool(block.get("signature"))


def _tool_result(block: dict[str, Any], place: RequestPlace, contents: MessageContents) -> Message:
    content = contents.result(block.get("content"), place.at("content"))
    return {"role": "tool", "tool_call_id": contents.word(block, "tool_use_id", place), "content": content}
