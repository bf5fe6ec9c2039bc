"""Serve Ollama's API: `POST /api/chat` and `/api/generate`; a stream has one JSON object per line."""

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from .answer import AnswerPart, TextPart, ToolCall, calls_of, text_of
from .api_request import Answer, ApiRequest, chat_decode_requests
from .chat import functions_of, messages_of
from .contents import MessageContents
from .fields import ModelInfo, Refused, boolean, items, stops, text
from .forms import Message
from .history import parsed
from .job import Begun, DecodeRequest, End, RequestFailed
from .ollama_fields import CHAT, GENERATE, as_openai, chat_messages, generate_messages, idle_seconds, most_predicted
from .output_format import output_of
from .sampling_fields import decode_requests, text_prompt
from .structured import constraint_of
from .tool_choice import openai_choice


class OllamaRequest(ApiRequest):
    """Base class of Ollama's two requests, for one choice each, or none.

    Without a prompt or messages a request has no choices: it loads the model, or with keep_alive 0 unloads it.
    """

    api = "chat"  # of the fields that Ollama's are converted to
    media_type, waiting = "application/x-ndjson", ""
    known: tuple[str, ...]  # names of the body's fields

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        warnings: list[str] = []
        given = as_openai(body, self.known, warnings)
        super().__init__(given, info)
        self.warnings += warnings
        self.idle = idle_seconds(body)
        self.requests = self.decode_requests(body, given, info)
        self.keep_alive = self._line(self.piece(TextPart("")), done=False)
        self._calls = 0

    def decode_requests(self, body: dict[str, Any], given: dict[str, Any], info: ModelInfo) -> list[DecodeRequest]:
        """Return a list with the request of the one choice, [] if there is nothing to answer. Raises Refused.

        body: in Ollama's form. given: what `as_openai` returns for the body.
        """
        raise NotImplementedError

    def piece(self, part: AnswerPart) -> dict[str, Any]:
        """Return the fields that one part of the answer adds to a line of the stream."""
        raise NotImplementedError

    def chat_requests(
        self, info: ModelInfo, body: dict[str, Any], given: dict[str, Any], messages: list[Message]
    ) -> list[DecodeRequest]:
        """Return a list with the request of the one choice for a conversation. Raises Refused.

        body: in Ollama's form. given: what `as_openai` returns for the body. messages: for the chat template.
        """
        tools = functions_of(items(body, "tools"), self.warnings)
        more: Any = {"most": most_predicted(body), "stops": stops(given, "stop"), "output": output_of("ollama", body)}
        return chat_decode_requests(self, info, given, messages, openai_choice({}, tools, ()), **more)

    def begin(self, begun: Begun) -> Iterable[str]:
        return ()

    def part(self, choice: int, part: AnswerPart) -> Iterable[str]:
        yield self._line(self.piece(part), done=False)

    def finish(self, choice: int, end: End) -> Iterable[str]:
        yield self._line(self.piece(TextPart("")), done=True, **self._figures(end))

    def close(self) -> Iterable[str]:
        return ()

    def failed(self, failed: RequestFailed) -> str:
        return json.dumps(ollama_error(failed.message)) + "\n"

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        if not answers:
            reason = "unload" if self.idle == 0 else "load"
            return self._body(self.piece(TextPart("")), done=True, done_reason=reason)
        ((parts, end),) = answers
        return self._body(self.answer(parts), done=True, **self._figures(end))

    def answer(self, parts: list[AnswerPart]) -> dict[str, Any]:
        """Return the fields that a whole answer adds to a response that is not streamed."""
        raise NotImplementedError

    def call(self, call: ToolCall) -> dict[str, Any]:
        """Return a tool call in Ollama's form, with the next index; arguments that are no JSON object become {}.

        The call has no id, because older clients refuse calls with one; a tool result names its tool instead.
        """
        index, self._calls = self._calls, self._calls + 1
        arguments = parsed(call.arguments)
        arguments = arguments if isinstance(arguments, dict) else {}
        return {"function": {"index": index, "name": call.name, "arguments": arguments}}

    def _line(self, *fields: dict[str, Any], **more: Any) -> str:
        return json.dumps(self._body(*fields, **more), separators=(",", ":")) + "\n"

    def _body(self, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.model, "created_at": now, **fields, **more}

    def _figures(self, end: End) -> dict[str, Any]:
        """Return the reason of the end, the numbers of tokens, and times in nanoseconds.

        total_duration, since the request's arrival, is the sum of the other three. prompt_eval_duration lasts from
        the end of the wait for the model to the first token, so it includes the time in the queue.
        """
        total = time.monotonic() - self.begun
        first = end.first_token or total
        return {
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": _ns(total),
            "load_duration": _ns(self.load_seconds),
            "prompt_eval_count": len(self.requests[0].prompt),
            "prompt_eval_duration": _ns(first - self.load_seconds),
            "eval_count": end.stats.generation_tokens,
            "eval_duration": _ns(total - first),
        }


class OllamaChat(OllamaRequest):
    """A request of `/api/chat`."""

    known = CHAT

    def decode_requests(self, body: dict[str, Any], given: dict[str, Any], info: ModelInfo) -> list[DecodeRequest]:
        contents, messages = MessageContents(info, self.warnings), chat_messages(body)
        found = contents.settled(messages_of({"messages": messages}, contents))
        return self.chat_requests(info, body, given, found) if messages else []

    def piece(self, part: AnswerPart) -> dict[str, Any]:
        return {"message": {"role": "assistant", **self._content(part)}}

    def _content(self, part: AnswerPart) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            return {"content": "", "tool_calls": [self.call(part)]}
        return {"content": "", "thinking": part.text} if part.reasoning else {"content": part.text}

    def answer(self, parts: list[AnswerPart]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text_of(parts)}
        if thinking := text_of(parts, reasoning=True):
            message["thinking"] = thinking
        if calls := [self.call(call) for call in calls_of(parts)]:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGenerate(OllamaRequest):
    """A request of `/api/generate`: one prompt, rendered with the chat template unless `raw` is true."""

    known = GENERATE

    def decode_requests(self, body: dict[str, Any], given: dict[str, Any], info: ModelInfo) -> list[DecodeRequest]:
        if not (prompt := text(body, "prompt")) and not body.get("images"):
            return []
        if not boolean(body, "raw"):
            contents = MessageContents(info, self.warnings)
            messages = contents.settled(generate_messages(body, contents))
            return self.chat_requests(info, {**body, "tools": None}, given, messages)
        if body.get("images"):
            raise Refused("images: a raw prompt has no place for pictures; leave out raw", param="images")
        output, more = output_of("ollama", body), {}
        if output:
            more["grammar"] = constraint_of(info, output)
        given = {**given, "prompt": prompt}
        tokens = text_prompt(info, prompt, given)
        return decode_requests(info, tokens, given, most=most_predicted(body), stops=stops(given, "stop"), **more)

    def piece(self, part: AnswerPart) -> dict[str, Any]:
        assert isinstance(part, TextPart)
        return {"response": "", "thinking": part.text} if part.reasoning else {"response": part.text}

    def answer(self, parts: list[AnswerPart]) -> dict[str, Any]:
        thinking = text_of(parts, reasoning=True)
        return {"response": text_of(parts), **({"thinking": thinking} if thinking else {})}


def ollama_error(message: str) -> dict[str, str]:
    """Return an error body in Ollama's form: {"error": message}."""
    return {"error": message}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
