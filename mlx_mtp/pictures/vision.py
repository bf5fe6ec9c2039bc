"""Encode the pictures of prompts for one model, and store their features."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..machine.memory import check_room
from .decoded import FileImage
from .image import LIMITS, Image, PictureLimits
from .rows import Picture

Grid = tuple[int, int, int]
PREPARING = ThreadPoolExecutor(1, "mlx-mtp pictures")  # one picture at once: one of 16 million pixels needs 1 GB
WAIT = 0.002  # seconds for which `stages` waits for patches before it yields

LIMIT = 512_000_000  # bytes, by default


class Features:
    """Features [rows, H] by key; beyond `limit` bytes in all the least recently used ones are dropped."""

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self._stored: OrderedDict[Hashable, mx.array] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored features."""
        return sum(rows.nbytes for rows in self._stored.values())

    def get(self, key: Hashable) -> mx.array | None:
        """Return the features of a key, which become the most recently used ones; None if they are not stored."""
        if key in self._stored:
            self._stored.move_to_end(key)
        return self._stored.get(key)

    def put(self, key: Hashable, rows: mx.array) -> None:
        """Store features, and drop the least recently used ones beyond `limit` bytes in all, also these alone."""
        self._stored[key] = rows
        self._stored.move_to_end(key)
        size = self.nbytes
        while size > self.limit:
            size -= self._stored.popitem(last=False)[1].nbytes


class Tower(Protocol):
    """The module that encodes pictures (`models.vision`).

    scratch: returns the bytes of memory that encoding a picture needs besides the weights. stages: encodes patches,
    and yields after each part of the work; the last array is the features [rows, H].
    """

    def scratch(self, grid: Grid) -> int: ...

    def stages(self, patches: Any, grid: Grid) -> Iterator[mx.array]: ...


class Pixels(Protocol):
    """The preparation of pictures for a tower (`models.vision`).

    grid: as `Vision.grid`. patches: returns the input of `Tower.stages` for RGB values, uint8 [height, width, 3].
    """

    def grid(self, height: int, width: int, most: int | None = None) -> Grid: ...

    def patches(self, pixels: np.ndarray, grid: Grid) -> Any: ...


class Vision:
    """A model's vision tower with the features that it has computed; its weights are read at the first encoding.

    mark: the token that stands for a picture in a rendered chat template. written: all tokens that the template
    writes for a picture, of which the mark is one. limits: of pictures, for `open_image`. nbytes: bytes of the
    tower's weights. summary: the tower in words, for the report.
    """

    def __init__(
        self,
        mark: int,
        nbytes: int,
        summary: str,
        *,
        open_pixels: Callable[[], Pixels],
        read: Callable[[], Tower],
        fingerprint: Callable[[], str],
        written: tuple[int, ...] = (),
        limits: PictureLimits = LIMITS,
        stored: int = LIMIT,
    ):
        """Read nothing: `open_pixels`, `read` and `fingerprint` are each called once, when first needed.

        stored: maximum bytes of features that are kept. Other arguments: see the class.
        """
        self.mark, self.nbytes, self.summary, self.limits = mark, nbytes, summary, limits
        self.written = written or (mark,)
        self._open_pixels, self._read, self._fingerprint = open_pixels, read, fingerprint
        self._store = Features(stored)

    @cached_property
    def _pixels(self) -> Pixels:
        return self._open_pixels()

    @cached_property
    def _tower(self) -> Tower:
        return self._read()

    @cached_property
    def fingerprint(self) -> str:
        """A digest, as text, of the tower and its image processor's settings, which determine features."""
        return self._fingerprint()

    @property
    def is_read(self) -> bool:
        """Whether the tower's weights are in memory."""
        return "_tower" in vars(self)

    def grid(self, height: int, width: int, most: int | None = None) -> Grid:
        """Return (1, h, w), where h * w is the number of tokens of a picture with this size in pixels.

        most: maximum number of pixels after resizing, if that is less than the processor's own; a tower whose
        smallest size has more pixels uses that size.
        """
        return self._pixels.grid(height, width, most)

    def picture(self, image: Image | FileImage, most: int | None = None) -> Picture:
        """Return the `Picture` of an opened image, which is not encoded. most: as in `grid`."""
        digest = hashlib.blake2b(image.digest + self.fingerprint.encode(), digest_size=32).digest()
        return Picture(digest, self.grid(*image.size, most), image)

    def stored(self, picture: Picture) -> mx.array | None:
        """Return the features [rows, H] of a picture if they are stored, else None."""
        return self._store.get(picture)

    def features(self, picture: Picture) -> mx.array:
        """Return the features [rows, H] of a picture: stored ones, else those of `stages`, with its ValueErrors."""
        rows = self.stored(picture)
        if rows is None:
            for rows in self.stages(picture):  # noqa: B007 - the last
                pass
        assert rows is not None
        return rows

    def stages(self, picture: Picture) -> Iterator[mx.array | None]:
        """Encode a picture, and yield an evaluated array after each part of the work; the last is its features.

        The image is decoded and cut into patches in another thread, for seconds if it has many pixels. Until the
        patches are ready, None is yielded every WAIT seconds, so that the caller can do other work in between. The
        features are stored when the iterator ends. ValueError if the picture has no image, for damaged weights, and
        if memory is too small.
        """
        if picture.image is None:
            raise ValueError("a picture's features are no longer stored, and its image is not there; give it again")
        _, height, width = picture.grid
        check_room(f"a picture of {width} x {height} rows:", self._tower.scratch(picture.grid), ignore=False)
        prepared = PREPARING.submit(self._patches, picture)
        try:
            while not wait([prepared], WAIT).done:
                yield None
        finally:
            prepared.cancel()
        for rows in self._tower.stages(prepared.result(), picture.grid):
            mx.eval(rows)
            yield rows
        assert rows.shape[0] == picture.rows, (rows.shape, picture.grid)
        self._store.put(Picture(picture.digest, picture.grid), rows)

    def _patches(self, picture: Picture) -> Any:
        return self._pixels.patches(picture.image.pixels, picture.grid)

    def keep_at_most(self, nbytes: int) -> None:
        """Set the maximum bytes of stored features; it applies from the next features stored on."""
        self._store.limit = nbytes


def vision_of(model: Any) -> Vision:
    """Return a model's `Vision`; ValueError, with the reason, if the model reads no pictures."""
    if model.vision is None:
        raise ValueError(model.runtime.blind)
    return model.vision
