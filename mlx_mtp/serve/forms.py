"""List equivalent forms of a conversation, for chat templates that refuse its original form."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

from .tool_calls.schema import dumps, types_of

Message = dict[str, Any]
# Of a message: a text or, with pictures, parts: {"type": "text", "text": ...}, {"type": "image", "picture": ...}; a
# picture of an earlier message also has "past": True.
Content = str | list[dict[str, Any]]


class Conversation(NamedTuple):
    """Messages in the form of OpenAI's chat completions, each content a `Content`, and the offered tools or None."""

    messages: list[Message]
    tools: list[Any] | None


class SeparateLines(str):
    """A text that stands on lines of its own: `joined_contents` puts it between line breaks."""


OLD_PICTURE = SeparateLines("[old picture]")  # short, since it may stand in a prompt many times
REFUSED_PICTURE = SeparateLines("[A picture was left out: the chat template refuses it.]")

ConversationChange = Callable[[Conversation], Conversation]


def forms(conversation: Conversation) -> Iterator[tuple[tuple[ConversationChange, ...], Conversation]]:
    """Yield (changes, the conversation with these changes); equal conversations only once.

    The changes are first none, then each of CHANGES alone, then the first 2, 3, ... of CHANGES.
    """
    found: list[Conversation] = []
    sets = [(), *((change,) for change in CHANGES), *(CHANGES[:n] for n in range(2, len(CHANGES) + 1))]
    for changes in sets:
        if (form := changed(conversation, changes)) not in found:
            found.append(form)
            yield changes, form


def changed(conversation: Conversation, changes: Iterable[ConversationChange]) -> Conversation:
    """Return a conversation to which changes were applied, one after another."""
    for change in changes:
        conversation = change(conversation)
    return conversation


def joined(messages: list[Message], role: str) -> list[Message]:
    """Return messages in which adjacent ones of this role are merged into one."""
    found: list[Message] = []
    for each, group in groupby(messages, lambda message: message["role"]):
        run = [*group]
        found += [_merged(run)] if each == role and len(run) > 1 else run
    return found


def joined_contents(contents: Iterable[Content | dict[str, Any]], space: str = "") -> Content:
    """Return contents and parts of contents, in their order, as one content: a text if no picture is among them.

    space: put between adjacent texts; next to a `SeparateLines` it is a line break. Without contents: "".
    """
    found: list[dict[str, Any]] = []
    parts = (part for content in contents for part in _parts(content))
    for is_text, group in groupby(parts, lambda part: part["type"] == "text"):
        run = [*group]
        found += [{"type": "text", "text": _joined_texts((part["text"] for part in run), space)}] if is_text else run
    return found if has_picture(found) else found[0]["text"] if found else ""


def _joined_texts(texts: Iterable[str], space: str) -> str:
    """Return texts as one, which is a `SeparateLines` if the last one is. space: as in `joined_contents`."""
    found, last = list[str](), ""
    for text in texts:
        if isinstance(last, SeparateLines) or isinstance(text, SeparateLines):
            found.append("\n" if last and text and not last.endswith("\n") and not text.startswith("\n") else "")
        elif found:
            found.append(space)
        found.append(text)
        last = text or last
    return type(last)("".join(found))


