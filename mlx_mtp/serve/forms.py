"""List the forms of a conversation that mean the same, for templates that refuse it as it is."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .tool_calls.schema import dumps, types_of

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages as OpenAI's chat completions have them, with texts as content, and the tools that are offered."""

    messages: list[Message]
    tools: list[Any] | None


Change = Callable[[Conversation], Conversation]


def forms(conversation: Conversation) -> Iterator[tuple[tuple[Change, ...], Conversation]]:
    """The conversation itself, then with one change each, then with more and more of the changes together."""
    found: list[Conversation] = []
    sets = [(), *((change,) for change in CHANGES), *(CHANGES[:n] for n in range(2, len(CHANGES) + 1))]
    for changes in sets:
        if (form := changed(conversation, changes)) not in found:
            found.append(form)
            yield changes, form


def changed(conversation: Conversation, changes: Iterable[Change]) -> Conversation:
    """The conversation with these changes, one after another."""
    for change in changes:
        conversation = change(conversation)
    return conversation


def joined(messages: list[Message], role: str, join: Callable[[Message, Message], Message]) -> list[Message]:
    """Join neighbouring messages of a role."""
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] == role:
            found[-1] = join(found[-1], message)
        else:
            found.append(message)
    return found


def one_turn(message: Message, more: Message) -> Message:
    """Join two messages of a role: their contents, reasoning and tool calls."""
    found = {**message, **more}
    for name, space in (("content", "\n\n"), ("reasoning_content", "\n")):
        if texts := [each[name] for each in (message, more) if each.get(name)]:
            found[name] = space.join(texts)
    if calls := [*message.get("tool_calls", ()), *more.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return found


def _with_tools_described(conversation: Conversation) -> Conversation:
    """Give each tool a description, parameters, and each parameter a type, where it has none."""
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
    """A schema, and those in it, with one type by name."""
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
    """Offer an empty list of tools where there are none."""
    return conversation._replace(tools=conversation.tools or [])


def _with_one_system_turn(conversation: Conversation) -> Conversation:
    """Make a user's turn of each system turn but the first, joined with the next, as templates may alternate."""
    first, *others = conversation.messages
    if not any(message["role"] == "system" for message in others):
        return conversation
    others = [{**message, "role": "user"} if message["role"] == "system" else message for message in others]
    return conversation._replace(messages=joined([first, *others], "user", one_turn))


def _with_neighbours_joined(conversation: Conversation) -> Conversation:
    """Join neighbouring turns of each of the roles; empty answers belong to no turn."""
    messages = [message for message in conversation.messages if not _is_empty_answer(message)]
    for role in ("system", "user", "assistant"):
        messages = joined(messages, role, one_turn)
    return conversation._replace(messages=messages)


def _is_empty_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls"))


def _with_one_call_a_turn(conversation: Conversation) -> Conversation:
    """Split an answer of several calls into one answer a call, each with its results behind it."""
    found: list[Message] = []
    rest = conversation.messages
    while rest:
        (message, *rest), calls = rest, rest[0].get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        behind = next((i for i, each in enumerate(rest) if each["role"] != "tool"), len(rest))
        results, rest = rest[:behind], rest[behind:]
        for call in calls:
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            results = [result for result in results if result not in own]
            found += [{**message, "tool_calls": [call]}, *own]
            message = {"role": "assistant", "content": ""}
        found += results
    return conversation._replace(messages=found)


def with_calls_behind_content(conversation: Conversation) -> Conversation:
    """Split an answer of content and calls into two turns; reasoning stays with the calls."""
    found: list[Message] = []
    for message in conversation.messages:
        if message.get("tool_calls") and message.get("content"):
            found.append({"role": "assistant", "content": message["content"]})
            message = {**message, "content": ""}
        found.append(message)
    return conversation._replace(messages=found)


def _with_a_question(conversation: Conversation) -> Conversation:
    """Begin with a question, an empty one where an answer, a result or nothing follows the system prompt."""
    messages = conversation.messages
    at = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if messages[at : at + 1] and messages[at]["role"] == "user":
        return conversation
    return conversation._replace(messages=[*messages[:at], {"role": "user", "content": ""}, *messages[at:]])


def _with_the_system_prompt_in_the_question(conversation: Conversation) -> Conversation:
    first, *others = conversation.messages
    if first["role"] != "system":
        return conversation
    question = {**first, "role": "user"}
    return conversation._replace(messages=joined([question, *others[:1]], "user", one_turn) + others[1:])


def with_calls_as_text(conversation: Conversation, *, calls: bool = True, results: bool = True) -> Conversation:
    """Write calls into the contents of answers, and results as a user's turns."""
    messages = conversation.messages
    if calls:
        messages = [_with_calls_in_content(message) for message in messages]
    if results:
        asked = [_as_question(message) for message in messages]
        messages = joined(asked, "user", one_turn) if asked != messages else messages
    return conversation._replace(messages=messages)


def _as_question(message: Message) -> Message:
    return {"role": "user", "content": message["content"]} if message["role"] == "tool" else message


def _with_calls_in_content(message: Message) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    text = "\n".join(filter(None, (message["content"], *map(_call_as_text, calls))))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _call_as_text(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else dumps(arguments)
    return f'{{"name": {dumps(name)}, "arguments": {written}}}'


# From those that change a prompt least.
CHANGES: tuple[Change, ...] = (
    _with_a_list_of_tools,
    _with_tools_described,
    _with_one_system_turn,
    _with_one_call_a_turn,
    with_calls_behind_content,
    _with_a_question,
    _with_the_system_prompt_in_the_question,
    _with_neighbours_joined,
    with_calls_as_text,
)
