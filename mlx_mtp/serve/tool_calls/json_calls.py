"""Read tool calls in JSON: those of Hermes, Qwen3, Llama 3, Mistral, Kimi-K2, DeepSeek and others."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of
from .schema import Tools, dumps, end_of_value, members, strict

BETWEEN = regex.compile(r"(?:\s|[;,])*+")
NAME_KEYS = ("name", "function", "tool", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "input")


@dataclass(frozen=True)
class JsonCalls:
    """A format of JSON calls with these marks: a JSON object with a name and arguments is a call.

    start, end: marks before and after a block of calls; end is "" if the format has no mark for the end.
    call: mark that starts one call, also where a model omits the block's mark.
    head: pattern between `call` and the arguments, with {name}; "" if the JSON contains the name.
    shared: other text starts with the same mark, so that only a mark with an offered name starts a call.
    foot: pattern after the arguments. names_are_keys: an object with an offered name as its only key is a call too.
    """

    start: str
    end: str = ""
    call: str = ""
    head: str = ""
    foot: str = ""
    names_are_keys: bool = False
    shared: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start, self.call) if self.call else (self.start,)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return _patterns(self, tuple(tools.names)).opening

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        """Implement `CallFormat.read`. Calls whose end mark is missing count too."""
        calls: list[ToolCall] = []
        patterns, end = _patterns(self, tuple(tools.names)), 0
        while (block := patterns.start.match(text, end)) or not calls:
            found, at = self._block(text, block.end() if block else 0, patterns, tools)
            if not found:
                break
            calls, end = calls + found, at
        return Reading(calls, end) if calls else None

    def _block(self, text: str, at: int, patterns: "JsonPatterns", tools: Tools) -> tuple[list[ToolCall], int]:
        """Return the calls of the block at `at`, and the index after its end mark or, without one, its last call."""
        calls: list[ToolCall] = []
        end = at
        while found := self._next(text, at, patterns, tools):
            calls, end = calls + found.calls, found.end
            if close := patterns.end.match(text, end):
                return calls, close.end()
            between = BETWEEN.match(text, end)
            at = between.end() if between else end
        return calls, end

    def _next(self, text: str, at: int, patterns: "JsonPatterns", tools: Tools) -> Reading | None:
        """Return the calls of the object or list at `at`, which a head may precede.

        None if it is incomplete, or contains anything but calls of offered tools.
        """
        head = patterns.head.match(text, at) if self.head else None
        start = head.end() if head else at
        if (end := end_of_value(text, start)) is None or text[start : start + 1] not in ("{", "["):
            return None
        try:
            if head:
                calls = [ToolCall(head["name"], strict(text[start:end]))]
            else:
                calls = list(_calls(text, start, tools, self.names_are_keys))
        except ValueError:
            return None
        foot = patterns.foot.match(text, end)
        return Reading(calls, foot.end() if foot else end) if calls else None


class JsonPatterns(NamedTuple):
    """Compiled patterns of a format's marks and the offered names."""

    opening: regex.Pattern[str]
    start: regex.Pattern[str]
    end: regex.Pattern[str]
    head: regex.Pattern[str]
    foot: regex.Pattern[str]


@functools.lru_cache(maxsize=64)
def _patterns(marks: JsonCalls, names: tuple[str, ...]) -> JsonPatterns:
    name = any_of(list(names))
    head = rf"(?:{regex.escape(marks.call)})?\s*" + marks.head.replace("{name}", f"(?P<name>{name})")
    start, end = regex.escape(marks.start), regex.escape(marks.end)
    keys = "|".join((*NAME_KEYS, *ARGUMENT_KEYS, "id", "type", "tool_call_id"))
    first = rf'"(?:name|tool|tool_name)"\s*:\s*"(?:{name})"|"tool"\s*:\s*\{{|"(?!name"|tool")(?:{keys})"\s*:'
    first += rf'|"(?:{name})"\s*:\s*\{{' if marks.names_are_keys else ""
    in_json = rf"(?:\[\s*)?\{{\s*(?:{first})"
    opening = rf"(?:{start}\s*)?(?:{in_json}{'|' + head if marks.head else ''})"
    return JsonPatterns(
        regex.compile(opening),
        regex.compile(rf"\s*{start}\s*"),
        regex.compile(rf"\s*{end}" if end else r"(?!)"),
        regex.compile(head),
        regex.compile(rf"\s*{marks.foot}" if marks.foot else r"(?!)"),
    )


def _calls(text: str, start: int, tools: Tools, names_are_keys: bool) -> Iterator[ToolCall]:
    """Yield the calls of the JSON object or list at `start`. Raises ValueError if it contains anything else."""
    if text[start] == "[":
        at = start + 1
        while (between := BETWEEN.match(text, at)) and text[at := between.end()] == "{":
            yield from _calls(text, at, tools, names_are_keys)
            end = end_of_value(text, at)
            assert end is not None, "a value whose calls were read has an end"
            at = end
        if text[at] != "]":
            raise ValueError("a list of calls contains something else")
        return
    found = _object(text, start)
    if names_are_keys and len(found) == 1 and (name := next(iter(found))) in tools.names:
        found = {"name": dumps(name), "arguments": found[name]}
    inner = next((found[key] for key in ("function", "tool") if found.get(key, "").startswith("{")), None)
    if inner:
        found = {**found, **_object(inner, 0)}
    name = json.loads(strict(next((found[key] for key in NAME_KEYS if found.get(key, "").startswith('"')), '""')))
    if name not in tools.names:
        raise ValueError(f"{name!r} was not offered")
    yield ToolCall(name, _arguments(found))


def _object(text: str, start: int) -> dict[str, str]:
    """Return an object's values as text, by key. Raises ValueError if it is incomplete or a key is invalid."""
    return {json.loads(strict(key)): value for key, value in members(text, start)}


def _arguments(call: dict[str, str]) -> str:
    """Return a call's arguments as a JSON text, unchanged if valid, "{}" if they are absent, null or empty.

    They may also be the content of a JSON string. Raises ValueError if they are no object.
    """
    written = next((call[key] for key in ARGUMENT_KEYS if key in call), "{}")
    if written.startswith('"'):  # JSON in JSON
        written = json.loads(strict(written))
    if written.strip() in ("", "null"):
        return "{}"
    found = strict(written.strip())
    if not found.startswith("{"):
        raise ValueError("arguments must be an object")
    return found
