"""Read the pictures of a request: base64 data, `data:` URLs, and URLs of allowed hosts. Never a path."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..pictures.decoded import DecodedFiles
from ..pictures.header import stated_head
from ..pictures.image import Limits, from_base64, from_data_url, unchecked
from ..pictures.rows import Picture
from .fetch import SECONDS, fetched
from .fields import NO_PICTURES, ModelInfo, Refused, fields_of, text

MOST_PICTURES = 20  # of a request
LOW = 512 * 512  # maximum pixels of a picture of detail "low", which is shrunk to them
DETAILS = ("auto", "high", "low", "original")
FILES = DecodedFiles()  # a client sends the pictures of a conversation again with each request
LIMITS = Limits(pixels=25_000_000, webp=16_000_000)  # decoding needs 0.25 GB: 10 bytes per pixel, 16 of WEBP
MOST_PIXELS = 300_000_000  # of all pictures of a request that are to be decoded
DECODING = threading.BoundedSemaphore(2)  # pictures decoded at once
TURN = 0.2  # seconds of waiting for DECODING between two checks


class Source(NamedTuple):
    """A picture as a client sent it, and `part`, the part of a message that it becomes.

    number: of the picture in the request, from 1 on. data: base64, or a URL if `is_url`. field: of the request, for
    errors. most: as in `Vision.grid`; None: the vision tower's own maximum.
    """

    number: int
    part: dict[str, Any]
    data: str
    is_url: bool
    most: int | None
    field: str


class RequestPictures:
    """The pictures of one request: `add` collects them, then `open` or `count` completes their parts.

    readable: whether pictures can be read: `info` is given and its model has a vision tower.
    """

    def __init__(self, info: ModelInfo | None = None):
        self._info, self._sources = info, list[Source]()
        self.readable = info is not None and info.vision is not None

    def add(self, given: dict[str, Any], field: str) -> dict[str, Any]:
        """Return {"type": "image"} for the part of a picture in any API; `open` or `count` adds "picture" to it.

        field: the request's field, for errors. Raises Refused for an invalid part, for more than MOST_PICTURES, and
        unless `readable`.
        """
        if not self.readable:
            why = self._info.blind if self._info else ""
            what = f"a picture ({given.get('type')})"
            raise Refused(f"{field}: {what}, but {NO_PICTURES}{why and ': '}{why}", param=field)
        number, part = len(self._sources) + 1, {"type": "image"}
        if number > MOST_PICTURES:
            raise Refused(f"{field}: more than {MOST_PICTURES} pictures in a request; send fewer", param=field)
        data, is_url, detail = _given(given, f"{field}: picture {number}", field)
        self._sources.append(Source(number, part, data, is_url, LOW if detail == "low" else None, field))
        return part

    def open(self, check: Callable[[], None] = unchecked) -> None:
        """Read and check all pictures; set "picture" in each part to the `Picture` of the model's vision tower.

        A file's bytes are decoded unless FILES contains the file. check: called often meanwhile; what it raises ends
        the work. Raises Refused for a picture that cannot be read, before any is decoded if its header shows this,
        for more than MOST_PIXELS to be decoded, and unless the pictures have fewer rows together than the model has
        positions.
        """
        if not self._sources:
            return
        assert self._info
        files = self._files()
        rows = sum(self._counted(source, file).rows for source, file in files)
        if rows >= self._info.positions:
            numbers = f"{rows} tokens of pictures > {self._info.positions - 1} maximum"
            raise Refused(f"prompt is too long: {numbers}", code="context_length_exceeded", param=files[0][0].field)
        _check_pixels(files)
        for source, file in files:
            with _turn(check), _refusing(source):
                image = FILES.open(file, source.number, LIMITS, check)
                source.part["picture"] = self._info.vision.picture(image, most=source.most)

    def count(self) -> None:
        """Set "picture" in each part to a `Picture` without digest, with the number of rows that the header shows.

        Files are fetched but not decoded. Raises Refused for a file that cannot be fetched or has no valid header.
        """
        for source, file in self._files():
            source.part["picture"] = self._counted(source, file)

    def _files(self) -> list[tuple[Source, bytes]]:
        until = time.monotonic() + SECONDS
        return [(source, self._file(source, until)) for source in self._sources]

    def _file(self, source: Source, until: float) -> bytes:
        """Return the bytes of a picture's file. until: time.monotonic() at which a fetch ends. Raises Refused."""
        with _refusing(source):
            if not source.is_url:
                return from_base64(source.data)
            assert self._info
            if source.data[:8].lower().startswith(("http://", "https://")):
                return fetched(source.data, self._info.fetch, LIMITS.nbytes, until)
            return from_data_url(source.data)

    def _counted(self, source: Source, file: bytes) -> Picture:
        """Return a `Picture` without digest, of the size that a picture's file states. Raises Refused."""
        assert self._info
        with _refusing(source):
            head = stated_head(file)
            LIMITS.check(head.height, head.width, head.format)
            return Picture(b"", self._info.vision.grid(head.height, head.width, most=source.most))


def _check_pixels(files: list[tuple[Source, bytes]]) -> None:
    """Raise Refused if pictures that are to be decoded have more than MOST_PIXELS together."""
    heads = [(source, stated_head(file)) for source, file in files if not FILES.known(file)]
    for count, (source, head) in enumerate(heads):
        if sum(each.height * each.width for _, each in heads[: count + 1]) > MOST_PIXELS:
            most = f"allowed are {MOST_PIXELS:,} in all pictures of a request; send fewer or smaller ones"
            raise Refused(f"picture {source.number}: {head.width} x {head.height} pixels; {most}", param=source.field)


@contextmanager
def _turn(check: Callable[[], None]) -> Iterator[None]:
    """Hold DECODING, for which `check` is called while this thread waits."""
    while not DECODING.acquire(timeout=TURN):
        check()
    try:
        yield
    finally:
        DECODING.release()


@contextmanager
def _refusing(source: Source) -> Iterator[None]:
    """Raise Refused, with the picture's number in the message, for a ValueError of the block."""
    try:
        yield
    except ValueError as e:
        before = f"picture {source.number}: "
        raise Refused(before + str(e).removeprefix(before), param=source.field) from None


def _given(given: dict[str, Any], where: str, field: str) -> tuple[str, bool, str | None]:
    """Return (base64 data or URL of a picture, whether it is a URL, its detail or None), from a part of any API.

    where: names field and picture in errors. Raises Refused for an invalid part.
    """
    source = fields_of(given, "source") if given.get("type") == "image" else {}
    if given.get("file_id") or source.get("type") == "file" or source.get("file_id"):
        raise Refused(f"{where}: file_id is not supported, as the server stores no files; send the data", param=field)
    if given.get("type") == "image":
        name = {"base64": "data", "url": "url"}.get(str(source.get("type")))
        if name is None:
            raise Refused(f"{where}: source needs type base64 or url", param=field)
        return _nonempty(source, name, where, field), name == "url", None
    url: Any = given.get("image_url")
    nested = url if isinstance(url, dict) else {"url": url}
    detail = nested.get("detail", given.get("detail"))
    if detail is not None and detail not in DETAILS:
        allowed = ", ".join(DETAILS)
        raise Refused(f"{where}: detail={repr(detail)[:80]}: allowed are {allowed}", param=field)
    return _nonempty(nested, "url", where, field), True, detail


def _nonempty(part: dict[str, Any], name: str, where: str, field: str) -> str:
    if not (found := text(part, name)):
        raise Refused(f"{where}: {name} is missing", param=field)
    return found
