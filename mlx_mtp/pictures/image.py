"""Open a picture: check its file's format and size before decoding, then decode it to RGB.

Supported are turns by EXIF, alpha, palettes, 16-bit grey and CMYK, and of an animation the first frame. Damaged files
are refused.
"""

import base64
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from .header import FORMATS, Head, check_parts, read_head
from .library import is_pillow, pillow

ORIENTATION = 0x0112  # EXIF's tag of the turn
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
SPACE = re.compile(r"[ \t\r\n\f\v]+")
STANDARD = re.compile("[+/]")  # base64 in its standard alphabet, not in that of URLs
WHITE = (255, 255, 255, 255)
PER_STEP = 257  # 65535 / 255: steps of a 16-bit value for each step of an 8-bit one


class Limits(NamedTuple):
    """Limits of pictures.

    nbytes: maximum bytes of the file. pixels: maximum height times width. ratio: maximum of the longer side divided
    by the shorter.
    """

    nbytes: int = 20_000_000
    pixels: int = 50_000_000
    ratio: int = 200

    def check(self, height: int, width: int) -> None:
        """Raise ValueError if a size in pixels exceeds `pixels` or `ratio`, or a side is less than 1."""
        if min(height, width) < 1:
            raise ValueError(f"{width} x {height} pixels; allowed is 1 x 1 or more")
        if height * width > self.pixels:
            raise ValueError(f"{width} x {height} pixels; allowed are {self.pixels:,} in all: make it smaller")
        if max(height, width) > self.ratio * min(height, width):
            raise ValueError(f"{width} x {height} pixels; the longer side is limited to {self.ratio} times the other")

    def check_bytes(self, count: int) -> None:
        """Raise ValueError if `count`, the bytes of a file, exceeds `nbytes`."""
        if count > self.nbytes:
            raise ValueError(f"{count:,} bytes; allowed are {self.nbytes:,}: make it smaller")


LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class Image:
    """A decoded picture: RGB values, uint8 [height, width, 3], and a digest of these values and the size."""

    pixels: np.ndarray
    digest: bytes

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]


def open_image(source: Any, limits: Limits = LIMITS, number: int = 1) -> Image:
    """Return a picture, decoded to RGB and turned as its EXIF data request; of an animation, the first frame.

    Transparent pixels are composited on white. source: a path (str or Path), the bytes of a PNG, JPEG, WEBP or GIF
    file, a `data:` URL, or one of Pillow's images, whose file's bytes are not limited. number: of the picture, from
    1, for messages. Raises a one-line ValueError for a picture beyond the limits, which is not decoded, for any other
    unusable source, and without Pillow.
    """
    with numbered(number):
        if is_pillow(source):
            return _finish(source, limits)
        data = _bytes_of(source, limits)
        limits.check_bytes(len(data))
        head = read_head(data)
        if head is None:
            raise ValueError(f"the data are of no supported format; supported are {FORMATS}")
        limits.check(head.height, head.width)
        check_parts(data, head)
        return _finish(_opened(data, head), limits, head)


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Begin the message of a ValueError with the number of a picture, from 1."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"picture {number}: {e}") from None


def from_base64(text: str, limits: Limits = LIMITS) -> bytes:
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


def from_data_url(url: str, limits: Limits = LIMITS) -> bytes:
    """Return the bytes in a `data:` URL in base64; ValueError for any other text, or more than limits.nbytes bytes.

    Its data may be percent-encoded. The media type and its parameters are ignored: the bytes show the format.
    """
    head, comma, text = url.strip().partition(",")
    if head[:5].lower() != "data:":
        raise ValueError("the URL is no data: URL")
    if not comma or head.lower().rpartition(";")[2].strip() != "base64" or ";" not in head:
        raise ValueError("the data: URL is not in base64; expected data:image/png;base64,...")
    return from_base64(unquote(text) if "%" in text else text, limits)


def _bytes_of(source: Any, limits: Limits) -> bytes:
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


def _opened(data: bytes, head: Head) -> Any:
    """Return Pillow's image of a file's bytes, not decoded; ValueError if Pillow cannot open it, or is missing."""
    library = pillow()
    try:
        return library.open(io.BytesIO(data), formats=(head.format,))
    except Exception:  # the decoders of damaged files raise errors of any type
        raise ValueError(_damaged(head)) from None


def _damaged(head: Head | None) -> str:
    return f"the {head.format} data are damaged or truncated" if head else "it cannot be decoded"


def _finish(opened: Any, limits: Limits, head: Head | None = None) -> Image:
    """Decode Pillow's image `opened`; ValueError if that fails, or if its size is beyond the limits.

    The size is checked as Pillow has read it, since a GIF's frames can be larger than its header states. head: the
    file's, for messages; None without a file.
    """
    width, height = opened.size
    limits.check(height, width)
    try:
        opened.load()
        pixels = _rgb(_turned(opened))
    except Exception:  # as in `_opened`
        raise ValueError(_damaged(head)) from None
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=32)
    digest.update(pixels.data)
    return Image(pixels, digest.digest())


def _turned(opened: Any) -> Any:
    """Return Pillow's image turned and mirrored as its EXIF data request; itself without or with damaged ones."""
    turn = None
    with suppress(Exception):
        turn = TURNS.get(opened.getexif().get(ORIENTATION))
    return opened if turn is None else opened.transpose(getattr(pillow().Transpose, turn))


def _rgb(image: Any) -> np.ndarray:
    """Return the RGB values of Pillow's image, uint8 [height, width, 3], with transparent pixels on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return _grey(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = pillow().alpha_composite(pillow().new("RGBA", image.size, WHITE), image)
    image = image if image.mode == "RGB" else image.convert("RGB")  # which copies an RGB image
    return np.ascontiguousarray(np.asarray(image))


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
