"""Read the pictures of a request: base64 data, `data:` URLs, and URLs of allowed hosts. Never a path."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..pictures.decoded import DecodedFiles
from ..pictures.header import stated_head
from ..pictures.image import PictureLimits, from_base64, from_data_url
from ..pictures.rows import Picture
from .fetch import SECONDS, fetched
from .fields import ModelInfo, Refused
from .places import RequestPlace
from .preparation import check_client

MOST_PICTURES = 20  # of a request
BLOCK = 10  # earlier pictures that are left out together, so that the next requests begin with the same tokens
TOO_MANY = f"only the newest {MOST_PICTURES} or fewer of a conversation are read"
TOO_LONG = "the pictures of the conversation are longer than the model's context"
LOW = 512 * 512  # maximum pixels of a picture of detail "low", which is shrunk to them
DETAILS = ("auto", "high", "low", "original")
FILES = DecodedFiles()  # a client sends the pictures of a conversation again with each request
LIMITS = PictureLimits(pixels=25_000_000, costly=16_000_000)  # decoding needs 0.25 GB: 10 bytes per pixel, or 16
MOST_PIXELS = 300_000_000  # of all pictures of a request that are to be decoded
DECODING = threading.BoundedSemaphore(2)  # pictures decoded at once
TURN = 0.2  # seconds of waiting for DECODING between two checks


class SentPicture(NamedTuple):
    """A picture as a client sent it, and `part`, the part of a message that it becomes.

    number: of the picture in the request, from 1 on. data: base64, or a URL if `is_url`. place: in the request. most:
    as in `Vision.grid`; None: the vision tower's own maximum.
    """

    number: int
    part: dict[str, Any]
    data: str
    is_url: bool
    most: int | None
    place: RequestPlace


LeftOut = list[tuple[SentPicture, str]]  # pictures of earlier messages that are not read, each with the reason


class RequestPictures:
    """The pictures of one request: `add` collects them, then `open` or `count` completes their parts.

    readable: whether pictures can be read: `info` is given and its model has a vision tower.
    """

    def __init__(self, info: ModelInfo | None = None):
        self._info, self._sources, self._left = info, list[SentPicture](), LeftOut()
        self.readable = info is not None and info.vision is not None

    def add(self, given: dict[str, Any], place: RequestPlace) -> dict[str, Any]:
        """Return {"type": "image"} for the part of a picture in any API; `open` or `count` adds "picture" to it.

        Raises ValueError for an invalid part, and for more than MOST_PICTURES in the newest message of the user.
        """
        if place.new and sum(source.place.new for source in self._sources) == MOST_PICTURES:
            raise ValueError(f"more than {MOST_PICTURES} pictures in a request; send fewer")
        part, (data, is_url, detail) = {"type": "image"}, _given(given)
        self._sources.append(SentPicture(self.number, part, data, is_url, LOW if detail == "low" else None, place))
        return part

    @property
    def number(self) -> int:
        """The number of the picture that is added next, from 1 on."""
        return len(self._sources) + 1

    def open(self, check: Callable[[], None] = check_client) -> LeftOut:
        """Read and check all pictures; set "picture" in each part to the `Picture` of the model's vision tower.

        A file's bytes are decoded unless FILES contains the file. check: called often meanwhile; what it raises ends
        the work. Returns the pictures of earlier messages that are left out: those that cannot be read, and the
        oldest of too many. Raises Refused for one of the newest message that cannot be read, before any is decoded if
        its header shows this, and unless the remaining pictures have fewer rows together than the model has
        positions.
        """
        for source, file in self._affordable(self._fitting(self._files())):
            assert self._info
            with self._refusing(source), _turn(check):
                image = FILES.open(file, source.number, LIMITS, check)
                source.part["picture"] = self._info.vision.picture(image, most=source.most)
        return self._left

    def count(self) -> LeftOut:
        """Set "picture" in each part to a `Picture` without digest, with the number of rows that the header shows.

        Files are fetched but not decoded. Returns and raises Refused as `open`, for files that cannot be fetched or
        have no valid header.
        """
        for source, file in self._fitting(self._files()):
            source.part["picture"] = self._counted(source, file)
        return self._left

    def _files(self) -> list[tuple[SentPicture, bytes]]:
        """Return the files of the pictures that are read, and have a valid header; the oldest of too many are not."""
        past, excess = (
            [source for source in self._sources if not source.place.new],
            len(self._sources) - MOST_PICTURES,
        )
        self._left = [(source, TOO_MANY) for source in past[: max(0, -(-excess // BLOCK) * BLOCK)]]
        oldest, until = {source.number for source, _ in self._left}, time.monotonic() + SECONDS
        found = list[tuple[SentPicture, bytes]]()
        for source in self._sources:
            if source.number not in oldest:
                with self._refusing(source):
                    file = self._file(source, until)
                    self._counted(source, file)
                    found.append((source, file))
        return found

    def _fitting(self, files: list[tuple[SentPicture, bytes]]) -> list[tuple[SentPicture, bytes]]:
        """Return `files` without the oldest earlier ones that the context has no room for. May raise Refused."""
        if not files:
            return files
        assert self._info
        while (rows := sum(self._counted(*each).rows for each in files)) >= self._info.positions:
            oldest = [source for source, _ in files if not source.place.new][:BLOCK]
            dropped = {source.number for source in oldest}
            if not oldest:
                numbers = f"{rows} tokens of pictures > {self._info.positions - 1} maximum"
                error = files[0][0].place.refused("")
                raise Refused(f"prompt is too long: {numbers}", code="context_length_exceeded", param=error.param)
            self._left += [(source, TOO_LONG) for source in oldest]
            files = [each for each in files if each[0].number not in dropped]
        return files

    def _file(self, source: SentPicture, until: float) -> bytes:
        """Return the bytes of a picture's file. until: time.monotonic() at which a fetch ends. Raises ValueError."""
        if not source.is_url and source.data.lstrip()[:5].lower() != "data:":
            return from_base64(source.data)
        assert self._info
        if source.data[:8].lower().startswith(("http://", "https://")):
            return fetched(source.data, self._info.fetch, LIMITS.nbytes, until)
        return from_data_url(source.data)

    def _counted(self, source: SentPicture, file: bytes) -> Picture:
        """Return a `Picture` without digest, of the size that a picture's file states. May raise ValueError."""
        assert self._info
        head = stated_head(file)
        LIMITS.check(head.height, head.width, head.format)
        return Picture(b"", self._info.vision.grid(head.height, head.width, most=source.most))

    def _affordable(self, files: list[tuple[SentPicture, bytes]]) -> list[tuple[SentPicture, bytes]]:
        """Return `files` without earlier ones beyond MOST_PIXELS to be decoded; the newest count first."""
        found, left = list[tuple[SentPicture, bytes]](), MOST_PIXELS
        for source, file in reversed(files):
            with self._refusing(source):
                if not FILES.known(file):
                    head = stated_head(file)
                    left -= head.height * head.width
                    if left < 0:
                        most = f"allowed are {MOST_PIXELS:,} in all pictures of a request; send fewer or smaller ones"
                        raise ValueError(f"{head.width} x {head.height} pixels; {most}")
                found.append((source, file))
        return found[::-1]

    @contextmanager
    def _refusing(self, source: SentPicture) -> Iterator[None]:
        """Catch a ValueError of the block: leave out the picture, or raise Refused for one of the newest message."""
        try:
            yield
        except ValueError as e:
            before = f"picture {source.number}: "
            why = str(e).removeprefix(before)
            if source.place.new:
                raise source.place.refused(before + why) from None
            self._left.append((source, why))


