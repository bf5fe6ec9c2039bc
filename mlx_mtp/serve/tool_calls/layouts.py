"""Find how a chat template writes tool calls: the text around names and arguments, from calls that it renders."""

import functools
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import regex

from ...checkpoint.chat_template import render
from ..template_traits import NAME, OPTIONS, RESULT, Probe, probes
from .call_format import CallFormat, Reading
from .gemma import GemmaCalls
from .json_calls import JsonCalls
from .pythonic import PythonicCalls
from .schema import Tools, end_of_value
from .tagged import TaggedCalls

SECOND = "secondname"
ARGUMENTS = {"text": "probedx", "more": "probedy"}
CONTAINER = {"text": [True], "more": "é"}
Calls = Sequence[tuple[str, dict[str, Any]]]
FIRST = (NAME, ARGUMENTS)


class ArgumentLayout(NamedTuple):
    """The text around an argument of `TaggedCalls`: `before`, its key, `after`, its value, `close`.

    {key} in `close` stands for the key, {type} in `after` for the value's type as the template writes it. types: the
    type of a string, "" if the template writes no types; and that of other values, "" for each value's JSON type.
    """

    before: str
    after: str
    close: str
    types: tuple[str, str] = ("", "")


class CallLayout(NamedTuple):
    """The text around the calls of an answer: `start`, name, `head`, arguments, `between`, the next name, ..., `end`.

    between: None if an answer has only one call. empty: replaces head and arguments of a call without any; None:
    nothing does. parameter: of `TaggedCalls`. separator: between arguments, unless it is part of their tags. quote:
    at both ends of strings of `PythonicCalls`. by_key: arguments are sorted by key. spread: JSON arguments have line
    breaks.
    python: lists and objects are written as Python's. ascii: JSON has escape sequences instead of letters that are
    not ASCII. first: the text with which a call starts, "" if it is the format's mark. leads: texts that may precede
    `start` at the start of an answer, with {name} for a tool's name.
    """

    start: str
    head: str
    between: str | None
    end: str
    empty: str | None = None
    parameter: ArgumentLayout | None = None
    separator: str = ""
    quote: str = "'"
    by_key: bool = False
    spread: bool = False
    python: bool = False
    ascii: bool = False
    first: str = ""
    leads: tuple[str, ...] = ()


def rendered_layouts(tokenizer: Any, format: CallFormat) -> tuple[CallLayout, ...]:
    """Return the layouts of the calls that a tokenizer's chat template renders; () if none are in `format`.

    There are two if calls that no results follow are rendered differently.
    """
    template = getattr(tokenizer, "chat_template", None)
    return _rendered_layouts(tokenizer, format, str(template)) if template else ()


@functools.lru_cache(maxsize=8)
def _rendered_layouts(tokenizer: Any, format: CallFormat, template: str) -> tuple[CallLayout, ...]:
    found: list[CallLayout] = []
    for probe in probes(tokenizer, ARGUMENTS):
        for results in (True, False):
            tried: list[Calls] = [[FIRST], [FIRST, (SECOND, ARGUMENTS)], [(NAME, {})], [(NAME, CONTAINER)]]
            one, two, none, container = (_rendered(tokenizer, format, probe, calls, results) for calls in tried)
            with suppress(ValueError):
                if text := two or one:
                    layout = _dissected(text, format)
                    python, ascii = (mark in (container or "") for mark in ("[True]", r"\u00e9"))
                    found.append(layout._replace(empty=_empty(layout, none), python=python, ascii=ascii))
        if found:
            break
    return tuple(dict.fromkeys(found))


def _rendered(tokenizer: Any, format: CallFormat, probe: Probe, calls: Calls, results: bool) -> str | None:
    """Return the text of these calls as the template renders them; None if it does not render them all.

    probe: the form of the message and its calls. results: a result follows for each call.
    """
    made = [_call(probe, i, *call) for i, call in enumerate(calls)]
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": probe.content, "tool_calls": made}]
    for each in made if results else ():
        messages.append({"role": "tool", "tool_call_id": each["id"], "name": "other", "content": RESULT})
    with suppress(ValueError):
        return _block(render(tokenizer, messages, OPTIONS), format, calls)
    return None


def _call(probe: Probe, index: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    given = json.dumps(arguments) if isinstance(probe.arguments, str) else arguments
    id = probe.id[:-1] + str(index) if index else probe.id
    return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}


