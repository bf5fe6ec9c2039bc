"""Read a picture's format and size from the first bytes of its file, without Pillow and without decoding it."""

from itertools import islice
from typing import NamedTuple

from .parts import MOST_PARTS, START_OF_SCAN, jpeg_parts

NO_FRAME = {0xC4, 0xC8, 0xCC}  # markers among SOF0 to SOF15 that begin no frame


class Head(NamedTuple):
    """A picture's format ("PNG", "JPEG", "WEBP" or "GIF") and its size in pixels, not turned as EXIF data request."""

    format: str
    height: int
    width: int


def read_head(data: bytes) -> Head | None:
    """Return the format and size that a PNG, JPEG, WEBP or GIF file states; None for other data.

    None also if the data end before the size.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _head("PNG", data[20:24], data[16:20], 4, "big") if data[12:16] == b"IHDR" else None
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _head("GIF", data[8:10], data[6:8])
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    return _jpeg(data) if data.startswith(b"\xff\xd8\xff") else None


def stated_head(data: bytes) -> Head:
    """Return what `read_head` returns; ValueError instead of None."""
    if head := read_head(data):
        return head
    raise ValueError("the data are not a PNG, JPEG, WEBP or GIF picture")


def _head(name: str, height: bytes, width: bytes, count: int = 2, order: str = "little") -> Head | None:
    """Return the `Head` of these two numbers, None unless both have all `count` bytes. order: of the bytes."""
    if not len(height) == len(width) == count:
        return None
    return Head(name, *(int.from_bytes(number, order) for number in (height, width)))  # type: ignore[arg-type]


def _webp(data: bytes) -> Head | None:
    """Return the `Head` of a lossy, lossless or extended WEBP file; None for others, or if the data are too short."""
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return Head("WEBP", *(1 + int.from_bytes(data[at : at + 3], "little") for at in (27, 24)))
    if kind == b"VP8L" and len(data) >= 25 and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return Head("WEBP", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if kind == b"VP8 " and len(data) >= 30 and data[23:26] == b"\x9d\x01\x2a":
        return Head("WEBP", *(int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (28, 26)))
    return None


def _jpeg(data: bytes) -> Head | None:
    """Return the `Head` of a JPEG file from its first frame header; None if it has none in MOST_PARTS parts."""
    for marker, at, _ in islice(jpeg_parts(data), MOST_PARTS):
        if marker == START_OF_SCAN:
            return None
        if 0xC0 <= marker <= 0xCF and marker not in NO_FRAME:
            return _head("JPEG", data[at + 5 : at + 7], data[at + 7 : at + 9], order="big")
    return None
