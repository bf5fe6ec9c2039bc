"""Read documents that contain their text: Anthropic's `document` and `search_result`, OpenAI's `file`s."""

import mimetypes
from collections.abc import Iterator
from typing import Any

from ..pictures.image import Limits, from_base64, from_data_url
from .forms import Line
from .places import Place

DOCUMENTS = ("document", "search_result", "file", "input_file")
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
    """Yield (media type, base64 or `data:` URL) of what may be the file of a document or file part."""
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        yield source.get("media_type"), source.get("data")
    inner = part["file"] if isinstance(part.get("file"), dict) else part
    name, data = inner.get("filename"), inner.get("file_data")
    if isinstance(data, str) and data[:5].lower() == "data:":
        yield data[5:].partition(",")[0].partition(";")[0], data
    else:
        yield mimetypes.guess_type(name)[0] if isinstance(name, str) else None, data


def _decoded(kind: Any, data: Any) -> str | None:
    """Return the text in base64 or in a `data:` URL; None unless the media type is one of text in UTF-8."""
    if not isinstance(kind, str) or not isinstance(data, str):
        return None
    kind = kind.strip().lower()
    if not (kind.startswith("text/") or kind.endswith(("json", "xml", "yaml"))):
        return None
    try:
        return (from_data_url if data[:5].lower() == "data:" else from_base64)(data, LIMITS).decode("utf-8-sig")
    except ValueError:
        return None
