"""Read and check the values and sizes of request fields; an error names the field and what is allowed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

from .frames import Frames
from .prompts import Marks
from .tool_calls.call_format import CallFormat

LATEST = ":latest"  # Ollama's tag of a model without one
MOST_CHOICES, MOST_STOPS, MOST_TOP = 16, 64, 20
MOST_CHARACTERS = 8 * 10**6  # of a prompt, or of messages and tools together
MAX_WORD = 256  # characters of a stop string and of a bad word: their search reads as many before each token
MAX_MESSAGE = 480  # characters of an error message, which may quote the request
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

MAX_TOOL_NAME = 256  # characters


class Refused(ValueError):
    """Raised for a request that is invalid or cannot be served now, with a message of one line, cut at MAX_MESSAGE.

    status: of HTTP. param: the name of the invalid field, if there is one. code: OpenAI's error code, or None.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(" ".join(message[: 2 * MAX_MESSAGE].split())[:MAX_MESSAGE])
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class ModelInfo:
    """The names, limits and defaults for requests to the loaded model.

    names:    model names that requests may use; "*" allows any. defaults: of sampling fields.
    positions: maximum tokens of prompt and answer together. max_tokens: default of an answer; None: what fits.
    template: default variables of the chat template. turns: whether encoded prompts need `EncodedPrompt.turns`.
    created:  time of the load in seconds since 1970. seeds: returns a random seed.
    unread_calls: why calls in the model's own format may be returned as text; None if they are parsed.
    adapters: names of adapters that requests can select. vocab_size: number of the model's logits.
    vision: the vision tower; None if the model reads no pictures, for the reason `blind` ("" if none is known).
    fetch:    "host" or "host:port" from which pictures may be fetched.
    tool_format: the format of tool calls in answers; None: calls stay text. frames: as in `Served`.
    path: the model's directory or GGUF file; Path() if it is unknown.
    family, stored: the model_type, and the weights' formats in memory; "" if unknown. size: bytes of the weights of
    target and heads in memory; 0 if unknown.
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
    unread_calls: str | None = None
    adapters: tuple[str, ...] = ()
    vocab_size: int = 0
    tool_format: CallFormat | None = None
    frames: Frames | None = None
    vision: Any = None
    blind: str = ""
    fetch: tuple[str, ...] = ()
    path: Path = Path()
    family: str = ""
    stored: str = ""
    size: int = 0
    seeds: Callable[[], int] = field(repr=False, default=lambda: 0)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def listed(self) -> tuple[str, ...]:
        """The names without "*", then each with each adapter: "name:adapter"."""
        own = [name for name in self.names if name != "*"]
        return (*own, *(f"{name}:{adapter}" for name in own for adapter in self.adapters))

    def called(self, body: dict[str, Any]) -> str:
        """Return the model name in a request, by default the first of `names`.

        Ollama's clients may add ":latest". Raises Refused: 404 for another model's name, 400 for a value that is no
        text.
        """
        if body.get("model") is None:
            return self.name
        name = text(body, "model")
        if not ("*" in self.names or name in self.listed or name.removesuffix(LATEST) in self.listed):
            raise unknown_model(name, self.listed)
        return name

    def adapter_of(self, body: dict[str, Any]) -> str | None:
        """Return the adapter that a request names in `adapter` or after its model's name; None if in neither.

        Raises Refused for an unknown adapter in `adapter`, and if the model's name ends with another adapter.
        """
        model, name = body.get("model"), body.get("adapter")
        before, _, after = ("" if model in self.names else text(body, "model")).rpartition(":")
        named = after if after in self.adapters and ("*" in self.names or before in self.names) else None
        if name is None:
            return named
        if not isinstance(name, str) or name not in self.adapters:
            allowed = ", ".join(map(repr, self.adapters)) or "none, as the server was started without --adapter-path"
            raise Refused(f"adapter={shown(name)}: allowed is {allowed}", param="adapter")
        if named not in (None, name):
            raise Refused(f"adapter={shown(name)}: contradicts model={shown(model)}; send one", param="adapter")
        return name


def shown(value: Any) -> str:
    """Return the start of a value's representation, up to 80 characters, for messages; large values cost no more."""
    return _SHORT.repr(value)[:80]


def unknown_model(name: str, listed: Iterable[str], problem: str = "") -> Refused:
    """Return the error, with status 404, for a model's name that is not served. listed: the names that are.

    problem: " (reason)" for a model that cannot be served; "" for any other name.
    """
    allowed = ", ".join(repr(each) for each in listed)
    message = f"model={shown(name)}{problem}: allowed is {allowed}"
    return Refused(message, status=404, param="model", code="model_not_found")


def field_of(body: dict[str, Any], name: str, allowed: str, fits: Callable[[Any], bool]) -> Any:
    """Return the value of a request field, None if it is missing or null; raises Refused unless `fits(value)`.

    allowed: the allowed values, for the error.
    """
    value = body.get(name)
    if value is not None and not fits(value):
        raise Refused(f"{name}={shown(value)}: allowed is {allowed}", param=name)
    return value


