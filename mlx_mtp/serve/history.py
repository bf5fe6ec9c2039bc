"""Convert the tool calls and tool results of a conversation to the form that the chat template accepts."""

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from .departure import check_client
from .forms import Message
from .template_traits import CONTENT, Traits
from .tool_calls.schema import dumps, members

SHORT_ID = re.compile("[A-Za-z0-9]{9}")
PLACEHOLDER = "\ufdd2"  # starts the key of a placeholder; a noncharacter
IN_ASCII = r"\ufdd2"  # how templates that print only ASCII print it
KEY = rf'"(?:{PLACEHOLDER}|{re.escape(IN_ASCII)})(\d+)"'
PLACEHOLDERS = re.compile(rf"\{{\s*{KEY}\s*:\s*0\s*\}}|\[\s*{KEY}\s*\]")
Escape = Callable[[Any], Any]  # escapes special tokens in the strings of a JSON value

T = TypeVar("T")


class Unanswered(Generic[T]):
    """The calls of one answer that have no result yet, in their order, each under several keys."""

    def __init__(self):
        self._queues: dict[Hashable, deque[tuple[int, T]]] = {}
        self._taken, self._count = set[int](), 0

    def add(self, call: T, *keys: Hashable) -> None:
        """Append a call under different keys."""
        for key in keys:
            self._queues.setdefault(key, deque()).append((self._count, call))
        self._count += 1

    def take(self, key: Hashable) -> T | None:
        """Remove and return the first call under a key; None if there is none."""
        queue = self._queues.get(key)
        while queue:
            number, call = queue.popleft()
            if number not in self._taken:
                self._taken.add(number)
                return call
        return None


class CallFacts(NamedTuple):
    """The facts of a call that its result needs.

    given: the client's id, or "". id: the template's. number: the call's index among all calls of the conversation.
    """

    given: str
    id: str
    name: str
    number: int


def linked(messages: list[Message], traits: Traits) -> list[Message]:
    """Return messages with ids that the template accepts, and results with their calls' names, in the calls' order.

    If the template prints no content next to calls, content and reasoning become a message of their own before them.
    A result without an id belongs to the first call of the last answer with calls that has no result yet; with a
    `tool_name`, to the first such call of this tool, if there is one.
    """
    found: list[tuple[int, Message]] = []
    links: dict[str, CallFacts] = {}
    pending, count = Unanswered[CallFacts](), 0
    for message in messages:
        check_client()
        if calls := message.get("tool_calls"):
            if traits.content != CONTENT:
                rest = {key: value for key, value in message.items() if key != "tool_calls"}
                found += [(0, rest)] if rest["content"] or rest.get("reasoning_content") else []
                message = {"role": "assistant", "content": traits.content}
            made, pending = [_link(call, count + i, traits) for i, call in enumerate(calls)], Unanswered()
            count += len(calls)
            links |= {link.given: link for link in made if link.given}
            for link in made:
                pending.add(link, *{"", link.given, ("tool", link.name)})
            calls = [{**call, "id": link.id} for call, link in zip(calls, made, strict=True)]
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            found.append(_linked_result(message, links, pending, traits))
        else:
            found.append((0, message))
    runs = itertools.groupby(found, key=lambda each: each[1]["role"])
    return [message for _, run in runs for _, message in sorted(run, key=lambda each: each[0])]


def _link(call: dict[str, Any], number: int, traits: Traits) -> CallFacts:
    given, name = call.get("id") or "", call["function"]["name"]
    id = f"functions.{name}:{number}" if traits.ids == "numbered" else _id(given or f"call_{number}", traits)
    return CallFacts(given, id, name, number)


def _id(given: str, traits: Traits) -> str:
    """Return an id that the template accepts: the given one if possible, otherwise a hash of it."""
    if traits.ids != "short" or SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _linked_result(
    message: Message, links: dict[str, CallFacts], pending: Unanswered[CallFacts], traits: Traits
) -> tuple[int, Message]:
    """Return a result's call number, and the result with the call's id and, unless it has a name, the call's name.

    Without a call: 0, and the result with its own id in the template's form. pending: by the client's ids, by the
    tools' names, and all by "".
    """
    message, given = {**message}, message.get("tool_call_id", "")
    tool = message.pop("tool_name", None)
    named = pending.take(("tool", tool)) if tool and not given else None
    if not (link := named or pending.take(given) or links.get(given)):
        return 0, {**message, "tool_call_id": _id(given, traits)} if given else message
    return link.number, {**message, "tool_call_id": link.id, "name": message.get("name") or link.name}


def with_arguments(
    messages: list[Message], traits: Traits, escape: Escape, *, exact: bool
) -> tuple[list[Message], list]:
    """Return messages with tool-call arguments in the template's form, and the texts of their placeholders.

    exact: put placeholders in arguments that the client wrote as JSON text and that the template may print otherwise;
    `restored` replaces them. Text that is no JSON object becomes {"arguments": text}, unless it has a placeholder or
    the template prints text. Special tokens are escaped with `escape`.
    """
    texts: list[str] = []
    found = [dict(message) for message in messages]
    for message in found:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_with_arguments(call, traits, escape, exact, texts) for call in calls]
    return found, texts


def restored(text: str, texts: list[str]) -> str | None:
    """Return a rendered text with its placeholders replaced by `texts`; None if the template changed one of them."""
    if not texts:
        return text
    text = PLACEHOLDERS.sub(lambda match: texts[int(match[1] or match[2])], text)
    return None if PLACEHOLDER in text or IN_ASCII in text else text


def placeholders(text: str) -> int:
    """Return the number of different placeholders in a rendered text."""
    return len({match[1] or match[2] for match in PLACEHOLDERS.finditer(text)})


def _with_arguments(
    call: dict[str, Any], traits: Traits, escape: Escape, exact: bool, texts: list[str]
) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = _arguments(function.pop("arguments"), traits.arguments, escape, exact, texts)
    escaped = escape({**call, "function": function})
    return {**escaped, "function": {**escaped["function"], "arguments": arguments}}


def _arguments(given: Any, kind: str, escape: Escape, exact: bool, texts: list[str]) -> Any:
    if not isinstance(given, str):
        return escape(dumps(given) if kind == "text" else given)
    if kind == "text":
        return escape(given)
    if kind == "json" and exact:
        return {_placeholder(escape(given), texts): 0}
    found = parsed(given)
    if not isinstance(found, dict):
        return {"arguments": escape(given)}
    written = {json.loads(key): value for key, value in members(given.strip(), 0)} if exact else {}
    return {escape(key): _member(value, written.get(key), escape, texts) for key, value in found.items()}


def _member(value: Any, written: str | None, escape: Escape, texts: list[str]) -> Any:
    """Return an argument's value, escaped, or a placeholder if it is a dict or list not written as by `dumps`."""
    if written is None or not isinstance(value, dict | list) or written == dumps(value):
        return escape(value)
    placeholder = _placeholder(escape(written), texts)
    return {placeholder: 0} if isinstance(value, dict) else [placeholder]


def _placeholder(text: str, texts: list[str]) -> str:
    texts.append(text)
    return f"{PLACEHOLDER}{len(texts) - 1}"


def parsed(arguments: Any) -> Any:
    """Return a call's arguments as an object if they are the JSON of one, otherwise unchanged."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