def _block(text: str, format: CallFormat, calls: Calls) -> str | None:
    """Return the part of a rendered conversation that consists of these calls, stripped; None if there is none."""
    parameters = {"type": "object", "properties": {key: {} for key in ARGUMENTS}}
    tools = Tools([{"function": {"name": name, "parameters": parameters}} for name in (NAME, SECOND)])
    for match in format.opening(tools).finditer(text):
        reading = format.read(text[match.start() :], tools, complete=False)
        if reading and _given(reading) == list(calls):
            return text[match.start() : match.start() + reading.end].strip()
    return None


def _given(reading: Reading) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in reading.calls]


def _dissected(text: str, format: CallFormat) -> CallLayout:
    """Return the layout of a text of one call, or of two. Raises ValueError if the text has another structure."""
    at = text.index(NAME) + len(NAME)
    region = _region(text, at, format)
    start, between, end = text[: at - len(NAME)], None, text[region.end :]
    if SECOND in text:
        second = text.index(SECOND, region.end)
        between, after = text[region.end : second], _region(text, second + len(SECOND), format)
        end = text[after.end :]
    return region.layout._replace(start=start, head=text[at : region.begin], between=between, end=end)


class Region(NamedTuple):
    """The position of a call's arguments in a text, and the parts of the layout that they show."""

    begin: int
    end: int
    layout: CallLayout = CallLayout("", "", None, "")


def _region(text: str, at: int, format: CallFormat) -> Region:
    """Return the region of the arguments of the call whose name ends at `at`; ValueError if it is not found."""
    x, y = (text.index(value, at) for value in ARGUMENTS.values())
    by_key = CallLayout("", "", None, "", by_key=y < x)
    first, second = min(x, y), max(x, y)
    if isinstance(format, JsonCalls):
        begin = text.rindex("{", at, first)
        end = end_of_value(text, begin)
        if end is None or json.loads(text[begin:end]) != ARGUMENTS:
            raise ValueError("arguments are no JSON object")
        return Region(begin, end, by_key._replace(spread="\n" in text[begin:end]))
    if isinstance(format, TaggedCalls):
        return _tagged_region(text, at, format, first, second)
    opens, closes = "()" if isinstance(format, PythonicCalls) else "{}"
    begin, end = text.index(opens, at) + 1, text.index(closes, second)
    if isinstance(format, GemmaCalls):
        return Region(begin, end, by_key._replace(separator=","))
    between = text[first + len("probedx") + 1 : second - 1]
    return Region(begin, end, by_key._replace(separator=between[: -len("more=")], quote=text[first - 1]))


def _tagged_region(text: str, at: int, format: TaggedCalls, first: int, second: int) -> Region:
    """Return the region of two tagged arguments, whose values begin at `first` and `second`, after index `at`.

    Raises ValueError if they are not tags of the format.
    """
    found = [*regex.finditer(format.parameter, text[:second], pos=at)]
    if len(found) != 2:
        raise ValueError("arguments are no tags")
    start, key, after = found[0], found[0]["key"], len(ARGUMENTS["text"])
    begin, next, type = start.start(), found[1].start(), start.groupdict().get("type")
    keyed, close = text[start.end("key") : first], text[first + after : next]
    if type:
        keyed = text[start.end("key") : start.start("type")] + "{type}" + text[start.end("type") : first]
    close = close.replace(f"</{key}>", "</{key}>")
    separator, last = "", close.replace("{key}", found[1]["key"])
    if not text.startswith(last, second + after):  # white space separates arguments, and does not follow the last one
        close, last = close.rstrip(), last.rstrip()
        separator = text[first + after : next].removeprefix(close.replace("{key}", key))
    if not text.startswith(last, second + after):
        raise ValueError("the last argument ends differently")
    types = ("true", "false") if type == "true" else ("string", "") if type else ("", "")
    parameter = ArgumentLayout(text[begin : start.start("key")], keyed, close, types)
    layout = CallLayout("", "", None, "", parameter=parameter, separator=separator, by_key=key != "text")
    return Region(begin, second + after + len(last), layout)


def _empty(layout: CallLayout, text: str | None) -> str | None:
    """Return the `empty` of a layout, from a rendered call without arguments; None if it writes `head`, too.

    text: the rendered call, or None. The result is None also for a format without tags, without a rendered call, and
    if the call does not end with the layout's `end`.
    """
    if not text or layout.parameter is None or not text.endswith(layout.end):
        return None
    after = text[text.index(NAME) + len(NAME) : len(text) - len(layout.end)]
    return None if after == layout.head else after
