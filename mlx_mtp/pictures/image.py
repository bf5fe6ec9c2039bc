"""Open a picture: check its file's format and size before decoding, then decode it to RGB.

Supported are turns by EXIF, alpha, palettes, 16-bit grey and CMYK, and of an animation the first frame. Damaged files
are refused. Decoding has a limit of CPU time, and can be ended by another thread.
"""

import base64
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from .header import Head, stated_head
from .library import is_pillow, pillow
from .parts import ORIENTATION, essential, has_several_scans

# (mirrored, quarter turns counterclockwise) that make stored pixels of an upright picture, by EXIF's orientation
TURNS = {2: (True, 0), 3: (False, 2), 4: (True, 2), 5: (True, 1), 6: (False, 1), 7: (True, 3), 8: (False, 3)}
SPACE = re.compile(r"[ \t\r\n\f\v]+")
STANDARD = re.compile("[+/]")  # base64 in its standard alphabet, not in that of URLs
WHITE = (255, 255, 255, 255)
PER_STEP = 257  # 65535 / 255: steps of a 16-bit value for each step of an 8-bit one
SEVERAL_SCANS = "multi-scan JPEG"  # all coefficients are in memory at once
COSTLY = ("WEBP", SEVERAL_SCANS)
STRIP = 1 << 18  # pixels that are converted at once: Python's lock is held meanwhile
BLOCK = 1 << 13  # bytes that a decoder reads at once
SECONDS = 10.0  # of CPU time for decoding a file


class PictureLimits(NamedTuple):
    """Limits of pictures.

    nbytes: maximum bytes of the file. pixels: maximum height times width. ratio: maximum of the longer side divided
    by the shorter. costly: as `pixels`, of the files in COSTLY, whose decoders need more memory.
    """

    nbytes: int = 20_000_000
    pixels: int = 50_000_000
    ratio: int = 200
    costly: int = 50_000_000

    def check(self, height: int, width: int, form: str = "") -> None:
        """Raise ValueError if a size in pixels exceeds the limits, or a side is less than 1.

        form: the file's, or SEVERAL_SCANS.
        """
        if min(height, width) < 1:
            raise ValueError(f"{width} x {height} pixels; allowed is 1 x 1 or more")
        if height * width > (most := self.costly if form in COSTLY else self.pixels):
            of = f" of a {form} file" if most != self.pixels else ""
            raise ValueError(f"{width} x {height} pixels; allowed are {most:,} in all{of}: make it smaller")
        if max(height, width) > self.ratio * min(height, width):
            raise ValueError(f"{width} x {height} pixels; the longer side is limited to {self.ratio} times the other")

    def check_bytes(self, count: int) -> None:
        """Raise ValueError if `count`, the bytes of a file, exceeds `nbytes`."""
        if count > self.nbytes:
            raise ValueError(f"{count:,} bytes; allowed are {self.nbytes:,}: make it smaller")


LIMITS = PictureLimits()


@dataclass(frozen=True, eq=False)
class Image:
    """A decoded picture: RGB values, uint8 [height, width, 3], and a digest of these values and the size."""

    pixels: np.ndarray
    digest: bytes

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]


class DecodingInterrupted(ValueError):
    """The decoding of a picture was ended before it was complete."""


class Watched(io.BytesIO):
    """The bytes of a file for a decoder: a read raises Interrupted after SECONDS of this thread's CPU time.

    check: called at each read too; what it raises ends the decoding. stopped: what was raised.
    """

    def __init__(self, data: bytes, check: Callable[[], None]):
        super().__init__(data)
        self._check, self._until = check, time.thread_time() + SECONDS
        self.stopped: Exception | None = None

    def check(self) -> None:
        """Raise what a read would raise."""
        try:
            self._check()
            if time.thread_time() > self._until:
                raise DecodingInterrupted(
                    f"decoding takes more than {SECONDS:.0f} seconds; save it with another program"
                )
        except Exception as e:
            self.stopped = e
            raise

    def read(self, size: int | None = -1) -> bytes:
        self.check()
        return super().read(size)


def unchecked() -> None:
    """Do nothing: the `check` of a picture whose decoding is not interrupted."""


def open_image(
    source: Any, limits: PictureLimits = LIMITS, number: int = 1, check: Callable[[], None] = unchecked
) -> Image:
    """Return a picture, decoded to RGB and turned as its EXIF data request; of an animation, the first frame.

    Transparent pixels are composited on white. source: a path (str or Path), the bytes of a PNG, JPEG, WEBP or GIF
    file, a `data:` URL, or one of Pillow's images, whose file's bytes are not limited. number: of the picture, from
    1, for messages. check: called often while a file is decoded; what it raises ends that. Raises a one-line
    ValueError for a picture beyond the limits, which is not decoded, for any other unusable source, for a file that
    takes SECONDS of CPU time, and without Pillow.
    """
    with numbered(number):
        if is_pillow(source):
            limits.check(source.height, source.width)
            return _decoded(source, _turn_of(source), Watched(b"", unchecked), None)
        data = _bytes_of(source, limits)
        limits.check_bytes(len(data))
        head = stated_head(data)
        limits.check(head.height, head.width, head.format)
        data, turn = essential(data, head.format)
        file = Watched(data, check)
        opened = _opened(file, head)
        # a GIF's frames can be larger than its header states
        form = SEVERAL_SCANS if has_several_scans(data, head.format) else head.format
        limits.check(opened.height, opened.width, form)
        return _decoded(opened, turn, file, head)


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Begin the message of a ValueError with the number of a picture, from 1."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"picture {number}: {e}") from None


