"""Detect what a chat template does with its variables and tools, by rendering a short conversation."""

import json
import re
from typing import Any, NamedTuple

from ..checkpoint.chat_template import render

QUESTION = {"role": "user", "content": "?"}
SYSTEM = {"role": "system", "content": "."}
TEXT = {"type": "string", "description": "a text"}
PARAMETERS = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "probe", "description": "a probe", "parameters": PARAMETERS}}
OTHER = "zqx"  # a value that no template compares with


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
