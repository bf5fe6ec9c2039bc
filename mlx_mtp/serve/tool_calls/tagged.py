"""Read calls whose arguments stand between tags as they are: Qwen3-Coder's, GLM's, MiniMax's and others.

A value may contain any tag, so its end follows from the text behind it. Of all ways to read the text the first one
counts in which the calls reach its end, values are as short as possible, and no parameter is given twice. Readings
with the same white space before and behind each argument, which templates write, come before others.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import regex

from .call_format import Reading, ToolCall, any_of, behind_space
from .nested import nested_json
from .schema import Tools, dumps, untyped_as_json

LITERAL = regex.compile(r"(?:[^\\.^$*+?()\[{|]|\\\W)*")
CDATA_START = regex.compile(r"\s*<!\[CDATA\[")
CDATA = regex.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", regex.DOTALL)
# These bound the time that a hostile answer takes: ends of values, places that a search tries, and characters of
# values whose types it checks.
MOST_ENDS, MOST_PLACES, MOST_CHECKED = 2000, 2500, 200_000


@dataclass(frozen=True)
class Tags:
    """The tags of one format.

    start, end: around all calls of a block. foot: ends one call; "" where the block's end does.
    head: pattern of a call's beginning, with {name} for the offered names.
    parameter: pattern of an argument's beginning, with the group `key`, and `type` where the model writes a value's
        type ("string" or "true" is text as it is).
    close: ends a value; with {key} where it names the argument.
    pad: what the template puts at both ends of a value. cdata: text may be in a CDATA section.
    nested: the mark in front of every tag, where objects and lists are written as tags inside a value.
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

    def as_json(self, tools: Tools, name: str, key: str, text: str) -> str:
        """The JSON of an argument of a function that was offered."""
        return nested_json(text, tools, name, key, self.nested) if self.nested else tools.as_json(name, key, text)

    def value(self, text: str) -> str:
        """A value without what the template puts around it."""
        text = text.removeprefix(self.pad).removesuffix(self.pad)
        inside = CDATA.fullmatch(text) if self.cdata else None
        return inside[1] if inside else text


class Place(NamedTuple):
    """A position in the text, and what was read up to it. inside: a block; name: of the call that is open."""

    at: int
    inside: bool
    name: str | None
    keys: frozenset[str]
    trail: "Trail | None"


class Argument(NamedTuple):
    """An argument, and where its value begins and ends in the text. type: as written, None where none is."""

    key: str
    start: int
    end: int
    type: str | None


class Trail(NamedTuple):
    """What was read last, a call's name or an argument, and what was read before it."""

    before: "Trail | None"
    read: str | Argument


class Tagged:
    """The format of these tags."""

    def __init__(self, tags: Tags):
        self.tags = tags
        self._head_mark = _literal(tags.head)

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.tags.start, self._head_mark) if mark)

    def opening(self, tools: Tools) -> regex.Pattern[str]:
        return _patterns(self.tags, tuple(tools.names)).opening

    def read(self, text: str, tools: Tools, *, complete: bool) -> Reading | None:
        for to_the_end, declared, even in itertools.product((True, False), repeat=3):
            steps = Steps(text, self.tags, tools, complete, declared, even)
            if (place := self._search(text, steps, complete, to_the_end)) is not None:
                return Reading(Values(text, self.tags, tools).calls(place.trail), place.at)
        return None

    def _search(self, text: str, steps: "Steps", complete: bool, to_the_end: bool) -> Place | None:
        """Return where the calls end in the first reading, depth first; None if there is none.

        to_the_end: only white space may follow.
        """
        stack, seen = [iter([Place(0, False, None, frozenset(), None)])], set()
        while stack and len(seen) < MOST_PLACES:
            if (place := next(stack[-1], None)) is None:
                stack.pop()
                continue
            if place[:4] in seen:
                continue
            seen.add(place[:4])
            closed = place.trail is not None and place.name is None and (complete or not place.inside)
            if closed and behind_space(text, place.at) == len(text):
                return place._replace(at=len(text))
            following = steps.following(place)
            if closed and not to_the_end and not place.inside:
                if (first := next(following, None)) is None:
                    return place
                following = itertools.chain([first], following)
            stack.append(following)
        return None


class Patterns(NamedTuple):
    """The compiled patterns of tags and offered names."""

    opening: regex.Pattern[str]
    head: regex.Pattern[str]
    parameter: regex.Pattern[str]
    value_end: regex.Pattern[str]


@functools.lru_cache(maxsize=64)
def _patterns(tags: Tags, names: tuple[str, ...]) -> Patterns:
    escape = regex.escape
    head = tags.head.replace("{name}", f"(?P<name>{any_of(list(names))})")
    foot = rf"{escape(tags.foot or tags.end)}"
    behind_head = rf"(?:{tags.parameter}|{foot})"
    close = escape(tags.close).replace(escape("{key}"), "[^<>]+")
    value_end = rf"{close}(?=\s*(?:{tags.parameter}|{foot}|$))"
    return Patterns(
        regex.compile(rf"(?:{escape(tags.start)}\s*)?{head}\s*{behind_head}"),
        regex.compile(head),
        regex.compile(tags.parameter),
        regex.compile(value_end),
    )


