"""Read the contents of messages: what is not read is refused in the newest message, and a line of text elsewhere.

Clients send the whole conversation with every request, so a part that is refused wherever it stands would end a
session. `RequestPlace.new` states whether a place is in the newest message.
"""

import re
import reprlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

from ..pictures.image import PictureLimits, from_base64, from_data_url
from .fields import ModelInfo
from .forms import OLD_PICTURE, Content, Message, SeparateLines, joined_contents
from .places import RequestPlace
from .request_pictures import TOO_LONG, TOO_MANY, RequestPictures
from .tool_calls.schema import dumps

TEXTS = ("text", "input_text", "output_text", "refusal")
PICTURES = ("image", "image_url", "input_image", "computer_screenshot")
NO_PICTURES = "pictures are not read here"  # part of prompts
ENCRYPTED = "only the server that wrote it can decrypt its reasoning"
MOST_SHOWN = 300  # characters of a part that its line of text shows
MOST_PLACES = 3  # named by one warning
# Keys of a part that its line does not show: nothing in them is meant for a model.
HIDDEN = ("type", "id", "status", "signature", "encrypted_content", "cache_control")
# Escaped as in Python's strings, since templates split answers at marks of reasoning.
MARKS = str.maketrans({"<": "\\x3c", ">": "\\x3e"})
BRIEF = reprlib.Repr()
BRIEF.maxlevel, BRIEF.maxdict, BRIEF.maxlist, BRIEF.maxstring = 4, 8, 6, 200

DOCUMENTS = ("document", "search_result", "file", "input_file")
NO_TEXT = ("image/", "audio/", "video/", "font/", "application/pdf")  # begin media types
TEXT = ("image/svg+xml", "video/mp2t")  # the second is how browsers call a file of TypeScript
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # in no text; logs contain \x1b
LIMITS = PictureLimits(nbytes=1 << 30)  # a body is smaller


class MessageContents:
    """Reads the contents of the messages of one request; `settled` completes the messages.

    info: without it, or if its model has no vision tower, no picture is read. warnings: `settled` appends to it.
    """

    def __init__(self, info: ModelInfo | None = None, warnings: list[str] | None = None):
        self.pictures, self._info = RequestPictures(info), info
        self._warnings, self._notes = [] if warnings is None else warnings, dict[str, list[str]]()

    def of(self, value: Any, place: RequestPlace, *, sees: bool = True) -> Content:
        """Return a content, a text or a list of parts, as one text, or as parts if pictures are among them.

        None is "". sees: whether pictures may be among them. Pictures are complete after `settled`.
        """
        if value is None or isinstance(value, str):
            return value or ""
        blocks = self.blocks(value, place)
        return joined_contents(part for i, each in enumerate(blocks) for part in self.part(each, place.at(i), sees))

    def blocks(self, value: Any, place: RequestPlace) -> list[Any]:
        """Return a content that is neither a text nor None as a list of parts; [value] for another value."""
        if place.new and not isinstance(value, list):
            raise place.refused(f"{repr(value)[:80]}: allowed is a text or a list of parts")
        return value if isinstance(value, list) else [value]

    def result(self, value: Any, place: RequestPlace) -> Content:
        """Return a tool result as `of` returns a content; values that are no parts become their JSON."""
        if value is None or isinstance(value, str):
            return value or ""
        values = value if isinstance(value, list) else [value]
        return self.of([each if _is_part(each) else SeparateLines(dumps(each)) for each in values], place)

    def part(self, part: Any, place: RequestPlace, sees: bool = True) -> Iterator[str | dict[str, Any]]:
        """Yield the texts and pictures of a part of any API. sees: as in `of`."""
        kind = kind_of(part)
        if isinstance(part, str):
            yield part
        elif kind in TEXTS and isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str | None):
            yield text or ""
        elif kind in PICTURES:
            yield self._picture(part, place, sees)
        elif kind in DOCUMENTS and (found := document_parts(part, place)) is not None:
            for each, at in found:
                yield from self.part(each, at, sees)
        else:
            yield self._unread(part, place, sees)

    def word(self, given: dict[str, Any], name: str, place: RequestPlace) -> str:
        """Return a field that is a text, "" if it is missing; any other value is refused or left out."""
        value = given.get(name)
        if value is not None and not isinstance(value, str):
            self.note(place.at(name), f"{repr(value)[:80]} was left out; allowed is a text")
        return value if isinstance(value, str) else ""

    def note(self, place: RequestPlace, problem: str) -> None:
        """Add a warning about a place; raises Refused instead if the place is new."""
        if place.new:
            raise place.refused(problem)
        self._notes.setdefault(problem, []).append(place.path)

    def line(self, what: str, why: str, place: RequestPlace, shown: Any = None) -> SeparateLines:
        """Return the line of text, with a warning, for what is not read; raises Refused if the place is new.

        shown: the part or item of which the line shows at most MOST_SHOWN characters.
        """
        if place.new:
            raise place.refused(f"{what}: {why}")
        self.note(place, f"{what} was left out, replaced by a line of text: {why}")
        return self._line(what, why + _shown(shown))

    def _line(self, what: str, why: str) -> SeparateLines:
        """Return the line of text for what is left out, in which no mark of a chat template is left."""
        text = f"[{what[:1].upper()}{what[1:]} was left out: {why}.]".translate(MARKS)
        if self._info is None:
            return SeparateLines(text)
        return SeparateLines(self._info.marks.every.sub(lambda mark: f"\\u{ord(mark[0][0]):04x}{mark[0][1:]}", text))

    def settled(self, messages: list[Message], *, count: bool = False) -> list[Message]:
        """Return the request's messages with complete contents: pictures are read, or left out.

        count: of pictures only the header is read. Raises Refused as `RequestPictures.open` or `count`.
        """
        for source, why in self.pictures.count() if count else self.pictures.open():
            line = self.line("a picture", why, source.place)
            source.part.clear()
            source.part.update(type="text", text=OLD_PICTURE if why in (TOO_MANY, TOO_LONG) else line)
        for problem, paths in self._notes.items():
            more = f" and {len(paths) - MOST_PLACES} more" if len(paths) > MOST_PLACES else ""
            self._warnings.append(f"{', '.join(paths[:MOST_PLACES])}{more}: {problem}")
        self._notes = {}
        return [
            {**message, "content": joined_contents(content)}
            if isinstance(content := message["content"], list)
            else message
            for message in messages
        ]

    def _picture(self, part: dict[str, Any], place: RequestPlace, sees: bool) -> str | dict[str, Any]:
        """Return the part for a picture, or a line of text in its place."""
        what, number = f"a picture ({part['type']})" if place.new else "a picture", self.pictures.number
        if not sees:
            return self.line(what, "allowed is text", place)
        if not self.pictures.readable:
            why = f": {self._info.blind}" if place.new and self._info and self._info.blind else ""
            return self.line(what, f"{NO_PICTURES}{why}", place)
        try:
            found = self.pictures.add(part, place)
        except ValueError as e:
            return self.line(f"picture {number}" if place.new else what, str(e), place)
        if not place.new:
            found["past"] = True
        return found

    def _unread(self, part: Any, place: RequestPlace, sees: bool) -> SeparateLines:
        """Return the line of text for a part that is neither text nor picture; raises Refused if the place is new."""
        kind = kind_of(part)
        what = f"a part of type {repr(kind)[:80]}"
        if not place.new:
            return self.line(what, "this type is not read here", place, part)
        if kind in DOCUMENTS:
            raise place.refused(f"{what} without inline text: only text is read of documents; send it")
        if kind in TEXTS:
            raise place.refused(f"{what}: its text is no text")
        raise place.refused(f"{what}; allowed are text{', pictures and documents of text' if sees else ''}")


