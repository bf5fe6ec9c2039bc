"""Store the features of encoded pictures, the output of a vision tower, up to a number of bytes."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx

LIMIT = 512_000_000  # bytes, by default


class Features:
    """Features [rows, H] by key; beyond `limit` bytes in all the least recently used unpinned ones are dropped."""

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self._stored: OrderedDict[Hashable, mx.array] = OrderedDict()
        self._pins: Counter[Hashable] = Counter()

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
        """Store features, and drop the least recently used unpinned ones beyond `limit` bytes in all.

        Unpinned features that alone have more bytes are dropped at once.
        """
        self._stored[key] = rows
        self._stored.move_to_end(key)
        self._trim()

    @contextmanager
    def pinned(self, keys: Iterable[Hashable]) -> Iterator[None]:
        """Pin these keys until the `with` block ends: their features, stored before or inside it, are not dropped.

        Blocks may overlap; a key is pinned until the last block with it ends.
        """
        keys = list(keys)
        self._pins.update(keys)
        try:
            yield
        finally:
            self._pins.subtract(keys)
            self._pins = +self._pins
            self._trim()

    def _trim(self) -> None:
        """Drop the least recently used unpinned features while the stored ones have more than `limit` bytes."""
        size = self.nbytes
        for key in [key for key in self._stored if key not in self._pins]:
            if size <= self.limit:
                return
            size -= self._stored.pop(key).nbytes
