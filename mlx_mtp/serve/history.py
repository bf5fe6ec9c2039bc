"""Bring tool calls and their results in a conversation to the form that the chat template takes."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from .forms import Message
from .template_traits import CONTENT, Traits
from .tool_calls.json_text import members
from .tool_calls.schema import dumps

SHORT_ID = re.compile("[A-Za-z0-9]{9}")
STAND_IN = "\ufdd2"  # begins the key of a value that stands for a text; a noncharacter
ESCAPED = r"\ufdd2"  # as templates print it that print ASCII only
KEY = rf'"(?:{STAND_IN}|{re.escape(ESCAPED)})(\d+)"'
STANDING_IN = re.compile(rf"\{{\s*{KEY}\s*:\s*0\s*\}}|\[\s*{KEY}\s*\]")
Hold = Callable[[Any], Any]  # takes marks out of the texts of a JSON value


class Link(NamedTuple):
    """What a result needs of its call. given: the id as the client wrote it."""

    given: str
    id: str
    name: str
    number: int


def linked(messages: list[Message], traits: Traits) -> list[Message]:
    """Messages with ids that the template takes, results with their calls' names and in the order of the calls.

    A result without an id belongs to the first call of the last answer that has no result yet.
    """
    found: list[tuple[int, Message]] = []
    links: dict[str, Link] = {}
    waiting: list[Link] = []
    count = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            if traits.content != CONTENT:
                found += [(0, each) for each in _without_calls(message)]
                message = {"role": "assistant", "content": traits.content}
            waiting = [_link(call, count + i, traits) for i, call in enumerate(calls)]
            count += len(calls)
            links |= {link.given: link for link in waiting}
            named = [{**call, "id": link.id} for call, link in zip(calls, waiting, strict=True)]
            message = {**message, "tool_calls": named}
        if message["role"] == "tool":
            found.append(_linked_result(message, links, waiting, traits))
        else:
            found.append((0, message))
    runs = itertools.groupby(found, key=lambda each: each[1]["role"])
    return [message for _, run in runs for _, message in sorted(run, key=lambda each: each[0])]


def _without_calls(message: Message) -> list[Message]:
    """What an answer says beside its calls, as a turn of its own."""
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return [said] if said["content"] or said.get("reasoning_content") else []


def _link(call: dict[str, Any], number: int, traits: Traits) -> Link:
    given, name = call.get("id") or "", call["function"]["name"]
    own = f"functions.{name}:{number}" if traits.ids == "numbered" else _id(given or f"call_{number}", traits)
    return Link(given, own, name, number)


def _id(given: str, traits: Traits) -> str:
    """The id itself where the template takes it, else one that follows from it."""
    if traits.ids != "short" or SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _linked_result(
    message: Message, links: dict[str, Link], waiting: list[Link], traits: Traits
) -> tuple[int, Message]:
    """A result with the id and the name of its call, and the call's number."""
    given = message.get("tool_call_id", "")
    link = next((link for link in waiting if link.given == given or not given), None)
    if link:
        waiting.remove(link)
    link = link or links.get(given)
    if not link:
        return 0, {**message, "tool_call_id": _id(given, traits)} if given else message
    return link.number, {**message, "tool_call_id": link.id, "name": message.get("name") or link.name}


def with_arguments(messages: list[Message], traits: Traits, hold: Hold, *, exact: bool) -> tuple[list[Message], list]:
    """Messages with the arguments of calls in the template's form, and the texts of the stand-ins among them.

    exact: what the template would write in letters of its own is a stand-in for the text as the client wrote it.
    Text that is no JSON object is an object's one member where the template reads members.
    """
    texts: list[str] = []
    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [_with_arguments(call, traits, hold, exact, texts) for call in calls]}
        found.append(message)
    return found, texts


def restored(text: str, texts: list[str]) -> str | None:
    """A rendered text with the texts that stand-ins stand for; None where the template took one of them apart."""
    if not texts:
        return text
    text = STANDING_IN.sub(lambda match: texts[int(match[1] or match[2])], text)
    return None if STAND_IN in text or ESCAPED in text else text


def stand_ins(text: str) -> int:
    """The number of stand-ins that a rendered text has."""
    return len({match[1] or match[2] for match in STANDING_IN.finditer(text)})


def _with_arguments(
    call: dict[str, Any], traits: Traits, hold: Hold, exact: bool, texts: list[str]
) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = _arguments(function.pop("arguments"), traits.arguments, hold, exact, texts)
    held = hold({**call, "function": function})
    return {**held, "function": {**held["function"], "arguments": arguments}}


def _arguments(given: Any, kind: str, hold: Hold, exact: bool, texts: list[str]) -> Any:
    if not isinstance(given, str):
        return hold(dumps(given) if kind == "text" else given)
    if kind == "text":
        return hold(given)
    if kind == "json" and exact:
        return {_stand_in(hold(given), texts): 0}
    found = parsed(given)
    if not isinstance(found, dict):
        return {"arguments": hold(given)}
    written = {json.loads(key): value for key, value in members(given.strip(), 0)} if exact else {}
    return {hold(key): _member(value, written.get(key), hold, texts) for key, value in found.items()}


def _member(value: Any, written: str | None, hold: Hold, texts: list[str]) -> Any:
    """A member of an object; a stand-in where it is an object or a list that JSON's usual form does not equal."""
    if written is None or not isinstance(value, dict | list) or written == dumps(value):
        return hold(value)
    stand_in = _stand_in(hold(written), texts)
    return {stand_in: 0} if isinstance(value, dict) else [stand_in]


def _stand_in(text: str, texts: list[str]) -> str:
    texts.append(text)
    return f"{STAND_IN}{len(texts) - 1}"


def parsed(arguments: Any) -> Any:
    """Read the arguments of a call, which are JSON where they are an object; else they stay what they are."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
