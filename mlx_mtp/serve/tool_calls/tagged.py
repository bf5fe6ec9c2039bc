"""Read tool calls whose arguments are raw text between tags, as Qwen3-Coder, GLM, MiniMax and others write them.

A value may contain any tag, so the text after it decides where it ends. Of several readings, one in which the calls
reach the end of the text comes first, then one whose arguments fit the schema, then one with the same white space
before and after each argument, as templates write it; among these the one with the shortest values. No reading
contains a parameter twice.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of, skip_space
from .nested import NestedValues
from .schema import Tools, dumps, untyped_as_json

LITERAL = regex.compile(r"(?:[^\\.^$*+?()\[{|]|\\\W)*")
CDATA_START = regex.compile(r"\s*<!\[CDATA\[")
CDATA = regex.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", regex.DOTALL)
# Bounds on the work for a hostile answer: ends of values, places that a search tries, and characters of values whose
# types it checks.
MOST_ENDS, MOST_PLACES, MOST_CHECKED = 2000, 2500, 200_000


@dataclass(frozen=True)
class TaggedCalls:
    """A format with these tags.

    start, end: marks before and after a block of calls, "" without. foot: ends one call; "" if the end of the block
    does.
    head: pattern that starts a call, with {name} for the offered names.
    parameter: pattern that starts an argument, with the group `key`, and the group `type` if the model writes the
        value's type ("string" or "true" marks plain text).
    close: ends a value, with {key} if it repeats the argument's name. cdata: a value may be in a CDATA section.
    pad: white space that the template adds at both ends of a value.
    nested: the mark before every tag, if objects and lists are nested tags inside a value; otherwise "".
    """

    start: str
    end: str
    head: str
    parameter: str
    close: str
    foot: str = ""
    pad: str = ""
    cdata: bool = False
    nested: str = ""

    @functools.cached_property
    def head_mark(self) -> str:
        """The literal text with which `head` starts, up to the name or the first other pattern; "" without any."""
        found = LITERAL.match(self.head.partition("{name}")[0])
        return regex.sub(r"\\(.)", r"\1", found[0]) if found else ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.start, self.head_mark) if mark)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return _patterns(self, tuple(tools.names)).opening

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        for to_the_end, declared, even in itertools.product((True, False), repeat=3):
            if reading := TagSearch(text, self, tools, complete, declared, even).first(to_the_end):
                return reading
        return None

    def as_json(self, tools: Tools, name: str, key: str, text: str) -> str:
        """Return the JSON of `text`, the value of argument `key` of the offered function `name`."""
        if not self.nested:
            return tools.as_json(name, key, text)
        return NestedValues(self.nested, tools.parameters(name)).as_json(text, tools.properties(name).get(key))

    def value(self, text: str) -> str:
        """Return a value's text without the padding and the CDATA marks around it."""
        text = text.removeprefix(self.pad).removesuffix(self.pad)
        inside = CDATA.fullmatch(text) if self.cdata else None
        return inside[1] if inside else text


class SearchPosition(NamedTuple):
    """A position of the search. inside: in a block of calls. trail: what was read, None at the start.

    name: of the function of the open call, None outside of calls. keys: of the arguments read in it.
    """

    at: int
    inside: bool
    name: str | None
    keys: frozenset[str]
    trail: "Trail | None"


class Argument(NamedTuple):
    """An argument, and the start and end of its value in the text. type: as the model wrote it, or None."""

    key: str
    start: int
    end: int
    type: str | None


class Trail(NamedTuple):
    """A linked list of the names and arguments read so far. read: the last one. before: the rest."""

    before: "Trail | None"
    read: str | Argument


class TagPatterns(NamedTuple):
    """Compiled patterns of a format's tags and the offered names."""

    opening: regex.Pattern[str]
    head: regex.Pattern[str]
    parameter: regex.Pattern[str]
    value_end: regex.Pattern[str]


@functools.lru_cache(maxsize=64)
def _patterns(tags: TaggedCalls, names: tuple[str, ...]) -> TagPatterns:
    escape = regex.escape
    head = tags.head.replace("{name}", f"(?P<name>{any_of(list(names))})")
    foot = rf"{escape(tags.foot or tags.end)}"
    after_head = rf"(?:{tags.parameter}|{foot})"
    close = escape(tags.close).replace(escape("{key}"), "[^<>]+")
    value_end = rf"{close}(?=\s*(?:{tags.parameter}|{foot}|$))"
    return TagPatterns(
        regex.compile(rf"(?:{escape(tags.start)}\s*)?{head}\s*{after_head}"),
        regex.compile(head),
        regex.compile(tags.parameter),
        regex.compile(value_end),
    )


