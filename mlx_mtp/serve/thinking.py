"""Convert the request fields for thinking and reasoning effort to variables of the chat template."""

from typing import Any

from ..checkpoint.chat_template import reserved_names
from .fields import ModelInfo, Refused, field_of, fields_of, integer, shown, text
from .template_traits import SWITCHES, rendered, thinking_switch, unread

OFF = ("none", "off", "disable", "disabled")  # reasoning efforts that mean no thinking
BUDGETS = ("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")
BUDGETS += ("max_thinking_tokens",)
INNER_BUDGETS = (("thinking", "budget_tokens"), ("reasoning", "max_tokens"))
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
    budgets, effort = _budgets(body), _effort(body)
    thinks = _thinks(body, given, budgets)
    found = dict(info.template)
    if thinks is not None:
        found |= _switched(info, thinks, warnings)
    if thinks is not False:
        why = "has no effect: the server does not limit the tokens of reasoning"
        warnings += [f"{name}={budget} {why}" for name, budget in budgets.items() if budget > 0]
    if effort and effort not in OFF:
        found |= _with_effort(info, {**found, **given}, effort, warnings)
    passed = [each for each, value in given.items() if value is not None and _by_variable(each, value) is None]
    for name in unread(info.tokenizer, passed):
        warnings.append(f"chat_template_kwargs.{name[:80]}: the chat template does not read it")
    return {**found, **given}


def _budgets(body: dict[str, Any]) -> dict[str, int]:
    """Return the budgets of reasoning tokens in a request by the path of the field. Raises Refused."""
    found = {name: body.get(name) for name in BUDGETS}
    for name, inner in INNER_BUDGETS:
        outer = body.get(name)
        found[f"{name}.{inner}"] = outer.get(inner) if isinstance(outer, dict) else None
    numbers = {name: integer(found, name, -1, 2**31) for name in found}
    return {name: budget for name, budget in numbers.items() if budget is not None}


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
    if unread(info.tokenizer, ["reasoning_effort"]):
        warnings.append(f"reasoning_effort={effort[:80]!r} has no effect: the chat template does not read it")
        return {}
    if rendered(info.tokenizer, {**options, "reasoning_effort": effort}) is not None:
        return {"reasoning_effort": effort}
    if rendered(info.tokenizer, options) is not None:
        warnings.append(f"reasoning_effort={effort[:80]!r} is ignored: the chat template refuses it")
    return {}


def _thinks(body: dict[str, Any], given: dict[str, Any], budgets: dict[str, int]) -> bool | None:
    """Return True if a request switches thinking on, False for off, None for neither. Raises Refused.

    If several fields do, the first in the order below decides. given: the chat template's variables in the request.
    """
    found = [
        *(_by_variable(name, value) for name, value in given.items()),
        switch_of(body, "enable_thinking"),
        _by_thinking(body, budgets),
        switch_of(body, "think") if not isinstance(body.get("think"), str) else None,
        _by_reasoning(body, budgets),
        False if _effort(body) in OFF else None,
        *(_by_budget(budgets, name) for name in BUDGETS),
    ]
    return next((each for each in found if each is not None), None)


def _by_variable(name: str, value: Any) -> bool | None:
    for switch in SWITCHES:
        if switch.name == name and type(value) is type(switch.off) and value in (switch.off, switch.on):
            return value == switch.on
    return None


def _by_thinking(body: dict[str, Any], budgets: dict[str, int]) -> bool | None:
    allowed = f"true, false, or an object with a type: {', '.join(KINDS)}"
    value = field_of(body, "thinking", allowed, lambda v: isinstance(v, (bool, dict)))
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise Refused(f"thinking: type {shown(kind)}; allowed are {', '.join(KINDS)}", param="thinking")
    return False if _by_budget(budgets, "thinking.budget_tokens") is False else KINDS.get(kind or "auto")


def _by_reasoning(body: dict[str, Any], budgets: dict[str, int]) -> bool | None:
    reasoning = fields_of(body, "reasoning")
    enabled = switch_of(reasoning, "enabled")
    return _by_budget(budgets, "reasoning.max_tokens") if enabled is None else enabled


def _by_budget(budgets: dict[str, int], name: str) -> bool | None:
    return False if budgets.get(name) == 0 else None


def switch_of(body: dict[str, Any], name: str) -> bool | None:
    """Return a field that is true or false, None if it is absent or null. Raises Refused for other values."""
    return field_of(body, name, "true or false", lambda v: isinstance(v, bool))


def _effort(body: dict[str, Any]) -> str:
    think = body.get("think")
    effort = text(body, "reasoning_effort") or text(fields_of(body, "reasoning"), "effort")
    return effort or (think if isinstance(think, str) else "")
