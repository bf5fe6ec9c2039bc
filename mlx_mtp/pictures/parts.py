"""Read the parts of a picture's file: limit their number, and leave out those that do not determine its pixels.

Pillow reads metadata in Python while it opens a file: 20 MB of EXIF data or comments can take it hours and memory.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

MOST_PARTS = 1 << 15  # of a file: Pillow reads each one in microseconds
MOST_SCANS = 100  # of a JPEG file, usually at most 10: each is a pass over all pixels, and needs few bytes
ORIENTATION = 0x0112  # EXIF's tag of the turn
EXIF = b"Exif\0\0"
# JPEG's markers
MARKER, IN_SCAN = re.compile(rb"\xff[\x01-\xfe]"), re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
STANDALONE = {0x01, *range(0xD0, 0xDA)}  # no length follows
END, START_OF_SCAN, APP1 = 0xD9, 0xDA, 0xE1
COMMENTS = {*range(APP1, 0xEE), 0xEF, 0xFE}  # APP0 and APP14 state how colours are encoded
# GIF's blocks
EXTENSION, CONTROL, FRAME, STRAY = ord("!"), 0xF9, ord(","), -1


class FilePart(NamedTuple):
    """A part of a file, data[begin:end]. kind: JPEG's marker, a chunk's name, or the label of a GIF file's block."""

    kind: Any
    begin: int
    end: int


class FileLayout(NamedTuple):
    """The parts of a format. first: bytes before them. exif: (kind, bytes before EXIF data, bytes after them)."""

    first: Callable[[bytes], int]
    parts: Callable[[bytes], Iterator[FilePart]]
    is_kept: Callable[[Any], bool]
    exif: tuple[Any, int, int] = (None, 0, 0)


def essential(data: bytes, form: str) -> tuple[bytes, int]:
    """Return a picture's file without metadata, and the turn that its EXIF data request, 1 for none.

    form: "PNG", "JPEG", "WEBP" or "GIF". Raises ValueError for more than MOST_PARTS parts, which are a JPEG file's
    segments, chunks, or the blocks before a GIF file's first frame, and for more than MOST_SCANS scans.
    """
    layout = LAYOUTS[form]
    parts = list(islice(layout.parts(data), MOST_PARTS + 1))
    scans = sum(part.kind == START_OF_SCAN for part in parts) if form == "JPEG" else 0
    for count, most, what in ((len(parts), MOST_PARTS, "parts"), (scans, MOST_SCANS, "scans")):
        if count > most:
            raise ValueError(f"the {form} file has more than {most:,} {what}; save it with another program")
    kept = [data[: layout.first(data)], *(data[begin:end] for kind, begin, end in parts if layout.is_kept(kind))]
    kind, before, after = layout.exif
    metadata = (data[part.begin + before : part.end - after] for part in parts if part.kind == kind)
    return b"".join(kept), next((turn for each in metadata if (turn := turn_of(each)) is not None), 1)


def has_several_scans(data: bytes, form: str) -> bool:
    """Return whether a file is a JPEG file with several scans, as progressive ones have."""
    scans = (part for part in jpeg_parts(data) if part.kind == START_OF_SCAN) if form == "JPEG" else iter(())
    return len([*islice(scans, 2)]) == 2


def turn_of(exif: bytes) -> int | None:
    """Return the orientation, 1 to 8, in the first directory of EXIF data, 1 without one; None for other data."""
    exif = exif.removeprefix(EXIF)
    order: Any = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if order is None:
        return None
    first = int.from_bytes(exif[4:8], order)
    count = int.from_bytes(exif[first : first + 2], order)
    for at in range(first + 2, min(first + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind = (int.from_bytes(exif[i : i + 2], order) for i in (at, at + 2))
        if tag == ORIENTATION:
            value = int.from_bytes(exif[at + 8 : at + (12 if kind == 4 else 10)], order)
            return value if 1 <= value <= 8 else 1
    return 1


def jpeg_parts(data: bytes) -> Iterator[FilePart]:
    """Yield the segments of a JPEG file up to its end; a scan includes its pixels. Bytes between are skipped."""
    at = 2
    while found := MARKER.search(data, at):
        marker, at = data[found.start() + 1], found.end()
        if marker not in STANDALONE:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
        if marker == START_OF_SCAN:
            after = IN_SCAN.search(data, at)
            at = after.start() if after else len(data)
        yield FilePart(marker, found.start(), at)
        if marker == END:
            return


def _png_parts(data: bytes) -> Iterator[FilePart]:
    at = 8
    while at + 8 <= len(data):
        name, end = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4], "big")
        yield FilePart(name, at, end)
        if name == b"IEND":
            return
        at = end


def _webp_parts(data: bytes) -> Iterator[FilePart]:
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + size + size % 2
        yield FilePart(data[at : at + 4], at, end)
        at = end


def _gif_parts(data: bytes) -> Iterator[FilePart]:
    """Yield the head and sub-blocks of each extension, and each stray byte, before the first frame, and the rest."""
    at = _gif_first(data)
    while at < len(data) and data[at] not in b",;":
        if data[at] != EXTENSION:
            yield FilePart(STRAY, at, at + 1)
            at += 1
            continue
        label = data[at + 1] if at + 1 < len(data) else STRAY
        yield FilePart(label, at, at + 2)
        at += 2
        while data[at : at + 1] > b"\0":
            yield FilePart(label, at, at + 1 + data[at])
            at += 1 + data[at]
        yield FilePart(label, at, at + 1)
        at += 1
    yield FilePart(FRAME, at, len(data))


def _gif_first(data: bytes) -> int:
    """Return the index of the first byte after a GIF file's palette."""
    return 13 + (3 << (data[10] % 8 + 1) if data[10:11] >= b"\x80" else 0)


LAYOUTS = {
    "JPEG": FileLayout(lambda _: 2, jpeg_parts, lambda kind: kind not in COMMENTS, (APP1, 4, 0)),
    "PNG": FileLayout(
        lambda _: 8, _png_parts, {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}.__contains__, (b"eXIf", 8, 4)
    ),
    "WEBP": FileLayout(lambda _: 12, _webp_parts, lambda _: True, (b"EXIF", 8, 0)),
    "GIF": FileLayout(_gif_first, _gif_parts, (CONTROL, FRAME).__contains__),
}
