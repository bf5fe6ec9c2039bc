"""Convert the request fields for thinking and reasoning effort to variables of the chat template."""

from typing import Any

from ..checkpoint.chat_template import reserved_names
from .fields import ModelInfo, Refused, field_of, fields_of, integer, text
from .template_probes import SWITCH_NAMES, SWITCHES, rendered, thinking_switch, unread

OFF = ("none", "off", "disable", "disabled")  # reasoning efforts that mean no thinking
BUDGETS = ("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")
KINDS = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
LOWEST = "low"


def template_of(body: dict[str, Any], info: ModelInfo, warnings: list[str]) -> dict[str, Any]:
    """Return a request's chat-template variables. Raises Refused for invalid fields.

    They are the defaults, overridden by those that switch thinking or set the effort, and these by the request's
    own variables. warnings: appended to, for settings that are found to have no effect.
    """
    name, allowed = "chat_template_kwargs", "an object of the template's own variables"
    given = field_of(body, name, allowed, lambda v: not v or isinstance(v, dict)) or {}
    if reserved := sorted((reserved_names() | {"tools"}) & given.keys()):
        raise Refused(f"{name}: {reserved[0]} is no variable of the chat template; leave it out", param=name)
    thinks, effort = _thinks(body, given), _effort(body)
    found = dict(info.template)
    if thinks is not None:
        found |= _switched(info, thinks, warnings)
    if effort and effort not in OFF:
        found |= _with_effort(info, {**found, **given}, effort, warnings)
    for name in unread(info.tokenizer, given.keys() - SWITCH_NAMES):
        warnings.append(f"chat_template_kwargs.{name[:80]}: the chat template does not read it")
    return {**found, **given}


def _switched(info: ModelInfo, thinks: bool, warnings: list[str]) -> dict[str, Any]:
    if switch := thinking_switch(info.tokenizer, info.template):
        return {switch.name: switch.on if thinks else switch.off}
    if not thinks:
        warnings.append("thinking cannot be switched off: the chat template has no variable for it")
        return _with_effort(info, info.template, LOWEST, [])
    if not info.tokenizer.has_thinking:
        warnings.append("thinking cannot be switched on: the chat template has no variable for it")
    return {}


def _with_effort(info: ModelInfo, options: dict[str, Any], effort: str, warnings: list[str]) -> dict[str, Any]:
    if rendered(info.tokenizer, {**options, "reasoning_effort": effort}) is not None:
        return {"reasoning_effort": effort}
    if rendered(info.tokenizer, options) is not None:
        warnings.append(f"reasoning_effort={effort[:80]!r} is ignored: the chat template refuses it")
    return {}


def _thinks(body: dict[str, Any], given: dict[str, Any]) -> bool | None:
    """Return True if a request switches thinking on, False for off, None for neither. Raises Refused.

    If several fields do, the first in the order below decides.
    """
    found = [
        *(_by_variable(name, value) for name, value in given.items()),
        switch_of(body, "enable_thinking"),
        _by_thinking(body),
        switch_of(body, "think") if not isinstance(body.get("think"), str) else None,
        _by_reasoning(body),
        False if _effort(body) in OFF else None,
        *(_by_budget(body, name) for name in BUDGETS),
    ]
    return next((each for each in found if each is not None), None)


def _by_variable(name: str, value: Any) -> bool | None:
    for switch in SWITCHES:
        if switch.name == name and type(value) is type(switch.off) and value in (switch.off, switch.on):
            return value == switch.on
    return None


def _by_thinking(body: dict[str, Any]) -> bool | None:
    allowed = f"true, false, or an object with a type: {', '.join(KINDS)}"
    value = field_of(body, "thinking", allowed, lambda v: isinstance(v, (bool, dict)))
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise Refused(f"thinking: type {kind!r}; allowed are {', '.join(KINDS)}", param="thinking")
    return False if _by_budget(value, "budget_tokens") is False else KINDS.get(kind or "auto")


def _by_reasoning(body: dict[str, Any]) -> bool | None:
    reasoning = fields_of(body, "reasoning")
    enabled = switch_of(reasoning, "enabled")
    return _by_budget(reasoning, "max_tokens") if enabled is None else enabled


def _by_budget(body: dict[str, Any], name: str) -> bool | None:
    return False if integer(body, name, -1, 2**31) == 0 else None


def switch_of(body: dict[str, Any], name: str) -> bool | None:
    """Return a field that is true or false, None if it is absent or null. Raises Refused for other values."""
    return field_of(body, name, "true or false", lambda v: isinstance(v, bool))


def _effort(body: dict[str, Any]) -> str:
    think = body.get("think")
    effort = text(body, "reasoning_effort") or text(fields_of(body, "reasoning"), "effort")
    return effort or (think if isinstance(think, str) else "")
