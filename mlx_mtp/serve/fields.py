"""Read the fields of requests that all APIs share; what would change the answer and is not supported is refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..cache.prompt_prefix import RESERVED_KEYS
from .job import Ask
from .prompts import Marks, Prompt

MOST_CHOICES, MOST_STOPS, MOST_TOP = 16, 64, 20
MOST_SAID = 1000  # characters of a reason, which may quote the request


class Refused(ValueError):
    """A request that cannot be served: an HTTP status, the field that is wrong, and a code for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message[:MOST_SAID])
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Door:
    """What requests are measured by: the names of the model, its tokenizer, and how long a text may be.

    names:    that a request may call the model; "*" allows any. defaults: of sampling, where a request says nothing.
    positions: most tokens of a prompt and its answer. max_tokens: of an answer where a request says nothing.
    turns:    where turns begin has to be known, as caches hold states.
    encode:   text to ids. template: variables of the chat template.
    """

    names: tuple[str, ...]
    tokenizer: Any
    marks: Marks
    positions: int
    max_tokens: int | None
    defaults: dict[str, Any]
    template: dict[str, Any]
    turns: bool
    created: int
    seeds: Callable[[], int] = field(repr=False, default=lambda: 0)

    @property
    def name(self) -> str:
        return self.names[0]

    def known(self, name: Any) -> bool:
        return "*" in self.names or name in self.names

    def called(self, body: dict[str, Any]) -> str:
        """Return the name by which a request calls the model; refuse another model's."""
        if body.get("model") is None:
            return self.name
        name = text(body, "model")
        if not self.known(name):
            allowed = ", ".join(repr(each) for each in self.names)
            raise Refused(
                f"model={repr(name)[:80]}: allowed is {allowed}", status=404, param="model", code="model_not_found"
            )
        return name

    def asks(
        self, prompt: Prompt, body: dict[str, Any], *, most: int | None, choices: int = 1, **more: Any
    ) -> list[Ask]:
        """Put together what answers need, whose draws differ; the prompt has to leave room for a token of them."""
        room = self.positions - len(prompt.tokens)
        if not prompt.tokens:
            raise Refused("the prompt is empty", param="prompt")
        if room < 1:
            numbers = f"{len(prompt.tokens)} tokens > {self.positions - 1} maximum"
            said = next(name for name in ("messages", "input", "prompt") if name in body)
            raise Refused(f"prompt is too long: {numbers}", code="context_length_exceeded", param=said)
        most = self.max_tokens if most is None else most
        more["max_tokens"] = room if most is None else min(most, room)
        sampling, penalties = self.sampling(body), self.penalties(body)
        seeds = ((sampling["seed"] + i) % 2**63 for i in range(choices))
        return [Ask(*prompt, sampling={**sampling, "seed": seed}, penalties=penalties, **more) for seed in seeds]

    def sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        """Read what decides the draws, over the defaults."""
        given = {
            "temp": number(body, "temperature", 0, 100),
            "top_p": number(body, "top_p", 0, 1),
            "top_k": integer(body, "top_k", -1, 2**31),
            "min_p": number(body, "min_p", 0, 1),
            "seed": integer(body, "seed", -(2**63), 2**63 - 1),
        }
        found = {**self.defaults, **{name: value for name, value in given.items() if value is not None}}
        found["top_k"] = max(0, found.get("top_k") or 0)
        found["seed"] = self.seeds() if found.get("seed") is None else found["seed"] % 2**63
        return {name: value for name, value in found.items() if name not in PENALTIES}

    def penalties(self, body: dict[str, Any]) -> dict[str, Any]:
        """Read what changes logits by the text before."""
        found = {
            "repetition_penalty": number(body, "repetition_penalty", 0, 100),
            "presence_penalty": number(body, "presence_penalty", -2, 2),
            "frequency_penalty": number(body, "frequency_penalty", -2, 2),
            "logit_bias": self._bias(body),
        }
        found = {name: self.defaults.get(name) if value is None else value for name, value in found.items()}
        found = {name: value for name, value in found.items() if value}
        if found.get("repetition_penalty") == 1:
            del found["repetition_penalty"]
        size = integer(body, "repetition_context_size", 1, 2**31)
        return {**found, "repetition_context_size": size} if size and "repetition_penalty" in found else found

    def _bias(self, body: dict[str, Any]) -> dict[int, float] | None:
        given = body.get("logit_bias")
        if given is None:
            return None
        most = len(self.tokenizer)
        try:
            found = {int(token): float(bias) for token, bias in given.items()}
        except (TypeError, ValueError, AttributeError, OverflowError):
            found = {-1: 0.0}
        if not all(0 <= token < most and -100 <= bias <= 100 for token, bias in found.items()):
            raise Refused(
                f"logit_bias: allowed are token ids below {most} with values -100 to 100", param="logit_bias"
            )
        return found


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


