"""KV caches whose offset may be a device array, so that a rollback needs no host read.

Two modes, told apart by the type of `offset`. An `int` (prefill, plain decoding): slices are exact and masks
are `None` or "causal". An `mx.array` (verifying): rows are written at a device position, the mask is built from
positions, and only `limit`, a host-side upper bound of the offset, decides how much of the buffer is read.
"""

import copy

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

Parts = tuple[mx.array, ...]

STEP = 256  # buffers grow, and views are cut, at multiples of this many rows
MAX_ROWS = 16  # most rows one verify or draft call may write into a ring


def _round_up(n: int) -> int:
    return -(-n // STEP) * STEP


class LinearKVCache:
    """Keys and values of every position, in one buffer that grows by an eighth.

    `start`: positions below it hold nothing (a draft head of depth j has no slot before position j).
    Implements mlx-lm's cache protocol; B = 1.
    """

    def __init__(self, start: int = 0):
        self.start = start
        self.offset: int | mx.array = 0
        self.limit = 0
        self.parts: Parts = ()
        self._reserved = 0

    # Storage: what one K/V pair becomes, and how attention gets it back.
    def _encode(self, keys: mx.array, values: mx.array) -> Parts:
        return keys, values

    def _decode(self, parts: Parts):
        return parts

    def reserve(self, rows: int) -> None:
        """Make the next growth reach `rows` at once, where a longer run is known to come."""
        self._reserved = rows

    @property
    def capacity(self) -> int:
        return self.parts[0].shape[2] if self.parts else 0

    def _grow(self, rows: int, like: Parts) -> None:
        """Make room for `rows` more; copies only when the capacity changes."""
        need = self.limit + rows
        if need <= self.capacity:
            return
        capacity = _round_up(max(need, self._reserved, self.capacity * 9 // 8))
        blank = [mx.zeros((*p.shape[:2], capacity - self.capacity, p.shape[3]), p.dtype) for p in like]
        if self.parts:
            blank = [mx.concatenate(pair, axis=2) for pair in zip(self.parts, blank, strict=True)]
        self.parts = tuple(blank)

    def _write(self, new: Parts) -> None:
        if isinstance(self.offset, int):
            self._assign(slice(self.offset, self.offset + new[0].shape[2]), new)
        else:
            at = self.offset.reshape(1)
            self.parts = tuple(
                mx.slice_update(part, rows, at, axes=[2]) for part, rows in zip(self.parts, new, strict=True)
            )

    def _assign(self, slots: slice | mx.array, new: Parts) -> None:
        """Store rows; through new handles, so that a handle somebody kept still means the old contents."""
        self.parts = tuple(copy.copy(part) for part in self.parts)
        for part, rows in zip(self.parts, new, strict=True):
            part[..., slots, :] = rows

    def _visible(self, rows: int) -> slice:
        """The slots attention reads once `rows` more are in."""
        if isinstance(self.offset, int):
            return slice(self.start, self.offset + rows)
        return slice(0, _round_up(self.limit + rows))

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Append keys, values [B, H, L, D] at `offset`; return what the L rows attend to."""
        rows = keys.shape[2]
        new = self._encode(keys, values)
        self._grow(rows, new)
        self._write(new)
        view = self._visible(rows)
        self.offset = self.offset + rows
        self.limit += rows
        return self._decode(tuple(part[..., view, :] for part in self.parts))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Mask for the next N rows: None, "causal" or a boolean [N, visible slots]."""
        if isinstance(self.offset, int):
            if N == 1:
                return None
            return create_causal_mask(N, self.offset - self.start) if return_array else "causal"
        queries = self.offset + mx.arange(N)[:, None]
        slots = mx.arange(self._visible(N).stop)[None]
        # A row before `start` is never read; it sees itself so that its softmax is defined.
        return (slots <= queries) & (slots >= mx.minimum(self.start, queries))

    def rollback(self, n: int | mx.array) -> None:
        """Forget the last n positions; n may be on the device (`limit` then stays an upper bound)."""
        self.offset = self.offset - n
        if isinstance(self.offset, int):
            self.limit = self.offset

    def seek(self, offset: int | mx.array, limit: int) -> None:
        """Set the position outright; `limit` is its upper bound on the host."""
        self.offset, self.limit = offset, limit

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def config(self) -> dict:
        """Arguments of `make_kv_cache` that make this cache, empty."""
        return {"window": None, "start": self.start}

    def used(self) -> Parts:
        """The buffers without rows that were never reached (whole STEPs); for saving."""
        return tuple(part[..., : _round_up(self.limit), :] for part in self.parts)

    def to_quantized(self, bits: int, group_size: int) -> "LinearKVCache":
        """This cache's contents, quantized; positions stay."""
        quantized = make_kv_cache(**{**self.config, "bits": bits, "group_size": group_size})
        quantized.seek(self.offset, self.limit)
        if self.parts:
            quantized.parts = quantized._encode(*self.parts)
        return quantized


class SlidingKVCache(LinearKVCache):
    """A ring of the last `window` positions, with room to take back two cycles of rows.

    Position p lives in slot p mod capacity and masks come from positions, so a row's arithmetic depends neither
    on when the ring wrapped nor on rows that were rejected: those are overwritten before any query can reach
    them. That holds while one call writes at most MAX_ROWS rows and at most two calls are taken back.
    """

    def __init__(self, window: int, start: int = 0):
        super().__init__(start)
        self.window = window
        self.slots = window + 2 * MAX_ROWS

    @property
    def config(self) -> dict:
        return {"window": self.window, "start": self.start}

    def _grow(self, rows: int, like: Parts) -> None:
        if not self.parts:
            self.parts = tuple(mx.zeros((*p.shape[:2], self.slots, p.shape[3]), p.dtype) for p in like)

    def _write(self, new: Parts) -> None:
        rows = new[0].shape[2]
        kept = min(rows, self.slots)
        slots = (self.offset + (rows - kept) + mx.arange(kept)) % self.slots
        self._assign(slots, tuple(block[..., rows - kept :, :] for block in new))

    def _visible(self, rows: int) -> slice:
        return slice(0, min(self.slots, _round_up(self.limit + rows)))

    def _tail(self) -> mx.array:
        """Slots of the positions that the next row's window reaches back to, oldest first."""
        first = max(self.offset - self.window + 1, min(self.start, self.offset))
        return mx.arange(first, self.offset) % self.slots

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        rows = keys.shape[2]
        if rows <= MAX_ROWS:
            return super().update_and_fetch(keys, values)
        assert isinstance(self.offset, int), "more rows than a ring can take back"
        new, tail = self._encode(keys, values), self._tail()
        self._grow(rows, new)
        past = [mx.take(part, tail, axis=2) for part in self.parts]
        self._write(new)
        self.offset += rows
        self.limit += rows
        return self._decode(tuple(mx.concatenate(pair, axis=2) for pair in zip(past, new, strict=True)))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if N > MAX_ROWS:
            return create_causal_mask(N, self._tail().size, window_size=self.window)
        xp = np if isinstance(self.offset, int) else mx
        queries = self.offset + xp.arange(N)[:, None]
        last = self.offset + (N - 1)
        # The newest position that maps to each slot; negative where none was written yet.
        positions = (last - (last - xp.arange(self._visible(N).stop)) % self.slots)[None]
        mask = (positions <= queries) & (positions > queries - self.window)
        mask = mask & (positions >= xp.minimum(self.start, queries))
        return mx.array(mask)


class _Quantized:
    """Storage as packed integers, read directly by mlx-lm's quantized attention (which looks for `bits`)."""

    bits: int
    group_size: int

    def _encode(self, keys, values):
        quantize = {"group_size": self.group_size, "bits": self.bits}
        return (*mx.quantize(keys, **quantize), *mx.quantize(values, **quantize))

    def _decode(self, parts):
        return parts[:3], parts[3:]

    @property
    def config(self) -> dict:
        own = {"group_size": self.group_size, "bits": self.bits}
        return {**super().config, **own}  # type: ignore[misc]


class QuantizedLinearKVCache(_Quantized, LinearKVCache):
    """LinearKVCache with `bits`-bit keys and values."""

    def __init__(self, group_size: int, bits: int, start: int = 0):
        super().__init__(start)
        self.group_size, self.bits = group_size, bits


class QuantizedSlidingKVCache(_Quantized, SlidingKVCache):
    """SlidingKVCache with `bits`-bit keys and values."""

    def __init__(self, group_size: int, bits: int, window: int, start: int = 0):
        super().__init__(window, start)
        self.group_size, self.bits = group_size, bits


def make_kv_cache(window: int | None, *, start: int = 0, bits: int | None = None, group_size: int = 64):
    """The cache for one attention layer: a ring where there is a window, quantized where `bits` is given."""
    if window is None:
        return LinearKVCache(start) if bits is None else QuantizedLinearKVCache(group_size, bits, start)
    if bits is None:
        return SlidingKVCache(window, start)
    return QuantizedSlidingKVCache(group_size, bits, window, start)