@contextmanager
def _turn(check: Callable[[], None]) -> Iterator[None]:
    """Hold DECODING, for which `check` is called while this thread waits."""
    while not DECODING.acquire(timeout=TURN):
        check()
    try:
        yield
    finally:
        DECODING.release()


def _given(given: dict[str, Any]) -> tuple[str, bool, str | None]:
    """Return (base64 data or URL of a picture, whether it is a URL, its detail or None), from a part of any API.

    Raises ValueError for an invalid part.
    """
    source = given.get("source") if given.get("type") == "image" else None
    if source is not None and not isinstance(source, dict):
        raise ValueError(f"source={repr(source)[:80]}: allowed is an object")
    source = source or {}
    if given.get("file_id") or source.get("type") == "file" or source.get("file_id"):
        raise ValueError("file_id is not supported, as the server stores no files; send the data")
    if given.get("type") == "image":
        name = {"base64": "data", "url": "url"}.get(str(source.get("type")))
        if name is None:
            raise ValueError("source needs type base64 or url")
        return _nonempty(source, name), name == "url", None
    url: Any = given.get("image_url")
    nested = url if isinstance(url, dict) else {"url": url}
    detail = nested.get("detail", given.get("detail"))
    if detail is not None and detail not in DETAILS:
        raise ValueError(f"detail={repr(detail)[:80]}: allowed are {', '.join(DETAILS)}")
    return _nonempty(nested, "url"), True, detail


def _nonempty(part: dict[str, Any], name: str) -> str:
    found = part.get(name)
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{name}={repr(found)[:80]}: allowed is a text")
    if not found:
        raise ValueError(f"{name} is missing")
    return found
