"""Convert the input of OpenAI's responses API, a text or items, to messages of chat completions."""

from typing import Any

from .api_request import function_call
from .chat_messages import message_of_chat, side_of
from .contents import ENCRYPTED, Contents, kind_of
from .fields import text
from .forms import Message, joined
from .places import ANSWER, CALL, OTHER, UNKNOWN, Place, entries_of
from .tool_calls.schema import dumps

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


def conversation_of(body: dict[str, Any], contents: Contents) -> list[Message]:
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


def _message(item: Any, place: Place, contents: Contents) -> Message:
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


def _reasoning(item: dict[str, Any], place: Place, contents: Contents) -> dict[str, Any]:
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
