"""Convert the messages of chat completions and of Ollama's chat to the form that the chat template receives."""

from functools import partial
from typing import Any

from .api_request import ROLES, function_call
from .contents import Contents
from .forms import Content, Message, joined_contents
from .places import ANSWER, CALL, OTHER, UNKNOWN, USER, Place, entries_of

# Roles of messages by the names that a request may use, and what each means for `newest_of`.
NAMES = {"developer": "system", "function": "tool", **{role: role for role in ROLES}}
SIDES = {"user": USER, "assistant": ANSWER, "system": OTHER, "tool": OTHER}


def messages_of(body: dict[str, Any], contents: Contents) -> list[Message]:
    """Return a body's `messages` in the form that the chat template receives. Raises Refused.

    Contents become `forms.Content`, complete after `contents.settled`; the role developer becomes system, and
    function becomes tool. A message may have pictures in `images` too, as Ollama's have.
    """
    return [message_of_chat(each, place, contents) for each, place in entries_of(body, "messages", side_of)]


def side_of(message: Any) -> str:
    """Return the constant of `places` for a message."""
    found = SIDES.get(NAMES.get(str(message.get("role")), ""), UNKNOWN) if isinstance(message, dict) else UNKNOWN
    return CALL if found == ANSWER and (message.get("tool_calls") or message.get("function_call")) else found


def message_of_chat(message: Any, place: Place, contents: Contents) -> Message:
    """Return a message in the form that the chat template receives; a message of an unknown role is the user's."""
    message = message if isinstance(message, dict) else {"content": message}
    role = role_of(message, place, contents)
    found: Message = {"role": role, "content": _content(message, role, place, contents)}
    names = ("reasoning_content", "reasoning", "thinking") if role == "assistant" else ("reasoning_content",)
    if reasoning := [words for name in names if (words := contents.word(message, name, place))]:
        found["reasoning_content"] = reasoning[0]
    found |= {name: words for name in ("name", "tool_call_id") if (words := contents.word(message, name, place))}
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


def role_of(message: dict[str, Any], place: Place, contents: Contents, names: dict[str, str] = NAMES) -> str:
    """Return a message's role; "user", with a warning, for one that `names` does not contain."""
    role = message.get("role")
    if (found := names.get(str(role))) is None:
        allowed = ", ".join(names)
        contents.note(place.at("role"), f"role {repr(role)[:80]} is not known; allowed are {allowed}")
    return found or "user"


def _content(message: dict[str, Any], role: str, place: Place, contents: Contents) -> Content:
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


def _call(call: Any, place: Place, contents: Contents) -> dict[str, Any] | None:
    """Return a tool call in the form that the chat template receives; None for one without a function's name."""
    call = call if isinstance(call, dict) else {}
    function, custom = call.get("function"), call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):  # from a session with another server
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        return None
    found = function_call(contents.word(call, "id", place), name, function.get("arguments") or {})
    return {**found, "function": {**function, **found["function"]}}
