"""KV caches whose offset may be a device array, so that a rollback needs no host read.

Two modes, told apart by the type of `offset`. An `int` (prefill, plain decoding): slices are exact and masks
are `None` or "causal". An `mx.array` [1] (verifying): rows are written at a device position, the mask is built
from positions, and only `limit`, a host-side upper bound of the offset, decides how much of the buffer is read.
"""

import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

from .mlx_lm_caches import PlainCache
from .recurrent import RecurrentCache

Parts = tuple[mx.array, ...]

STEP = 256  # buffers grow, and views are cut, at multiples of this many rows
MAX_ROWS = 16  # most rows one verify or draft call may write into a ring


def round_up(n: int) -> int:
    """To a multiple of STEP."""
    return -(-n // STEP) * STEP


class LinearKVCache:
    """Keys and values of every position (and what else a layer keeps of each), in buffers that grow by an eighth.

    `start`: positions below it hold nothing (a draft head of depth j has no slot before position j).
    Implements mlx-lm's cache protocol; B = 1.
    """

    window: int | None = None
    keep = 0

    def __init__(self, start: int = 0):
        self.start = start
        self.offset: int | mx.array = 0
        self.limit = 0
        self.parts: Parts = ()
        self._reserved = 0

    # Storage: what a row's keys, values and perhaps more become, and how attention gets them back.
    def _encode(self, *rows: mx.array) -> Parts:
        return rows

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
        capacity = round_up(max(need, self._reserved, self.capacity * 9 // 8))
        blank = [mx.zeros((*p.shape[:2], capacity - self.capacity, p.shape[3]), p.dtype) for p in like]
        if self.parts:
            blank = [mx.concatenate([a, b], axis=2) for a, b in zip(self.parts, blank, strict=True)]
        self.parts = tuple(blank)

    def hold(self, rows: int) -> None:
        """Have room for `rows` positions now; what the cache holds has to have a form already."""
        self._grow(rows - self.limit, self.parts)

    def _write(self, new: Parts) -> None:
        if isinstance(self.offset, int):
            self._assign(self.offset, new)
        else:
            pairs = zip(self.parts, new, strict=True)
            self.parts = tuple(mx.slice_update(part, rows, self.offset, axes=[2]) for part, rows in pairs)

    def _assign(self, slot: int, new: Parts) -> None:
        """Store rows; through new handles, so that a handle somebody kept still means the old contents."""
        self.parts = tuple(copy.copy(part) for part in self.parts)
        for part, rows in zip(self.parts, new, strict=True):
            part[:, :, slot : slot + rows.shape[2]] = rows

    def _visible(self, rows: int) -> slice:
        """The slots attention reads once `rows` more are in."""
        if isinstance(self.offset, int):
            return slice(self.start, self.offset + rows)
        return slice(0, round_up(self.limit + rows))

    def update_and_fetch(self, *arrays: mx.array):
        """Append keys, values and what else a layer keeps, [B, H, L, D] each; return what the L rows attend to."""
        rows = arrays[0].shape[2]
        new = self._encode(*arrays)
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
        """Arguments of `make_cache` that make this cache, empty."""
        return {"window": None, "start": self.start}

    def used(self) -> Parts:
        """The buffers without rows that were never reached (whole STEPs); for saving."""
        return tuple(part[..., : round_up(self.limit), :] for part in self.parts)

    def to_quantized(self, bits: int, group_size: int) -> "LinearKVCache":
        """This cache's contents, quantized; positions stay."""
        window = getattr(self, "ring", None)
        quantized = make_cache(window, start=self.start, bits=bits, group_size=group_size)
        quantized.seek(self.offset, self.limit)
        if self.parts:
            quantized.parts = quantized._encode(*self.parts)
        return quantized


class Ring:
    """Geometry of a ring of `window` positions with room to take back two calls of MAX_ROWS rows.

    The first `keep` positions belong to every window, and stay in their slots; those behind them take turns. One
    object serves all layers of a model, so that what depends on the position alone is computed once per forward pass.
    """

    def __init__(self, window: int, keep: int = 0):
        self.window, self.keep = window, keep
        self.slots = window + 2 * MAX_ROWS
        self.turn = self.slots - keep
        self._last: tuple = (None, 0, None)

    def slot(self, position: int) -> int:
        """Where a position lives."""
        return min(position, self.keep + (position - self.keep) % self.turn)

    def index(self, offset: mx.array, rows: int) -> mx.array:
        """Slots [1, 1, rows, 1] of the rows at a device-side offset."""
        if self._last[0] is not offset or self._last[1] != rows:
            positions = offset + mx.arange(rows)
            index = self.keep + (positions - self.keep) % self.turn if self.keep else positions % self.slots
            index = mx.minimum(positions, index) if self.keep else index
            self._last = (offset, rows, index.reshape(1, 1, rows, 1))
        return self._last[2]

    def mask(self, offset: mx.array, rows: int, visible: int, start: int) -> mx.array:
        """Boolean [rows, visible]: which slots each of the rows, once written, may attend to."""
        queries, slots = offset + mx.arange(rows)[:, None], mx.arange(visible)[None]
        last = offset + (rows - 1)
        # The newest position that maps to each slot; negative where none was written yet.
        positions = last - (last - slots) % self.turn
        if self.keep:
            positions = mx.where(slots < self.keep, slots, mx.where(positions < self.keep, -1, positions))
        return self.seen(positions, queries) & (positions >= mx.minimum(start, queries))

    def seen(self, positions: mx.array, queries: mx.array) -> mx.array:
        """Boolean: whether the queries' windows have the positions."""
        near = positions > queries - (self.window - self.keep)
        return (positions <= queries) & (near | (positions < self.keep) if self.keep else near)

    def mask_of_one(self, positions: range, visible: int) -> mx.array:
        """`mask` [1, visible] for one row that may attend to `positions`, and to the kept ones; made on the host."""
        mask = np.zeros((1, visible), bool)
        mask[:, : self.keep] = True
        mask[:, self.keep + (np.arange(positions.start, positions.stop) - self.keep) % self.turn] = True
        return mx.array(mask)


class SlidingKVCache(LinearKVCache):
    """A ring of the last positions. Masks come from positions, so a row's arithmetic depends neither on when the
    ring wrapped nor on rejected rows: those are overwritten before any query's window can reach their slots.
    """

    def __init__(self, ring: Ring, start: int = 0):
        super().__init__(start)
        self.ring = ring

    @property
    def window(self) -> int:
        return self.ring.window

    @property
    def keep(self) -> int:
        return self.ring.keep

    @property
    def config(self) -> dict:
        return {"window": self.window, "keep": self.keep, "start": self.start}

    def _grow(self, rows: int, like: Parts) -> None:
        if not self.parts:
            self.parts = tuple(mx.zeros((*p.shape[:2], self.ring.slots, p.shape[3]), p.dtype) for p in like)

    def _write(self, new: Parts) -> None:
        ring, rows = self.ring, new[0].shape[2]
        if not isinstance(self.offset, int):
            index = ring.index(self.offset, rows)
            pairs = zip(self.parts, new, strict=True)
            self.parts = tuple(
                mx.put_along_axis(part, mx.broadcast_to(index, r.shape), r, axis=2) for part, r in pairs
            )
            return
        done = min(rows, max(0, ring.keep - self.offset))
        if done:
            self._assign(self.offset, tuple(r[:, :, :done] for r in new))
        done = max(done, rows - ring.turn)
        while done < rows:
            slot = ring.slot(self.offset + done)
            block = slice(done, done + min(rows - done, ring.slots - slot))
            self._assign(slot, tuple(r[:, :, block] for r in new))
            done = block.stop

    def _visible(self, rows: int) -> slice:
        if isinstance(self.offset, int) and self.offset < self.window:
            return slice(min(self.start, self.offset), self.offset + rows)
        return slice(0, min(self.ring.slots, round_up(self.limit + rows)))

    def used(self) -> Parts:
        """All of it: a ring does not grow."""
        return self.parts

    def _past(self) -> range:
        """The positions, before its own, that the next row's window reaches back to; kept ones are not among them."""
        first = max(self.offset - (self.window - self.keep) + 1, self.keep, self.start)
        return range(min(first, self.offset), self.offset)

    def _kept(self) -> range:
        return range(min(self.keep, self.offset))

    def update_and_fetch(self, *arrays: mx.array):
        rows = arrays[0].shape[2]
        if not isinstance(self.offset, int) or rows == 1:
            assert rows <= MAX_ROWS, "more rows than a ring can take back"
            return super().update_and_fetch(*arrays)
        # Prefill: attend to the past in order, then the chunk, of which the ring may keep only the end.
        new = self._encode(*arrays)
        self._grow(rows, new)
        slots = mx.array([self.ring.slot(p) for p in (*self._kept(), *self._past())], mx.int32)
        past = [mx.take(part, slots, axis=2) for part in self.parts]
        self._write(new)
        self.offset += rows
        self.limit += rows
        return self._decode(tuple(mx.concatenate([a, b], axis=2) for a, b in zip(past, new, strict=True)))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if not isinstance(self.offset, int):
            return self.ring.mask(self.offset, N, self._visible(N).stop, self.start)
        if N > 1 and self.keep:
            positions = mx.array([*self._kept(), *self._past(), *range(self.offset, self.offset + N)])
            return self.ring.seen(positions, mx.arange(self.offset, self.offset + N)[:, None])
        if N > 1:
            return create_causal_mask(N, len(self._past()), window_size=self.window)
        if self.offset < self.window:
            return None  # the view holds exactly the row's window
        return self.ring.mask_of_one(range(self._past().start, self.offset + 1), self._visible(1).stop)


class _Quantized:
    """Storage as packed integers, read directly by mlx-lm's quantized attention (which looks for `bits`)."""

    bits: int
    group_size: int

    def _encode(self, *rows):
        return tuple(q for x in rows for q in mx.quantize(x, group_size=self.group_size, bits=self.bits))

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

    def __init__(self, group_size: int, bits: int, ring: Ring, start: int = 0):
        super().__init__(ring, start)
        self.group_size, self.bits = group_size, bits


def make_cache(
    window: int | str | Ring | None,
    *,
    start: int = 0,
    keep: int = 0,
    bits: int | None = None,
    group_size: int = 64,
    **saved: Any,
) -> Any:
    """The cache for one layer: a state, or keys and values: a ring where there is a window, quantized with `bits`.

    `keep`: the first positions that a ring holds for ever. `saved`: what else a cache's `config` holds.
    """
    if window == RecurrentCache.window:
        return RecurrentCache()
    if window == PlainCache.window:
        return PlainCache(**saved)
    if window is None:
        return LinearKVCache(start) if bits is None else QuantizedLinearKVCache(group_size, bits, start)
    ring = window if isinstance(window, Ring) else Ring(int(window), keep)
    if bits is None:
        return SlidingKVCache(ring, start)
    return QuantizedSlidingKVCache(group_size, bits, ring, start)


def make_caches(windows: list[int | str | Ring | None], *, starts: list[int], **quantization) -> list:
    """One cache per layer; layers of the same window share one Ring."""
    rings: dict[Any, Ring] = {window: Ring(window) for window in windows if isinstance(window, int)}
    pairs = zip(windows, starts, strict=True)
    return [make_cache(rings.get(window, window), start=start, **quantization) for window, start in pairs]


def make_saved(configs: list[dict]) -> list:
    """Empty caches of these `config`s; those of the same window share one Ring."""
    rings: dict[tuple[int, int], Ring] = {}
    caches = []
    for config in configs:
        window, keep = config["window"], config.get("keep", 0)
        if isinstance(window, int):
            window = rings.setdefault((window, keep), Ring(window, keep))
        caches.append(make_cache(**{**config, "window": window}))
    return caches
