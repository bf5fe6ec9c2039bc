"""Detect what a chat template takes of tool calls: the form of their ids and of their arguments."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..checkpoint.chat_template import render

NAME, CONTENT, RESULT = "probedname", "probedcontent", "probedresult"
ARGUMENTS = {"probedkey": "probedvalue"}
LONG_ID, SHORT_ID = "call_0123456789abcdef01234567", "call00000"
REASONING, REASONING_FIELDS = "probedreasoning", ("reasoning_content", "thinking", "reasoning", "thought")
AS_JSON = re.compile(r'\{\s*"probedkey"\s*:\s*"probedvalue"\s*\}')
OTHER_TOOL = {"name": "other", "description": ".", "parameters": {"type": "object", "properties": {}, "required": []}}
OPTIONS = {"add_generation_prompt": False, "tools": [{"type": "function", "function": OTHER_TOOL}]}


class Traits(NamedTuple):
    """The forms that one template takes.

    arguments: "json", an object that is printed as JSON; "members", an object whose members the template reads;
        "text", a string that is printed as it is.
    ids: "any"; "short", nine letters and digits; "numbered", `functions.NAME:NUMBER`, since ids stand for names.
    content: beside calls; any text, where it is printed, else the empty one with which calls are printed.
    calls, results: calls, and messages of the role `tool`, are printed.
    reasoning: the field of a message that has its reasoning.
    """

    arguments: str = "members"
    ids: str = "any"
    content: str | None = CONTENT
    calls: bool = True
    results: bool = True
    reasoning: str = REASONING_FIELDS[0]


class Probe(NamedTuple):
    """A conversation with one call and its result, as the template renders it in a form that it takes."""

    id: str
    arguments: Any
    content: str | None
    text: str


def traits_of(tokenizer: Any) -> Traits:
    """Render a call in several forms and compare; the default traits where the template prints no call."""
    return _traits(tokenizer, str(getattr(tokenizer, "chat_template", None)))


@functools.lru_cache(maxsize=8)
def _traits(tokenizer: Any, template: str) -> Traits:
    return _call_traits(tokenizer)._replace(reasoning=_reasoning_field(tokenizer))


def _reasoning_field(tokenizer: Any) -> str:
    """The first field whose text the template prints, in an answer or beside a call, else the usual one."""
    call, result = _conversation(SHORT_ID, ARGUMENTS, "")[1:]
    for field in REASONING_FIELDS:
        for message, *behind in (({"role": "assistant", "content": CONTENT},), (call, result)):
            messages = [{"role": "user", "content": "."}, {**message, field: REASONING}, *behind]
            with contextlib.suppress(ValueError):
                if REASONING in render(tokenizer, messages, OPTIONS):
                    return field
    return REASONING_FIELDS[0]


def _call_traits(tokenizer: Any) -> Traits:
    found = Traits()
    for id, arguments, content, text in probes(tokenizer, ARGUMENTS):
        found = Traits(calls=NAME in text or text.count(id) > 1, results=RESULT in text)
        as_python = str(arguments) in text and isinstance(arguments, dict)  # so the template takes a string
        if not found.calls or (content or "") not in text or as_python:
            continue
        kind = "text" if isinstance(arguments, str) else "json" if AS_JSON.search(text) else "members"
        numbered = f"functions.{NAME}:0" in text or NAME not in text
        ids = "numbered" if numbered else "short" if id == SHORT_ID else "any"
        return found._replace(arguments=kind, ids=ids, content=content)
    return found


def probes(tokenizer: Any, arguments: dict[str, Any]) -> Iterator[Probe]:
    """Render a call in each form that the template takes, the form that most templates take first.

    Without the result where none of the forms is taken with it.
    """
    forms = itertools.product((LONG_ID, SHORT_ID), (arguments, json.dumps(arguments)), (CONTENT, "", None))
    conversations = [(form, _conversation(*form)) for form in forms]
    found = False
    for with_result in (True, False):
        for form, messages in conversations:
            try:
                text = render(tokenizer, messages if with_result else messages[:-1], OPTIONS)
            except ValueError:
                continue
            found = True
            yield Probe(*form, text)
        if found:
            return


def _conversation(id: str, arguments: Any, content: str | None) -> list[dict[str, Any]]:
    call = {"id": id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": id, "name": "other", "content": RESULT}
    return [{"role": "user", "content": "."}, answer, result]