def kind_of(part: Any) -> Any:
    """Return the type that a part, a block or an item states; None without one."""
    return part.get("type") if isinstance(part, dict) else None


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or isinstance(kind_of(value), str)


def _shown(value: Any) -> str:
    """Return ": " and the start of a value in one line; "" for None, and for an object with nothing to show."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if key not in HIDDEN and each not in (None, "", [], {})}
    return f": {BRIEF.repr(value)[:MOST_SHOWN]}" if value not in (None, {}) else ""


def document_parts(part: dict[str, Any], place: RequestPlace) -> list[tuple[Any, RequestPlace]] | None:
    """Return the parts of a document with their places: title, source and context if it has them, then its content.

    None for a document without inline text: a URL, an id, or a file in another format than text.
    """
    is_found = part.get("type") == "search_result"
    content = _listed(part.get("content"), place.at("content")) if is_found else _content(part, place)
    if content is None:
        return None
    inner = part["file"] if isinstance(part.get("file"), dict) else part
    names = ((inner, "filename"), (part, "title"), (part, "source"), (part, "context"))
    heads = [
        (SeparateLines(found), place.at(name))
        for each, name in names
        if isinstance(found := each.get(name), str) and found
    ]
    return [*heads, *content]


def _content(part: dict[str, Any], place: RequestPlace) -> list[tuple[Any, RequestPlace]] | None:
    """Return the content of a document or file as `document_parts` does; None if it has no text."""
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "content":
        return _listed(source.get("content"), place.at("source").at("content"))
    text = _text(part)
    return None if text is None else [(SeparateLines(text), place)]


def _listed(content: Any, place: RequestPlace) -> list[tuple[Any, RequestPlace]] | None:
    if isinstance(content, str):
        return [(SeparateLines(content), place)]
    return [(each, place.at(i)) for i, each in enumerate(content)] if isinstance(content, list) else None


def _text(part: dict[str, Any]) -> str | None:
    """Return the text of a document or file; None for one without."""
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "text":
        return data if isinstance(data := source.get("data"), str) else None
    return next((text for kind, data in _files(part) if (text := _decoded(kind, data)) is not None), None)


def _files(part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (media type or None, base64 or `data:` URL) of what may be the file of a document or file part."""
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        yield source.get("media_type"), source.get("data")
    inner = part["file"] if isinstance(part.get("file"), dict) else part
    yield None, inner.get("file_data")


def _decoded(kind: Any, data: Any) -> str | None:
    """Return the text in base64 or in a `data:` URL; None for a media type of no text, and for bytes that are none.

    Most media types of programs and of tables are no `text/`, and clients state several for one kind of file.
    """
    if not isinstance(data, str):
        return None
    head, _, rest = data.partition(",") if data[:5].lower() == "data:" else ("", "", "")
    kind = (kind if isinstance(kind, str) else head[5:]).partition(";")[0].strip().lower()
    if kind.startswith(NO_TEXT) and kind not in TEXT:
        return None
    try:
        if head and not head.lower().endswith("base64"):
            content = unquote_to_bytes(rest)
        else:
            content = (from_data_url if head else from_base64)(data, LIMITS)
        text = content.decode("utf-16" if content[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig")
    except ValueError:
        return None
    return None if CONTROL.search(text) or text.startswith("%PDF-") else text