def number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    allowed = f"a number from {least} to {most}"
    value = field_of(body, name, allowed, lambda v: type(v) in (int, float) and least <= v <= most)
    return value if value is None else float(value)


def integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    allowed = f"an integer from {least} to {most}"
    return field_of(body, name, allowed, lambda v: type(v) is int and least <= v <= most)


def boolean(body: dict[str, Any], name: str) -> bool:
    return bool(field_of(body, name, "true or false", lambda v: v in (True, False)))


def text(body: dict[str, Any], name: str) -> str:
    """Return a string field, "" if it is missing or null; raises Refused for another type."""
    return field_of(body, name, "a text", lambda v: isinstance(v, str)) or ""


def fields_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object field, {} if it is missing or null; raises Refused for another type."""
    return field_of(body, name, "an object", lambda v: isinstance(v, dict)) or {}


def items(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of objects, [] if it is missing or null; raises Refused for another type."""
    return field_of(body, name, "a list of objects", _are_objects) or []


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def stops(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings of a field that is a string or a list, () if it is missing, null or an empty list.

    Raises Refused as `words`.
    """
    found = body.get(name)
    return words({name: [found]} if isinstance(found, str) else body, name)


def words(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the strings of a list field, () if it is missing or null.

    Raises Refused unless it is a list of at most MOST_STOPS strings, of 1 to MAX_WORD characters each.
    """
    allowed = f"a list of up to {MOST_STOPS} texts, of 1 to {MAX_WORD} characters each"
    return tuple(field_of(body, name, allowed, _are_words) or ())


def _are_words(value: Any) -> bool:
    few = isinstance(value, list) and len(value) <= MOST_STOPS
    return few and all(isinstance(each, str) and 0 < len(each) <= MAX_WORD for each in value)


def check_characters(value: Any, name: str) -> None:
    """Raise Refused if the strings in a JSON value have more than MOST_CHARACTERS together. name: of the field."""
    if (total := sum(map(len, strings_in(value)))) > MOST_CHARACTERS:
        message = f"{name}: {total:,} characters; allowed are {MOST_CHARACTERS:,}"
        raise Refused(message, code="context_length_exceeded", param=name)


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, with the names of objects' members."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)


class FieldSize(NamedTuple):
    """The limits of a field's value; None: only those of a body and of the model's context.

    items: of a list, or members of an object. text: characters of all texts and names in it together. values: items
    and members of all lists and objects in it together.
    """

    items: int = 100
    text: int | None = 10_000
    values: int = 1000


CONVERSATION = FieldSize(10_000, None, 1_000_000)
PROMPT = FieldSize(1_000_000, None, 1_000_000)
NAME = FieldSize(text=256)
WORDS = FieldSize(MOST_STOPS, MOST_STOPS * MAX_WORD, MOST_STOPS)
TOKENS = FieldSize(500_000, 5_000_000, 500_000)  # the vocabulary's size is a further limit
FORMAT = FieldSize(2000, 200_000, 50_000)  # `structured` states those of the schema or grammar in it
TOOL = FieldSize(100, 100_000, 10_000)
SIZES: dict[str, FieldSize] = {
    **dict.fromkeys(("messages", "input"), CONVERSATION),
    "prompt": PROMPT,
    **dict.fromkeys(("system", "instructions", "images"), CONVERSATION),
    **dict.fromkeys(("model", "adapter", "guided_whitespace_pattern"), NAME),
    "tools": FieldSize(1000, 1_000_000, 100_000),
    "tool_choice": FieldSize(10, 300_000, 5000),
    "chat_template_kwargs": FieldSize(64, 100_000, 10_000),
    **dict.fromkeys(("stop", "stop_sequences", "bad_words"), WORDS),
    "stop_token_ids": FieldSize(256),
    **dict.fromkeys(("logit_bias", "allowed_token_ids"), TOKENS),
    **dict.fromkeys(("response_format", "text", "output_config", "output_format", "format"), FORMAT),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs"), FORMAT),
    "options": FieldSize(100, 30_000, 1000),
}
OTHERS = FieldSize()


def check_size(name: str, value: Any, size: FieldSize | None = None, param: str | None = None) -> None:
    """Raise Refused, with `param` or the name, if a field's value exceeds `size`, by default the field's own."""
    size = size or SIZES.get(name, OTHERS)
    if isinstance(value, list | dict) and len(value) > size.items:
        raise _larger(name, f"{len(value)} items", size.items, param)
    text, values, pending = 0, 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            text += len(each)
        elif isinstance(each, list | dict):
            text += sum(map(len, each)) if isinstance(each, dict) else 0
            values += len(each)
            pending += () if values > size.values else each.values() if isinstance(each, dict) else each
        if values > size.values:
            raise _larger(name, "its lists and objects have more values", size.values, param)
        if size.text is not None and text > size.text:
            raise _larger(name, "its texts have more characters", size.text, param)


def _larger(name: str, found: str, most: int, param: str | None) -> Refused:
    return Refused(f"{name}: {found}; allowed are at most {most:,}", param=param or name)
