"""Detect which variables, tools, forms of calls, ids, arguments and results a chat template accepts and prints."""

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

QUESTION = {"role": "user", "content": "?"}
SYSTEM = {"role": "system", "content": "."}
TEXT = {"type": "string", "description": "a text"}
PARAMETERS = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "probe", "description": "a probe", "parameters": PARAMETERS}}
OTHER = "zqx"  # a value that no template compares with


class Traits(NamedTuple):
    """The forms that a chat template accepts.

    arguments: "json", an object that is printed as JSON; "members", an object whose members the template reads;
        "text", a string that is printed unchanged.
    ids: "any"; "short", nine letters and digits; "numbered", `functions.NAME:NUMBER`, if the template prints a call's
        id instead of its name.
    content: CONTENT if the template prints content next to calls; otherwise the empty content that calls need.
    calls, results: whether calls, and messages of role `tool`, are printed.
    reasoning: the message field from which the template reads reasoning; `reasoning_content` if it reads none.
    """

    arguments: str = "members"
    ids: str = "any"
    content: str | None = CONTENT
    calls: bool = True
    results: bool = True
    reasoning: str = REASONING_FIELDS[0]


class Probe(NamedTuple):
    """A form of a call that the template accepts, and its rendering of a conversation with that call."""

    id: str
    arguments: Any
    content: str | None
    text: str


def traits_of(tokenizer: Any) -> Traits:
    """Return the traits of a tokenizer's chat template, found by rendering a call in several forms."""
    return _traits(tokenizer, str(getattr(tokenizer, "chat_template", None)))


@functools.lru_cache(maxsize=8)
def _traits(tokenizer: Any, template: str) -> Traits:
    return _call_traits(tokenizer)._replace(reasoning=_reasoning_field(tokenizer))


def _reasoning_field(tokenizer: Any) -> str:
    """Return the first of REASONING_FIELDS that the template prints in an answer or next to a call.

    If it prints none, return `reasoning_content`.
    """
    call, result = _conversation(SHORT_ID, ARGUMENTS, "")[1:]
    for field in REASONING_FIELDS:
        for message, *rest in (({"role": "assistant", "content": CONTENT},), (call, result)):
            messages = [{"role": "user", "content": "."}, {**message, field: REASONING}, *rest]
            with contextlib.suppress(ValueError):
                if REASONING in render(tokenizer, messages, OPTIONS):
                    return field
    return REASONING_FIELDS[0]


def _call_traits(tokenizer: Any) -> Traits:
    found = Traits()
    for id, arguments, content, text in probes(tokenizer, ARGUMENTS):
        found = Traits(calls=NAME in text or text.count(id) > 1, results=RESULT in text)
        as_python = str(arguments) in text and isinstance(arguments, dict)  # the template needs a string
        if not found.calls or (content or "") not in text or as_python:
            continue
        kind = "text" if isinstance(arguments, str) else "json" if AS_JSON.search(text) else "members"
        numbered = f"functions.{NAME}:0" in text or NAME not in text
        ids = "numbered" if numbered else "short" if id == SHORT_ID else "any"
        return found._replace(arguments=kind, ids=ids, content=content)
    return found


def probes(tokenizer: Any, arguments: dict[str, Any]) -> Iterator[Probe]:
    """Yield a call with these arguments in each form that the template accepts, the commonest form first.

    The call's result is rendered too, unless the template accepts no form with it.
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


class Switch(NamedTuple):
    """A chat-template variable for thinking. off, on: its values that switch thinking off and on."""

    name: str
    off: Any
    on: Any


SWITCHES = (
    Switch("enable_thinking", False, True),
    Switch("thinking", False, True),
    Switch("reasoning", False, True),
    Switch("skip_thinking", True, False),
    Switch("thinking_mode", "off", "on"),
    Switch("thinking_mode", "disabled", "enabled"),
    Switch("thinking_option", "off", "on"),
    Switch("reasoning_effort", "none", "high"),
    Switch("thinking_budget", 0, -1),
    Switch("reasoning_budget", 0, -1),
)


def rendered(tokenizer: Any, options: dict[str, Any], *messages: dict[str, Any]) -> str | None:
    """Return the rendered prompt of messages, by default a short question; None if the template refuses them."""
    try:
        return render(tokenizer, [*(messages or (QUESTION,))], {**options, "add_generation_prompt": True})
    except ValueError:
        return None


def thinking_switch(tokenizer: Any, options: dict[str, Any]) -> Switch | None:
    """Return the first of SWITCHES whose two values render different prompts; None if there is none.

    The template must accept the value `off`. A text that it only prints is no switch.
    """
    return next((switch for switch in SWITCHES if _switches(tokenizer, options, switch)), None)


def _switches(tokenizer: Any, options: dict[str, Any], switch: Switch) -> bool:
    off, on = (rendered(tokenizer, {**options, switch.name: value}) for value in (switch.off, switch.on))
    if off is None or off == on:
        return False
    if not isinstance(switch.off, str):
        return True
    # A template that only prints the value has no switch.
    other = rendered(tokenizer, {**options, switch.name: OTHER})
    return other is None or off.replace(switch.off, OTHER) != other.replace(switch.off, OTHER)


def renders_tools(tokenizer: Any, options: dict[str, Any]) -> bool:
    """Return whether an offered tool changes the prompt of a question, alone or after a system message.

    A template that refuses the tool changes the prompt, too.
    """
    offered, conversations = {**options, "tools": [TOOL]}, ((QUESTION,), (SYSTEM, QUESTION))
    return any(rendered(tokenizer, offered, *each) != rendered(tokenizer, options, *each) for each in conversations)


def unread(tokenizer: Any, names: Any) -> list[str]:
    """Return the names that do not occur in the chat template; [] if there is none, or Python code renders it."""
    template = getattr(tokenizer, "chat_template", None)
    if not template or getattr(tokenizer, "_chat_template", None) is not None:
        return []
    source = template if isinstance(template, str) else json.dumps(template)
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", source)]