def _parts(content: Content | dict[str, Any]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else [content]


def has_picture(content: Content | None) -> bool:
    """Return whether a picture is among a content's parts."""
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def _merged(messages: list[Message]) -> Message:
    """Return one message with contents, reasoning and tool calls of all; of other fields the last one counts."""
    found: Message = {}
    for message in messages:
        found |= message
    for name, space in (("content", "\n\n"), ("reasoning_content", "\n")):
        if texts := [each[name] for each in messages if each.get(name)]:
            found[name] = joined_contents(texts, space)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return found


def _with_tools_described(conversation: Conversation) -> Conversation:
    """Add what a tool lacks: a description, parameters, and each parameter's type; of several types one is kept."""
    tools = conversation.tools
    return conversation._replace(tools=tools and [_described(tool) for tool in tools])


def _described(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    given = function.get("parameters") or {}
    parameters = {"required": [], **_typed({"type": "object", "properties": {}, **given}, given)}
    described = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", **tool, "function": described}


def _typed(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with a description and exactly one type, by default string; also its properties and items.

    root: where `$ref` is resolved to find the type.
    """
    schema = schema if isinstance(schema, dict) else {}
    types = sorted(types_of(schema, root) - {"null"}) or ["string"]
    found = {"description": "", **schema, "type": types[-1]}
    if types[-1] == "object":
        inner = found.get("properties")
        inner = inner if isinstance(inner, dict) else {}
        found["properties"] = {name: _typed(each, root) for name, each in inner.items()}
    if types[-1] == "array":
        found["items"] = _typed(found.get("items"), root)
    return found


def _with_a_list_of_tools(conversation: Conversation) -> Conversation:
    """Replace absent tools by an empty list."""
    return conversation._replace(tools=conversation.tools or [])


def _with_earlier_pictures_as_text(conversation: Conversation) -> Conversation:
    """Replace all pictures of earlier messages by a line of text."""
    return conversation._replace(messages=without_oldest_pictures(conversation.messages, line=REFUSED_PICTURE))


def without_oldest_pictures(
    messages: list[Message], count: int | None = None, line: SeparateLines = OLD_PICTURE
) -> list[Message]:
    """Return messages in which a line of text replaces the first pictures of earlier messages, at most `count`."""
    oldest = islice(past_pictures(messages), count)
    replaced: dict[int, dict[str, Any]] = {id(part): {"type": "text", "text": line} for part in oldest}
    return [
        {**message, "content": joined_contents([replaced.get(id(part)) or part for part in content])}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def past_pictures(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield the parts of all pictures of earlier messages, the oldest first."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    return (part for content in contents for part in content if part.get("past"))


def _with_one_system_turn(conversation: Conversation) -> Conversation:
    """Convert system messages after the first message to user messages, then merge all adjacent user messages.

    Unchanged if there are no such system messages, or one of them has a picture.
    """
    first, *others = conversation.messages
    systems = [message for message in others if message["role"] == "system"]
    if not systems or any(has_picture(message["content"]) for message in systems):
        return conversation
    others = [{**message, "role": "user"} if message["role"] == "system" else message for message in others]
    return conversation._replace(messages=joined([first, *others], "user"))


def _with_neighbours_joined(conversation: Conversation) -> Conversation:
    """Drop answers with neither content nor tool calls, then merge adjacent messages of one role, except `tool`."""
    given = conversation.messages
    messages = [m for m in given if m["role"] != "assistant" or m.get("content") or m.get("tool_calls")]
    for role in ("system", "user", "assistant"):
        messages = joined(messages, role)
    return conversation._replace(messages=messages)


def _with_one_call_a_turn(conversation: Conversation) -> Conversation:
    """Split an answer with several calls into one per call, each with its results; the first has the content.

    The content includes reasoning. Results without a call of the answer follow the last one.
    """
    messages, found, at = conversation.messages, list[Message](), 0
    while at < len(messages):
        message, end = messages[at], at + 1
        if len(message.get("tool_calls", ())) < 2:
            found.append(message)
        else:
            end = next((i for i in range(end, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            found += _call_by_call(message, messages[at + 1 : end])
        at = end
    return conversation._replace(messages=found)


def _call_by_call(message: Message, results: list[Message]) -> Iterator[Message]:
    """Yield an answer for each call of an answer, each before its results; then the results without a call."""
    by_id: dict[str | None, list[Message]] = {}
    for result in results:
        by_id.setdefault(result.get("tool_call_id"), []).append(result)
    for call in message["tool_calls"]:
        yield {**message, "tool_calls": [call]}
        yield from by_id.pop(call["id"], ())
        message = {"role": "assistant", "content": ""}
    yield from (result for result in results if result.get("tool_call_id") in by_id)


def with_calls_after_content(conversation: Conversation) -> Conversation:
    """Split an answer with content and calls into two messages; the reasoning stays with the calls."""
    found: list[Message] = []
    for message in conversation.messages:
        if message.get("tool_calls") and message.get("content"):
            found.append({"role": "assistant", "content": message["content"]})
            message = {**message, "content": ""}
        found.append(message)
    return conversation._replace(messages=found)


def _with_a_question(conversation: Conversation) -> Conversation:
    """Insert an empty user message after the system prompt unless one of the user follows it."""
    messages = conversation.messages
    at = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if messages[at : at + 1] and messages[at]["role"] == "user":
        return conversation
    return conversation._replace(messages=[*messages[:at], {"role": "user", "content": ""}, *messages[at:]])


def _with_the_system_prompt_in_the_question(conversation: Conversation) -> Conversation:
    """Convert a first system message without a picture to a user message; merge the next if that is the user's."""
    first, *others = conversation.messages
    if first["role"] != "system" or has_picture(first["content"]):
        return conversation
    question = {**first, "role": "user"}
    return conversation._replace(messages=joined([question, *others[:1]], "user") + others[1:])


def with_calls_as_text(conversation: Conversation, *, calls: bool = True, results: bool = True) -> Conversation:
    """Return the conversation with tool calls, tool results or both as text.

    calls: move calls into the content of their answers, each as JSON between <tool_call> and </tool_call>. results:
    convert messages of role `tool` to user messages; if there are any, then merge all adjacent user messages.
    """
    messages = conversation.messages
    if calls:
        messages = [_with_calls_in_content(message) for message in messages]
    if results and any(message["role"] == "tool" for message in messages):
        messages = [{"role": "user", "content": m["content"]} if m["role"] == "tool" else m for m in messages]
        messages = joined(messages, "user")
    return conversation._replace(messages=messages)


def _with_calls_in_content(message: Message) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    text = "\n".join(filter(None, (message["content"], *map(_call_as_text, calls))))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _call_as_text(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else dumps(arguments)
    return f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {written}}}\n</tool_call>'


# Each returns a changed copy of a conversation; those that alter a prompt least come first, but for the pictures,
# since some of the others change only messages without any.
CHANGES: tuple[ConversationChange, ...] = (
    _with_a_list_of_tools,
    _with_tools_described,
    _with_earlier_pictures_as_text,
    _with_one_system_turn,
    _with_one_call_a_turn,
    with_calls_after_content,
    _with_a_question,
    _with_the_system_prompt_in_the_question,
    _with_neighbours_joined,
    with_calls_as_text,
)
