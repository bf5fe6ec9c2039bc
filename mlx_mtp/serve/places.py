"""Name places in a request, and find the newest message of the user: only what it adds is refused."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .departure import check_client
from .fields import Refused, field_of, strings_in

# What an entry of a conversation is: of the user; an answer; an answer with tool calls; nothing that is known; or
# anything else, such as a tool result or a system prompt.
USER, ANSWER, CALL, UNKNOWN, OTHER = "user", "answer", "call", "unknown", "other"

SURROGATES = re.compile("[\ud800-\udfff]")  # in Python's texts always lone ones


class RequestPlace(NamedTuple):
    """A place in a request.

    path: such as `messages[3].content[1]`. new: whether it is in the newest message of the user. There, what is not
    read is refused; elsewhere it becomes a line of text.
    """

    path: str
    new: bool = False

    def at(self, name: str | int) -> "RequestPlace":
        """Return the place of a member or an item of the value here."""
        step = f"[{name}]" if isinstance(name, int) else f".{name}" if self.path else name
        return self._replace(path=self.path + step)

    def past(self) -> "RequestPlace":
        """Return this place as one of an earlier message."""
        return self._replace(new=False)

    def refused(self, problem: str) -> Refused:
        """Return the error for a problem here; it begins with the path."""
        return Refused(f"{self.path}: {problem}", param=self.path.partition(".")[0].partition("[")[0])


def entries_of(body: dict[str, Any], name: str, side_of: Callable[[Any], str]) -> Iterator[tuple[Any, RequestPlace]]:
    """Yield the entries of a conversation, the list in the field `name`, each with its place.

    side_of: returns one of the constants above for an entry. Lone surrogates in an earlier entry become "?". Raises
    Refused for a value that is no list, and for lone surrogates in the newest message of the user.
    """
    allowed = "a text or a list of objects" if name == "input" else "a list of objects"
    given = field_of(body, name, allowed, lambda v: isinstance(v, list)) or []
    newest = newest_of([side_of(each) for each in given])
    for i, each in enumerate(given):
        check_client()
        place = RequestPlace(f"{name}[{i}]", i == newest)
        yield _encodable(each, place), place


def newest_of(sides: list[str]) -> int | None:
    """Return the index of the newest message of the user; None if there is none, or an answer to it follows.

    An answer at the end is unfinished, and is to be continued, so it does not count. An unknown entry at the end
    counts as the newest message, since nothing else states what the request asks for.
    """
    if sides and sides[-1] == UNKNOWN:
        return len(sides) - 1
    if USER not in sides:
        return None
    newest = len(sides) - 1 - sides[::-1].index(USER)
    after = sides[newest + 1 :]
    while after and after[-1] == ANSWER:
        after.pop()
    return None if ANSWER in after or CALL in after else newest


def _encodable(entry: Any, place: RequestPlace) -> Any:
    """Return an entry or a part in which lone surrogates are "?"; Refused for those of the user's newest message."""
    if not _has_surrogates(entry):
        return entry
    if not place.new:
        return json.loads(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace"))
    parts = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(parts, list) or _has_surrogates({**entry, "content": None}):
        raise place.refused("allowed is valid Unicode")
    at = place.at("content")
    found = [_encodable(part, at.at(i).past() if _is_result(part) else at.at(i)) for i, part in enumerate(parts)]
    return {**entry, "content": found}


def _has_surrogates(value: Any) -> bool:
    return any(SURROGATES.search(text) for text in strings_in(value) if not text.isascii())


def _is_result(part: Any) -> bool:
    """Return whether a part is a tool result, which is not the user's, though the messages API sends it as theirs."""
    return isinstance(part, dict) and part.get("type") == "tool_result"