def from_base64(text: str, limits: PictureLimits = LIMITS) -> bytes:
    """Return the bytes that base64 text encodes; ValueError for other text, and for more bytes than limits.nbytes.

    White space of ASCII is ignored, padding may be missing, and the alphabet may be that of URLs. The number of bytes
    is checked before anything is decoded.
    """
    given = SPACE.sub("", text)
    digits = given.rstrip("=")
    limits.check_bytes(len(digits) * 3 // 4)
    padding = "=" * (-len(digits) % 4)
    if given != digits and given != digits + padding:
        raise ValueError("the data are not valid base64")
    try:
        return base64.b64decode(digits + padding, None if STANDARD.search(digits) else b"-_", validate=True)
    except ValueError:
        raise ValueError("the data are not valid base64") from None


def from_data_url(url: str, limits: PictureLimits = LIMITS) -> bytes:
    """Return the bytes in a `data:` URL in base64; ValueError for any other text, or more than limits.nbytes bytes.

    Its data may be percent-encoded. The media type and its parameters are ignored: the bytes show the format.
    """
    head, comma, text = url.strip().partition(",")
    if head[:5].lower() != "data:":
        raise ValueError("the URL is no data: URL")
    if not comma or head.lower().rpartition(";")[2].strip() != "base64" or ";" not in head:
        raise ValueError("the data: URL is not in base64; expected data:image/png;base64,...")
    return from_base64(unquote(text) if "%" in text else text, limits)


def _bytes_of(source: Any, limits: PictureLimits) -> bytes:
    """Return the bytes of a path's file or a `data:` URL, or those given.

    ValueError for other values, a file that is missing or cannot be read, and a file or URL beyond limits.nbytes.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return from_data_url(source, limits)
    if isinstance(source, str) and "://" in source[:10]:
        raise ValueError("a URL; download the picture, and give its path")
    if not isinstance(source, (str, Path)):
        pillow()  # states that it is missing
        kind = type(source).__name__
        raise ValueError(f"a value of type {kind}; expected a path, bytes, a data: URL or an image of Pillow")
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it leaves an unknown user's "~name" unchanged
    try:
        if not path.is_file():  # reading a pipe would block
            raise ValueError(f"{path}: no such file, or not a regular file")
        limits.check_bytes(path.stat().st_size)
        return path.read_bytes()
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e.strerror})") from None


def _opened(file: Watched, head: Head) -> Any:
    """Return Pillow's image of a file, not decoded; ValueError if Pillow cannot open it, or is missing."""
    library = pillow()
    with _one_line(file, head):
        opened = library.open(file, formats=(head.format,))
    opened.decodermaxblock = BLOCK
    return opened


@contextmanager
def _one_line(file: Watched, head: Head | None) -> Iterator[None]:
    """Raise what stopped the decoding, else ValueError for any error: decoders of damaged files raise all types."""
    try:
        yield
    except Exception:
        if file.stopped:
            raise file.stopped from None
        raise ValueError(
            f"the {head.format} data are damaged or truncated" if head else "it cannot be decoded"
        ) from None


def _decoded(opened: Any, turn: int, file: Watched, head: Head | None) -> Image:
    """Decode Pillow's image `opened`; ValueError if that fails.

    turn: EXIF's orientation. head: the file's, for messages; None for an image without a file, which is empty then.
    """
    with _one_line(file, head):
        opened.load()
        pixels = _rgb(opened, turn, file.check)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=32)
    digest.update(pixels.data)
    return Image(pixels, digest.digest())


def _turn_of(image: Any) -> int:
    """Return the orientation in the EXIF data of Pillow's image; 1 without or with damaged ones."""
    with suppress(Exception):
        return image.getexif().get(ORIENTATION, 1)
    return 1


def _rgb(image: Any, turn: int, check: Callable[[], None]) -> np.ndarray:
    """Return the RGB values of Pillow's image, uint8 [height, width, 3], upright, with transparent pixels on white.

    They are converted in strips, so that little memory is needed besides, and other threads run in between.
    """
    width, height = image.size
    mirrored, quarters = TURNS.get(turn, (False, 0))
    pixels = np.empty((width, height, 3) if quarters % 2 else (height, width, 3), np.uint8)
    stored = np.rot90(pixels[:, ::-1] if mirrored else pixels, quarters)  # a view of the pixels as they are stored
    rows = max(1, STRIP // width)
    for top in range(0, height, rows):
        check()
        strip = image.crop((0, top, width, min(top + rows, height)))
        stored[top : top + rows] = _rgb_values(strip)
    return pixels


def _rgb_values(image: Any) -> np.ndarray:
    """Return the RGB values of a strip of an image, uint8 [height, width, 3], with transparent pixels on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return _grey(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = pillow().alpha_composite(pillow().new("RGBA", image.size, WHITE), image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _grey(image: Any) -> np.ndarray:
    """Return the RGB values, uint8 [height, width, 3], of 16-bit grey, which Pillow itself would clip to 255.

    The image's transparent value becomes white. ValueError for values that are not 16-bit integers.
    """
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError("not 16-bit grey")
    grey = ((values.astype(np.uint32) + PER_STEP // 2) // PER_STEP).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return np.repeat(grey[:, :, None], 3, axis=2)
