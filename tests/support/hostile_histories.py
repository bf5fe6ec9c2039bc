"""Hostile conversations: random JSON objects as blocks and items; those of past messages must be answered."""

import json
from typing import Any

from hostile_bodies import Make
from hostile_fields import WORDS, huge, value
from hostile_wire import CHATS, PATHS, Attack, Dice, ask, asked, post

TYPES = (
    "text", "image", "image_url", "input_image", "input_text", "output_text", "input_audio", "file", "input_file",
    "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "search_result",
    "web_search_tool_result", "container_upload", "mcp_tool_use", "function_call", "function_call_output",
    "message", "reasoning", "computer_call", "computer_call_output", "mcp_list_tools", "item_reference", "refusal",
    "video_url",
)  # fmt: skip
NAMES = (
    "text", "id", "name", "input", "content", "source", "image_url", "url", "data", "media_type", "call_id",
    "tool_use_id", "arguments", "output", "status", "action", "summary", "role", "thinking", "signature", "file",
    "file_data", "title",
)  # fmt: skip


def block(d: Dice) -> dict[str, Any]:
    """Return a random JSON object of at most 400 characters, mostly with a type that some vendor has."""
    found = {d.choice(NAMES): value(d, 2, NAMES) for _ in range(d.randrange(5))}
    found |= {"type": d.choice([*TYPES, *TYPES, *TYPES, value(d, 1)])} if d.random() < 0.95 else {}
    return found if len(json.dumps(found)) <= 400 else block(d)


def past(d: Dice, api: str, content: list[Any], role: str = "user") -> Attack:
    """Return a conversation with blocks in a past message; they must not be refused."""
    turns = [{"role": "user", "content": "Hello"}, {"role": role, "content": content}]
    turns += [{"role": "assistant", "content": "Yes."}] if role == "user" else []
    given = asked(api)
    name = "input" if api == "responses" else "messages"
    return post(PATHS[api], {**given, name: [*turns, *given[name]]})._replace(answers=(200,))


def items(d: Dice) -> Attack:
    given = asked("responses")
    found = [
        {"role": "user", "content": "Hello"},
        *[block(d) for _ in range(2)],
        {"role": "assistant", "content": "Yes."},
    ]
    return post(PATHS["responses"], {**given, "input": [*found, *given["input"]]})._replace(answers=(200,))


def in_result(d: Dice, api: str) -> Attack:
    """Return a conversation with blocks in the result of a past tool call."""
    content, given = [block(d)], asked(api)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    if api == "messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        turns[1]["content"] = [use]
        turns[2] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]}
    turns.append({"role": "assistant", "content": "Yes."})
    return post(PATHS[api], {**given, "messages": [*turns, *given["messages"]]})._replace(answers=(200,))


def more_messages(api: str, *messages: Any) -> Attack:
    """Return a conversation that begins with some messages."""
    given = asked(api)
    return post(PATHS[api], {**given, "messages": [*messages, *given["messages"]]})


def many_calls(d: Dice, api: str) -> Attack:
    """Return an answer with up to 19,000 calls, and up to 9,900 results that may belong to none of them."""
    calls: list[dict[str, Any]] = [{"function": {"name": "a"}} for _ in range(d.size(19_000))]
    results: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": "x"} for _ in range(d.size(9900))]
    if d.random() < 0.5:  # each has a call, in the opposite order
        calls = [{**call, "id": str(i)} for i, call in enumerate(calls[:9000])]
        results = [{"role": "tool", "tool_call_id": str(len(calls) - i)} for i in range(len(calls))]
    return more_messages(api, {"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *results)


def with_pictures(api: str, pictures: list[Any]) -> Attack:
    """Return a conversation with pictures in a past message, which must be answered whether or not they are read."""
    if api == "ollama":
        asked_before: dict[str, Any] = {"role": "user", "content": "Hello", "images": pictures}
    else:
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
        asked_before = {"role": "user", "content": parts}
    return more_messages(api, asked_before, {"role": "assistant", "content": "Yes."})._replace(answers=(200,))


HISTORIES: dict[str, Make] = {
    "chat": lambda d: past(d, "chat", [block(d)]),
    "chat of the assistant": lambda d: past(d, "chat", [block(d)], "assistant"),
    "messages": lambda d: past(d, "messages", [block(d)]),
    "messages of the assistant": lambda d: past(d, "messages", [block(d)], "assistant"),
    "responses": lambda d: past(d, "responses", [block(d)]),
    "items": items,
    "more items": items,
    "result": lambda d: in_result(d, "chat"),
    "result of messages": lambda d: in_result(d, "messages"),
    "several blocks": lambda d: past(d, d.choice(["chat", "messages", "responses"]), [block(d), block(d)]),
    "pictures": lambda d: with_pictures("chat", ["data:image/png;base64,AAAA"] * d.choice([1, 30])),
    "pictures of ollama": lambda d: with_pictures("ollama", d.choices(["AAAA", *WORDS], k=d.choice([1, 25]))),
    "many calls": lambda d: many_calls(d, "chat"),
    "many calls of ollama": lambda d: many_calls(d, "ollama"),
    "any message": lambda d: more_messages(d.choice(["chat", "messages", "ollama"]), value(d)),
    "any calls": lambda d: more_messages("chat", {"role": "assistant", "tool_calls": value(d)}),
    "any field": lambda d: more_messages(
        d.choice(["chat", "ollama"]), {"role": "user", "content": "a", d.choice(NAMES): value(d)}
    ),
    "any newest block": lambda d: ask(d.choice(CHATS), [block(d)]),
    "huge newest block": lambda d: ask(d.choice(CHATS), [{"type": d.choice(TYPES), d.choice(NAMES): huge(d)}]),
}
