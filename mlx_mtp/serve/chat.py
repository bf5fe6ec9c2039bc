"""Serve OpenAI's chat completions API: `POST /v1/chat/completions`."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from .answer import AnswerPart, TextPart, TokenLogprob, calls_of, logprobs_of, text_of
from .api_request import ROLES, Answer, ChoicesRequest, chat_decode_requests, function_call, message_of
from .contents import MessageContents
from .fields import MOST_TOP, ModelInfo, Refused, boolean, integer, items, shown, stops
from .forms import Content, Message, joined_contents
from .job import Begun, End
from .output_format import output_of
from .places import ANSWER, CALL, OTHER, UNKNOWN, USER, RequestPlace, entries_of
from .sampling_fields import most_tokens
from .tool_choice import openai_choice

# Roles of messages by the names that a request may use, and what each means for `newest_of`.
NAMES = {"developer": "system", "function": "tool", **{role: role for role in ROLES}}
SIDES = {"user": USER, "assistant": ANSWER, "system": OTHER, "tool": OTHER}


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
        contents = MessageContents(info, self.warnings)
        messages = contents.settled(messages_of(body, contents))
        self.requests = chat_decode_requests(
            self, info, body, messages, choice,
            most=most_tokens(body, "max_completion_tokens", "max_tokens"),
            choices=self.choices,
            progress=self.shows_prefill,
            stops=stops(body, "stop"),
            logprobs=(top or 0) if logprobs else None,
            output=output_of(self.api, body),
        )  # fmt: skip
        self._calls = [0] * self.choices

    def begin(self, begun: Begun) -> Iterable[str]:
        for choice in range(self.choices):
            yield self._delta(choice, {"role": "assistant", "content": ""})

    def part(self, choice: int, part: AnswerPart) -> Iterable[str]:
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


def messages_of(body: dict[str, Any], contents: MessageContents) -> list[Message]:
    """Return a body's `messages` in the form that the chat template receives. Raises Refused.

    Contents become `forms.Content`, complete after `contents.settled`; the role developer becomes system, and
    function becomes tool. A message may have pictures in `images` too, as Ollama's have.
    """
    return [message_of_chat(each, place, contents) for each, place in entries_of(body, "messages", side_of)]


def side_of(message: Any) -> str:
    """Return the constant of `places` for a message."""
    found = SIDES.get(NAMES.get(str(message.get("role")), ""), UNKNOWN) if isinstance(message, dict) else UNKNOWN
    return CALL if found == ANSWER and (message.get("tool_calls") or message.get("function_call")) else found


def message_of_chat(message: Any, place: RequestPlace, contents: MessageContents) -> Message:
    """Return a message in the form that the chat template receives; a message of an unknown role is the user's."""
    message = message if isinstance(message, dict) else {"content": message}
    role = role_of(message, place, contents)
    found: Message = {"role": role, "content": _content(message, role, place, contents)}
    names = ("reasoning_content", "reasoning", "thinking") if role == "assistant" else ("reasoning_content",)
    if reasoning := [words for name in names if (words := contents.word(message, name, place))]:
        found["reasoning_content"] = reasoning[0]
    names = ("name", "tool_call_id", *(("tool_name",) if role == "tool" else ()))
    found |= {name: words for name in names if (words := contents.word(message, name, place))}
    given = message.get("tool_calls")
    if role == "assistant" and not given and (legacy := message.get("function_call")):
        given = [{"function": legacy}]
    if not given:
        return found
    if role != "assistant":
        contents.note(place.at("tool_calls"), "tool calls are only read in messages of the assistant")
        return found
    calls = [(_call(each, place, contents), each) for each in (given if isinstance(given, list) else [given])]
    why, at = "it has no function with a name", place.at("tool_calls")
    lines = [contents.line("a tool call", why, at.at(i), each) for i, (call, each) in enumerate(calls) if not call]
    found["content"] = joined_contents([found["content"], *lines])
    return found | ({"tool_calls": named} if (named := [call for call, _ in calls if call]) else {})


def role_of(
    message: dict[str, Any], place: RequestPlace, contents: MessageContents, names: dict[str, str] = NAMES
) -> str:
    """Return a message's role; "user", with a warning, for one that `names` does not contain."""
    role = message.get("role")
    if (found := names.get(str(role))) is None:
        allowed = ", ".join(names)
        contents.note(place.at("role"), f"role {repr(role)[:80]} is not known; allowed are {allowed}")
    return found or "user"


def _content(message: dict[str, Any], role: str, place: RequestPlace, contents: MessageContents) -> Content:
    """Return the content of a message, with its `images` before and the refusal and audio of an answer after it."""
    sees = role != "assistant"
    read = contents.result if role == "tool" else partial(contents.of, sees=sees)
    at, images = place.at("images"), message.get("images")
    parts = [
        {"type": "image", "source": {"type": "base64", "data": data}} for data in contents.blocks(images or [], at)
    ]
    found: list[Any] = [each for i, part in enumerate(parts) for each in contents.part(part, at.at(i), sees)]
    found.append(read(message.get("content"), place.at("content")))
    if not sees and isinstance(refusal := message.get("refusal"), str):
        found.append(refusal)
    if not sees and (audio := message.get("audio")):
        found.append(contents.line("an answer in audio", "audio is not read here", place.at("audio"), audio))
    return joined_contents(found)


def _call(call: Any, place: RequestPlace, contents: MessageContents) -> dict[str, Any] | None:
    """Return a tool call in the form that the chat template receives; None for one without a function's name."""
    call = call if isinstance(call, dict) else {}
    function, custom = call.get("function"), call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):  # from a session with another server
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        return None
    found = function_call(contents.word(call, "id", place), name, function.get("arguments") or {})
    return {**found, "function": {**function, **found["function"]}}
