"""Show and change the sampling options of a chat: /set."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..decoding.logit_rules import LogitRules
from ..decoding.sampling import Sampling
from ..session import ChatSession
from .terminal import printable

ALIASES = {"temperature": "temp"}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # values without effect
DEFAULTS = {field.name: field.default for field in fields(Sampling) if field.name != "xtc_special_tokens"}
KINDS = {name: type(value) for name, value in {**DEFAULTS, **PENALTIES}.items()} | {"seed": int, "max_tokens": int}
NAMES = sorted({*KINDS, *ALIASES} - {"temp"})


def apply_penalties(session: ChatSession, penalties: Mapping[str, float]) -> None:
    """Apply these of mlx-lm's penalties, by name, in later turns; they replace all penalties that were set before.

    Values without effect (PENALTIES) are ignored. Raises ValueError, without a change, for a repetition_penalty that
    is not above 0.
    """
    if penalties.get("repetition_penalty", 1.0) <= 0:
        raise ValueError(f"repetition_penalty={penalties['repetition_penalty']}: allowed is above 0")
    active: dict[str, Any] = {name: value for name, value in penalties.items() if value != PENALTIES[name]}
    session.change(logits_processors=[LogitRules(**active)] if active else None)


def settings(session: ChatSession, penalties: Mapping[str, float]) -> str:
    """Return the values that /set can change as text, one line."""
    values = {**DEFAULTS, **PENALTIES, "seed": None, "max_tokens": None, **session.options, **penalties}
    return " · ".join(f"{name} {values[ALIASES.get(name, name)]}" for name in NAMES)


def change(session: ChatSession, penalties: dict[str, float], argument: str) -> str:
    """Set an option for later answers; return its name and value. argument: "NAME VALUE", or "NAME" to show it.

    Raises ValueError, without a change, for an unknown name or a value that is not allowed.
    """
    name, *rest = argument.replace("=", " ").split()
    key = ALIASES.get(name, name)
    if key not in KINDS or len(rest) > 1:
        raise ValueError(f"/set {printable(argument)[:60]}: expected one of {', '.join(NAMES)} and a value")
    if rest:
        value = _number(name, rest[0], KINDS[key])
        if key in PENALTIES:
            apply_penalties(session, {**penalties, key: value})
            penalties[key] = value
        else:
            session.change(**{key: value})
    found = {**DEFAULTS, **PENALTIES, **session.options, **penalties}.get(key)
    return f"{name} {found}"


def _number(name: str, text: str, kind: type) -> Any:
    """Return a text as a number of this type; raise ValueError unless it is a finite one."""
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"/set {name} {printable(text)[:30]}: expected {noun}")
    return value
