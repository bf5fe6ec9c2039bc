"""Remember the pictures of decoded files, so that a file that is sent again is not decoded again.

Of each file only size and digest are stored, besides pixels up to a number of bytes in all: few requests need pixels,
because features of pictures that were read are stored elsewhere.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .image import LIMITS, PictureLimits, open_image, unchecked

PIXELS = 100_000_000  # bytes of stored pixels, by default
FILES = 10_000  # number of files whose size and digest are stored


@dataclass(frozen=True, eq=False)
class FileImage:
    """A picture of a file that can be decoded: the size, digest and pixels of the file's `Image`.

    data: the file's bytes. size: (height, width) in pixels. origin: stores the pixels until they are first needed.
    """

    data: bytes = field(repr=False)
    size: tuple[int, int]
    digest: bytes
    origin: "DecodedFiles" = field(repr=False)

    @property
    def pixels(self) -> np.ndarray:
        """RGB values, uint8 [height, width, 3]: the stored ones, which are then dropped, else decoded again."""
        stored = self.origin.take(self.digest)
        return open_image(self.data).pixels if stored is None else stored


class DecodedFiles:
    """Sizes and digests of the last FILES files that were opened, and at most `limit` bytes of their pixels.

    Beyond either limit the least recently opened are dropped. Threads may share an object.
    """

    def __init__(self, limit: int = PIXELS):
        self.limit = limit
        self._files: OrderedDict[bytes, tuple[tuple[int, int], bytes]] = OrderedDict()
        self._pixels: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored pixels."""
        with self._lock:
            return sum(pixels.nbytes for pixels in self._pixels.values())

    def known(self, data: bytes) -> FileImage | None:
        """Return the picture of a file's bytes if they are among the stored files."""
        key = _key(data)
        with self._lock:
            if found := self._files.get(key):
                self._files.move_to_end(key)
                return FileImage(data, *found, self)
        return None

    def open(
        self, data: bytes, number: int = 1, limits: PictureLimits = LIMITS, check: Callable[[], None] = unchecked
    ) -> FileImage:
        """Return the picture of a file's bytes, which are decoded if they are not among the stored files.

        Raises ValueError as `open_image`, which has the same arguments.
        """
        if found := self.known(data):
            return found
        image, key = open_image(data, limits, number, check), _key(data)
        with self._lock:
            found = self._files[key] = image.size, image.digest
            self._pixels[image.digest] = image.pixels
            self._trim()
        return FileImage(data, *found, self)

    def take(self, digest: bytes) -> np.ndarray | None:
        """Return the stored pixels of the `Image` with this digest and drop them; None if they are not stored."""
        with self._lock:
            return self._pixels.pop(digest, None)

    def _trim(self) -> None:
        """Drop the oldest files and pixels beyond the limits."""
        while len(self._files) > FILES:
            self._files.popitem(last=False)
        size = sum(pixels.nbytes for pixels in self._pixels.values())
        while size > self.limit:
            size -= self._pixels.popitem(last=False)[1].nbytes


def _key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