def _field(body: dict[str, Any], name: str, allowed: str, fits: Callable[[Any], bool]) -> Any:
    """Return a field of a request, None where there is none; refuse it where it does not fit."""
    value = body.get(name)
    if value is not None and not fits(value):
        raise Refused(f"{name}={repr(value)[:80]}: allowed is {allowed}", param=name)
    return value


def number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    allowed = f"a number from {least} to {most}"
    value = _field(body, name, allowed, lambda v: type(v) in (int, float) and least <= v <= most)
    return value if value is None else float(value)


def integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    allowed = f"an integer from {least} to {most}"
    return _field(body, name, allowed, lambda v: type(v) is int and least <= v <= most)


def boolean(body: dict[str, Any], name: str) -> bool:
    return bool(_field(body, name, "true or false", lambda v: v in (True, False)))


def text(body: dict[str, Any], name: str) -> str:
    """Read a text, "" where there is none."""
    return _field(body, name, "a text", lambda v: isinstance(v, str)) or ""


def fields_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Read an object, empty where there is none."""
    return _field(body, name, "an object", lambda v: isinstance(v, dict)) or {}


def items(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Read a list of objects, empty where there is none."""
    return _field(body, name, "a list of objects", _are_objects) or []


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def stops(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Read stop strings: one, or a list."""
    found = _field(body, name, f"a text, or up to {MOST_STOPS} of them, none empty", _are_stops) or ()
    return (found,) if isinstance(found, str) else tuple(found)


def _are_stops(value: Any) -> bool:
    found = [value] if isinstance(value, str) else value or []
    return isinstance(found, list) and len(found) <= MOST_STOPS and all(isinstance(s, str) and s for s in found)


def refuse(body: dict[str, Any], *names: str, why: str = "not supported") -> None:
    """Refuse fields that would change the answer, if they say anything."""
    for name in names:
        if body.get(name) not in (None, False, [], {}, ""):
            raise Refused(f"{name}: {why}", param=name)


def plain_text(value: Any, name: str) -> str:
    """Join a content's parts, of which only texts can be read; "" for none."""
    if value is None or isinstance(value, str):
        return value or ""
    _field({name: value}, name, "a text or a list of parts", _are_objects)
    for part in value:
        if part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            raise Refused(f"{name}: a part of type {part.get('type')!r}; allowed is text", param=name)
    return "".join(text(part, "refusal" if part["type"] == "refusal" else "text") for part in value)


def template_of(body: dict[str, Any], door: Door) -> dict[str, Any]:
    """Collect variables of the chat template."""
    allowed = "an object of the template's own variables"
    given = _field(body, "chat_template_kwargs", allowed, _are_variables) or {}
    effort = text(body, "reasoning_effort")
    return {**door.template, **({"reasoning_effort": effort} if effort else {}), **given}


def _are_variables(value: Any) -> bool:
    return not value or (isinstance(value, dict) and not (RESERVED_KEYS | {"tools"}) & value.keys())
