"""Read a picture's format and size from the first bytes of its file, without Pillow and without decoding it."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

FORMATS = "PNG, JPEG, WEBP and GIF"
STANDALONE = {0x00, 0x01, *range(0xD0, 0xD9)}  # JPEG's markers that no length follows
START_OF_SCAN = 0xDA  # JPEG's marker before the pixels
EXTENSION = ord("!")  # the first byte of a GIF file's block that is no frame
MOST_PARTS = 1 << 15  # of a file, see `check_parts`
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


def image_size(data: bytes) -> tuple[int, int]:
    """Return the (height, width) in pixels that a picture's file states; ValueError if `read_head` returns None."""
    head = read_head(data)
    if head is None:
        raise ValueError(f"the data are not a {FORMATS.replace('and', 'or')} picture")
    return head.height, head.width


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
    for at in islice(_segments(data), MOST_PARTS):
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in NO_FRAME:
            return _head("JPEG", data[at + 5 : at + 7], data[at + 7 : at + 9], order="big")
    return None


def check_parts(data: bytes, head: Head) -> None:
    """Raise ValueError if a file has more than MOST_PARTS parts: Pillow reads each one in Python, in microseconds.

    Parts are a JPEG file's fill bytes and segments before its pixels, a PNG file's chunks, and a GIF file's blocks
    before its first frame.
    """
    parts = {"JPEG": _segments, "PNG": _chunks, "GIF": _blocks}.get(head.format)
    if parts and next(islice(parts(data), MOST_PARTS, None), None) is not None:
        raise ValueError(f"the {head.format} file has more than {MOST_PARTS:,} parts; save it with another program")


def _segments(data: bytes) -> Iterator[int]:
    """Yield the index of each fill byte and marker of a JPEG file, up to the start of its pixels."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        yield at
        marker = data[at + 1]
        if marker == START_OF_SCAN:
            return
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in STANDALONE:
            at += 2
        else:
            at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))


def _chunks(data: bytes) -> Iterator[int]:
    """Yield the index of each chunk of a PNG file."""
    at = 8
    while at + 8 <= len(data):
        yield at
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _blocks(data: bytes) -> Iterator[int]:
    """Yield the index of each block and sub-block, and each stray byte, of a GIF file before its first frame."""
    at = 13 + (3 << (data[10] % 8 + 1) if data[10:11] >= b"\x80" else 0)  # after the palette
    while at < len(data) and data[at] not in b",;":
        yield at
        if data[at] != EXTENSION:
            at += 1
            continue
        at += 2
        while data[at : at + 1] > b"\0":
            yield at
            at += 1 + data[at]
        at += 1