class TagSearch:
    """Searches one text for the first reading of its calls.

    complete: as in `CallFormat.read`. declared: arguments must be parameters of the schema, with values of its types.
    even: the same white space precedes and follows each argument.
    """

    def __init__(self, text: str, tags: TaggedCalls, tools: Tools, complete: bool, declared: bool, even: bool):
        self.text, self.tags, self.tools = text, tags, tools
        self.complete, self.declared, self.even = complete, declared, even
        self.patterns = _patterns(tags, tuple(tools.names))
        self.checked = 0
        self.ends = [match.start() for match in self.patterns.value_end.finditer(text)][:MOST_ENDS]

    def first(self, to_the_end: bool) -> Reading | None:
        """Return the first reading found depth first; None if there is none within MOST_PLACES places.

        to_the_end: only white space may follow the calls.
        """
        stack, seen = [iter([SearchPosition(0, False, None, frozenset(), None)])], set()
        while stack and len(seen) < MOST_PLACES:
            if (place := next(stack[-1], None)) is None:
                stack.pop()
                continue
            if place[:4] in seen:
                continue
            seen.add(place[:4])
            closed = place.trail is not None and place.name is None and (self.complete or not place.inside)
            if closed and skip_space(self.text, place.at) == len(self.text):
                return Reading(self._trail_calls(place.trail), len(self.text))
            following = self._following(place)
            if closed and not to_the_end and not place.inside:
                if (first := next(following, None)) is None:
                    return Reading(self._trail_calls(place.trail), place.at)
                following = itertools.chain([first], following)
            stack.append(following)
        return None

    def _following(self, place: SearchPosition) -> Iterator[SearchPosition]:
        """Yield the places that the search can reach next, the most likely one first."""
        at = skip_space(self.text, place.at)
        if place.name is not None:
            yield from self._in_call(place, at)
            return
        if place.inside and self.text.startswith(self.tags.end, at):
            yield place._replace(at=at + len(self.tags.end), inside=False)
        if not place.inside and self.tags.start and self.text.startswith(self.tags.start, at):
            yield from self._after_head(place, at + len(self.tags.start))
        elif place.inside or self.tags.head_mark or not place.trail:
            yield from self._after_head(place, at)

    def _after_head(self, place: SearchPosition, at: int) -> Iterator[SearchPosition]:
        """Yield the place after the head of a call, if one starts at `at`."""
        if head := self.patterns.head.match(self.text, skip_space(self.text, at)):
            trail = Trail(place.trail, head["name"])
            yield SearchPosition(head.end(), True, head["name"], frozenset(), trail)

    def _in_call(self, place: SearchPosition, at: int) -> Iterator[SearchPosition]:
        """Yield the place after this call's end, and those after its next argument, the shortest value first."""
        name, tags = place.name or "", self.tags
        end = tags.foot or tags.end
        if self.text.startswith(end, at):
            yield place._replace(at=at + len(end), name=None, inside=bool(tags.foot) and bool(tags.end))
        elif at == len(self.text) and self.complete:
            yield place._replace(at=at, name=None)
        parameter = self.patterns.parameter.match(self.text, at)
        if not parameter or parameter["key"] in place.keys:
            return
        key, start, written = parameter["key"], parameter.end(), parameter.groupdict().get("type")
        close = tags.close.replace("{key}", key)
        section = tags.cdata and CDATA_START.match(self.text, start)
        for end in self.ends[bisect.bisect_left(self.ends, start) :]:
            after = end + len(close)
            if close != tags.close and not self.text.startswith(close, end):
                continue
            if self.even and self.text[after : skip_space(self.text, after)] != self.text[place.at : at]:
                continue
            if self.declared and self.checked > MOST_CHECKED:
                return
            if section and not self.text[start:end].rstrip().endswith("]]>"):
                continue
            if self.declared and not self._fits(name, key, tags.value(self.text[start:end])):
                continue
            trail = Trail(place.trail, Argument(key, start, end, written))
            yield SearchPosition(after, place.inside, name, place.keys | {key}, trail)

    def _fits(self, name: str, key: str, value: str) -> bool:
        self.checked += len(value)
        return self.tools.fits(name, key, value, functools.partial(self.tags.as_json, self.tools))

    def _trail_calls(self, trail: Trail | None) -> list[ToolCall]:
        """Return the calls of a trail, in the text's order."""
        calls: list[ToolCall] = []
        arguments: list[Argument] = []
        while trail:
            if isinstance(trail.read, Argument):
                arguments.append(trail.read)
            else:
                name = trail.read
                members = (f"{dumps(each.key)}: {self._value(name, each)}" for each in reversed(arguments))
                calls.append(ToolCall(name, "{" + ", ".join(members) + "}"))
                arguments = []
            trail = trail.before
        return calls[::-1]

    def _value(self, name: str, argument: Argument) -> str:
        """Return an argument of function `name` as JSON, by the schema's types unless the model wrote a type.

        A written type "string" (or string="true") makes the text a JSON string; with any other type the text alone
        decides.
        """
        text = self.tags.value(self.text[argument.start : argument.end])
        if argument.type is None:
            return self.tags.as_json(self.tools, name, argument.key, text)
        return dumps(text) if argument.type in ("string", "true") else untyped_as_json(text)