def _literal(pattern: str) -> str:
    """The literal text that a head's pattern begins with, before the name."""
    found = LITERAL.match(pattern.partition("{name}")[0])
    return regex.sub(r"\\(.)", r"\1", found[0]) if found else ""


class Steps:
    """Generate the places that can follow a place in a text.

    declared: arguments are the schema's parameters, of its types. even: the same white space is before and behind an
    argument.
    """

    def __init__(self, text: str, tags: Tags, tools: Tools, complete: bool, declared: bool, even: bool):
        self.text, self.tags, self.tools = text, tags, tools
        self.complete, self.declared, self.even = complete, declared, even
        self.patterns = _patterns(tags, tuple(tools.names))
        self.checked = 0
        self.ends = [match.start() for match in self.patterns.value_end.finditer(text)][:MOST_ENDS]

    def following(self, place: Place) -> Iterator[Place]:
        """The places that may come next, the most likely first."""
        at = behind_space(self.text, place.at)
        if place.name is not None:
            yield from self._in_call(place, at)
            return
        if place.inside and self.text.startswith(self.tags.end, at):
            yield place._replace(at=at + len(self.tags.end), inside=False)
        if not place.inside and self.tags.start and self.text.startswith(self.tags.start, at):
            yield from self._calls(place, at + len(self.tags.start))
        elif place.inside or _literal(self.tags.head) or not place.trail:
            yield from self._calls(place, at)

    def _calls(self, place: Place, at: int) -> Iterator[Place]:
        """The place behind the head of a call, if one begins here."""
        if head := self.patterns.head.match(self.text, behind_space(self.text, at)):
            trail = Trail(place.trail, head["name"])
            yield Place(head.end(), True, head["name"], frozenset(), trail)

    def _in_call(self, place: Place, at: int) -> Iterator[Place]:
        """The places behind this call's end and behind its next argument, the shortest value first."""
        name, tags = place.name or "", self.tags
        end = tags.foot or tags.end
        if self.text.startswith(end, at):
            yield place._replace(at=at + len(end), name=None, inside=bool(tags.foot) and bool(tags.end))
        elif at == len(self.text) and self.complete:
            yield place._replace(at=at, name=None)
        parameter = self.patterns.parameter.match(self.text, at)
        if not parameter or parameter["key"] in place.keys:
            return
        key, written = parameter["key"], parameter.groupdict().get("type")
        close = tags.close.replace("{key}", key)
        section = tags.cdata and CDATA_START.match(self.text, parameter.end())
        for i in range(bisect.bisect_left(self.ends, parameter.end()), len(self.ends)):
            end = self.ends[i]
            if close != tags.close and not self.text.startswith(close, end):
                continue
            if self.even and self._space(end + len(close)) != self.text[place.at : at]:
                continue
            if self.declared and self.checked > MOST_CHECKED:
                return
            if section and not self.text[parameter.end() : end].rstrip().endswith("]]>"):
                continue
            if self.declared and not self._fits(name, key, tags.value(self.text[parameter.end() : end])):
                continue
            trail = Trail(place.trail, Argument(key, parameter.end(), end, written))
            yield Place(end + len(close), place.inside, name, place.keys | {key}, trail)

    def _space(self, at: int) -> str:
        """Return the white space at a position."""
        return self.text[at : behind_space(self.text, at)]

    def _fits(self, name: str, key: str, value: str) -> bool:
        self.checked += len(value)
        return self.tools.fits(name, key, value, functools.partial(self.tags.as_json, self.tools))


class Values(NamedTuple):
    """What turns the parts of a text that are values into JSON."""

    text: str
    tags: Tags
    tools: Tools

    def calls(self, trail: Trail | None) -> list[ToolCall]:
        """The calls of a trail, in their order."""
        calls: list[ToolCall] = []
        arguments: list[Argument] = []
        while trail:
            if isinstance(trail.read, Argument):
                arguments.append(trail.read)
            else:
                name = trail.read
                members = (f"{dumps(each.key)}: {self.value(name, each)}" for each in reversed(arguments))
                calls.append(ToolCall(name, "{" + ", ".join(members) + "}"))
                arguments = []
            trail = trail.before
        return calls[::-1]

    def value(self, name: str, argument: Argument) -> str:
        """The JSON of an argument: text as it is, other types as they are written."""
        text = self.tags.value(self.text[argument.start : argument.end])
        if argument.type is None:
            return self.tags.as_json(self.tools, name, argument.key, text)
        return dumps(text) if argument.type in ("string", "true") else untyped_as_json(text)
