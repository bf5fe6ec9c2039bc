"""Read documents that contain their text: Anthropic's `document` and `search_result`, OpenAI's `file`s."""

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

from ..pictures.image import Limits, from_base64, from_data_url
from .forms import Line
from .places import Place

DOCUMENTS = ("document", "search_result", "file", "input_file")
NO_TEXT = ("image/", "audio/", "video/", "font/", "application/pdf")  # begin media types
TEXT = ("image/svg+xml", "video/mp2t")  # the second is how browsers call a file of TypeScript
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # in no text; logs contain \x1b
LIMITS = Limits(nbytes=1 << 30)  # a body is smaller


def document_parts(part: dict[str, Any], place: Place) -> list[tuple[Any, Place]] | None:
    """Return the parts of a document with their places: title, source and context if it has them, then its content.

    None for a document without inline text: a URL, an id, or a file in another format than text.
    """
    content = _search_result(part, place) if part.get("type") == "search_result" else _content(part, place)
    if content is None:
        return None
    inner = part["file"] if isinstance(part.get("file"), dict) else part
    names = ((inner, "filename"), (part, "title"), (part, "source"), (part, "context"))
    heads = [
        (Line(found), place.at(name)) for each, name in names if isinstance(found := each.get(name), str) and found
    ]
    return [*heads, *content]


def _search_result(part: dict[str, Any], place: Place) -> list[tuple[Any, Place]] | None:
    return _listed(part.get("content"), place.at("content"))


def _content(part: dict[str, Any], place: Place) -> list[tuple[Any, Place]] | None:
    """Return the content of a document or file as `document_parts` does; None if it has no text."""
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "content":
        return _listed(source.get("content"), place.at("source").at("content"))
    text = _text(part)
    return None if text is None else [(Line(text), place)]


def _listed(content: Any, place: Place) -> list[tuple[Any, Place]] | None:
    if isinstance(content, str):
        return [(Line(content), place)]
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
