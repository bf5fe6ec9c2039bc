"""Store the caches of several sequences in slots of one buffer per layer, so that one attention serves them all.

A sequence keeps its slot while others join and leave. A pass uses the n slots of a `Span`; rows are written, and
masks made, by each sequence's own position, int32 [n] on the device.
"""

import copy
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from .arrays import StateCache
from .convolution import ConvolutionCache
from .growing import LinearKVCache, QuantizedLinearKVCache, QuantizedStorage, round_up
from .layer_cache import LayerCache, OncePerPass, Parts
from .recurrent import RecurrentCache
from .ring import QuantizedSlidingKVCache, Ring, SlidingKVCache

GRAIN = 32  # sizes of the buffers' views are multiples of this number of rows


class Span:
    """A strided range of slots used in one pass; it includes free slots between used ones, whose results are ignored.

    slots: their numbers, also as `slots_array`, int32 [n] on the device. fill: for each of all `count` slots the row
    of the pass whose keys are written to it, int32 [count]; free slots take any row's. None if the pass uses all
    slots.
    """

    def __init__(self, taken: Collection[int], count: int):
        first, last = min(taken), max(taken)
        step = math.gcd(*(slot - first for slot in taken)) or 1
        self.slots, self.count = range(first, last + 1, step), count
        self.view, self.slots_array = slice(first, last + 1, step), mx.array(list(self.slots))
        rows = {slot: row for row, slot in enumerate(self.slots)}
        self.fill = None if len(rows) == count else mx.array([rows.get(slot, 0) for slot in range(count)])
        self._last: dict[Ring | None, tuple] = {}

    def index(self, ring: Ring | None, offset: mx.array, rows: int) -> mx.array:
        """Return where the next rows of each of the `count` slots are written, [count, 1, rows, 1].

        These are slots of the ring; without a ring, positions. offset: position of each row of the pass; a free slot
        takes any row's position. The last result per ring is kept, for the other layers of the pass.
        """
        last = self._last.get(ring)
        if last is None or last[0] is not offset or last[1] != rows:
            where = (offset if self.fill is None else mx.take(offset, self.fill))[:, None]
            found = ring.index(where, rows) if ring else (where + mx.arange(rows)).reshape(-1, 1, rows, 1)
            last = self._last[ring] = offset, rows, found
        return last[2]


class PooledKV(LayerCache):
    """Keys, values and any other rows of one layer and several sequences: [slots, H, S, D] each.

    offset: int32 [n] of the n sequences in a pass. limit: upper bound of all offsets. starts: each sequence's first
    position with contents; start: the same as an array [n, 1, 1, 1], or 0 for all. span: the slots of the pass. ring:
    the geometry of a window, None if all positions are kept.
    """

    def __init__(self, ring: Ring | None = None):
        self.ring, self.window, self.keep = ring, ring and ring.window, ring.keep if ring else 0
        self.limit, self.starts = 0, []
        self.parts: Parts = ()
        self.offset: Any = None
        self.start: Any = 0
        self.span = Span([0], 1)
        self.once = OncePerPass()

    @property
    def capacity(self) -> int:
        return self.parts[0].shape[2] if self.parts else 0

    def hold(self, rows: int, like: Parts = ()) -> None:
        """Grow the buffers, by a copy, to at least `rows` positions (a ring: its size) and the span's `count` slots.

        like: arrays [.., H, .., D] of the same form, for buffers that are empty.
        """
        have, capacity = (self.parts[0].shape[0], self.capacity) if self.parts else (0, 0)
        if self.ring:
            rows = self.ring.slots
        elif rows > capacity:
            rows = round_up(max(rows, capacity * 9 // 8))
        slots, rows = max(self.span.count, have), max(rows, capacity)
        if (slots, rows) == (have, capacity):
            return
        blank = [mx.zeros((slots, part.shape[1], rows, part.shape[3]), part.dtype) for part in self.parts or like]
        for new, old in zip(blank, self.parts, strict=False):
            new[:have, :, :capacity] = old
        self.parts = tuple(blank)

    @property
    def places(self) -> int:
        return 0 if self.ring else self.capacity // GRAIN * GRAIN

    def regroup(self, span: Span, order: Sequence[int], newcomers: Sequence[tuple[int, Any, int]]) -> None:
        """Change the sequences of the next pass, and copy newcomers' keys and values to their slots.

        order: for each slot of the span, the row of its sequence in the last pass; for a newcomer, the number of
        these rows plus its index in `newcomers`. newcomers: (slot, cache, number of the cache's positions) of each;
        from a cache without arrays nothing is copied.
        """
        self.flush()
        self.span = span
        starts = [*self.starts, *(cache.start for _, cache, _ in newcomers)]
        self.starts = [starts[row] for row in order]
        self.start = mx.array(self.starts).reshape(-1, 1, 1, 1) if any(self.starts) else 0
        for slot, cache, rows in newcomers:
            if cache.parts:
                self.hold(rows, cache.parts)
                self._copy_in(slot, cache.parts, min(self.ring.slots, rows) if self.ring else rows)
        if self.parts:
            self.hold(0)

    def _copy_in(self, slot: int, parts: Parts, rows: int) -> None:
        """Copy the first rows of a sequence's keys and values to a slot."""
        self.parts = tuple([copy.copy(buffer) for buffer in self.parts])  # marks may refer to the old contents
        for buffer, part in zip(self.parts, parts, strict=True):
            buffer[slot : slot + 1, :, :rows] = part[:, :, :rows]

    def copied(self, buffers: Parts, slot: int, rows: int) -> Parts:
        """Return a copy of one slot of `buffers`: its first `rows` positions, or a whole ring; () for 0 rows.

        The number of positions is rounded up to a multiple of STEP.
        """
        end = None if self.ring else round_up(rows)
        return () if rows == 0 else tuple(mx.contiguous(part[slot : slot + 1, :, :end]) for part in buffers)

    def _visible(self, rows: int) -> int:
        """Return the number of places on axis S that attention reads once `rows` more rows are written."""
        end = -(-(self.limit + rows) // GRAIN) * GRAIN
        return min(end, self.ring.slots) if self.ring else end

    def update_and_fetch(self, *arrays: mx.array):
        """Append L rows to n sequences, arrays [n, H, L, D]; return the arrays that they attend to, [n, H, S, D].

        The n sequences are those of the span, free slots included. Quantized arrays are returned as two tuples.
        """
        rows = arrays[0].shape[2]
        self.flush()
        new = self._encode(*arrays)
        if self.limit + rows > self.capacity:
            self.hold(self.limit + rows, new)
        self._write(new)
        view, end = self.span.view, self._visible(rows)
        self.offset = self.once(operator.add, self.offset, rows)
        self.limit += rows
        return self._shared(self._decode(tuple([part[view, :, :end] for part in self.parts])))

    def _write(self, new: Parts) -> None:
        index, fill = self.span.index(self.ring, self.offset, new[0].shape[2]), self.span.fill
        if fill is not None:
            new = tuple([mx.take(part, fill, axis=0) for part in new])
        pairs = zip(self.parts, new, strict=True)
        self.parts = tuple([mx.put_along_axis(part, index, r, axis=2) for part, r in pairs])

    flush, write_at = LinearKVCache.flush, LinearKVCache.write_at

    def before(self, rows: int) -> Parts:
        """Return what `rows` rows at the next positions attend to, themselves not yet written: [n, H, S, D] each."""
        self.flush()
        self.hold(self.limit + rows)
        return tuple([part[self.span.view, :, : self.seen(rows)] for part in self.parts])

    def seen(self, rows: int) -> int:
        """Return the number of places of the buffers that `rows` more rows attend to."""
        return self._visible(rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask of each sequence's next N rows, boolean [n, 1, N, S] for the S that attention reads."""
        offset, end = self.offset[:, None, None, None], self._visible(N)
        if self.ring:
            return self.ring.mask(offset, N, end, self.start)
        queries, slots = offset + mx.arange(N)[:, None], mx.arange(end)
        seen = slots <= queries
        return seen if isinstance(self.start, int) else seen & (slots >= mx.minimum(self.start, queries))


class QuantizedPooledKV(QuantizedStorage, PooledKV):
    """PooledKV with `bits`-bit keys and values."""


class PooledState(RecurrentCache):
    """Recurrent states of n sequences and the tape of their last verify: `RecurrentCache` with n rows per array."""

    def __init__(self):
        super().__init__()
        self.offset: Any = None

    def convolved(self, rows: mx.array, taps: int) -> mx.array:
        before, accepted = self.parts[2], self.accepted
        if accepted is not None:
            before = mx.take_along_axis(before, self.once(_positions_from, accepted, taps - 1), axis=1)
        return mx.concatenate([before, rows], axis=1)

    def regroup(self, index: mx.array, newcomers: Sequence[Any]) -> None:
        """Change the sequences of the next pass; newcomers: the RecurrentCaches of those that join.

        index: for each row of the next pass its row in the last pass, or from the row count on a newcomer.
        Tapes are padded to one length with rows that are not accepted. Newcomers need a state if others have one.
        """
        every = [parts for parts in (self.parts, *(cache.parts for cache in newcomers)) if parts]
        tape = max((parts[3].shape[1] for parts in every if len(parts) > 3), default=0)
        like = next((parts[3:] for parts in every if len(parts) > 3), ())
        rows = [_with_tape(parts, tape, like) for parts in every]
        self.parts = tuple([gather(parts[0], parts[1:], index) for parts in zip(*rows, strict=True)])

    def copied(self, parts: Parts, row: int) -> Parts:
        """Return a copy of one sequence's row of `parts`."""
        return tuple(mx.contiguous(part[row : row + 1]) for part in parts)


class PooledArrays(StateCache):
    """The arrays of n sequences: `StateCache` with n rows per array."""

    def __init__(self, count: int):
        super().__init__(count)
        self.offset: Any = None

    def regroup(self, index: mx.array, newcomers: Sequence[Any]) -> None:
        """Change the sequences of the next pass, none of which has rejected rows; arguments: as in `PooledState`."""
        every = [cache.newest for cache in (self, *newcomers) if cache.parts]
        if len({tuple(part.shape[1:] for part in parts) for parts in every}) > 1:
            raise ValueError("its layers' states have a size that depends on the length of a text")
        self.parts = tuple([gather(parts[0], parts[1:], index) for parts in zip(*every, strict=True)])

    copied: Any = PooledState.copied

    def choose(self, chosen: mx.array, other: Parts) -> None:
        """Replace the arrays of the sequences that are not `chosen`, bool [n], by those of `other`."""
        pairs = zip(self.newest, other, strict=True)
        self.parts = tuple([mx.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs])


class PooledConvolution(ConvolutionCache, PooledState):
    """The input rows of one layer's convolution of n sequences."""


def _positions_from(start: mx.array, rows: int) -> mx.array:
    """Return the positions [n, rows, 1] of `rows` rows from each of `start`, int32 [n]."""
    return (start[:, None] + mx.arange(rows))[:, :, None]


def _with_tape(parts: Parts, rows: int, like: Parts) -> Parts:
    """Return a state's parts with the tape padded to `rows` rows; the added ones are not accepted.

    like: the arrays of another state's tape, for parts without one.
    """
    position, state, convolved, *tape = parts
    missing = rows - (tape[0].shape[1] if tape else 0)
    if missing == 0:
        return parts
    tape = tape or [mx.zeros((len(position), 0, *array.shape[2:]), array.dtype) for array in like]
    longer = (mx.pad(a, [(0, 0), (0, missing), *[(0, 0)] * (a.ndim - 2)]) for a in (convolved, *tape))
    return position, state, *longer


def gather(old: mx.array | None, new: Sequence[mx.array], index: mx.array) -> mx.array:
    """Concatenate old [n, ...], which may be None, and new arrays [1, ...]; return the result's rows at `index`."""
    rows = [*([] if old is None else [old]), *new]
    return mx.take(mx.concatenate(rows) if len(rows) > 1 else rows[0], index, axis=0)


POOLS: dict[type[Any], type[Any]] = {
    LinearKVCache: PooledKV,
    SlidingKVCache: PooledKV,
    QuantizedLinearKVCache: QuantizedPooledKV,
    QuantizedSlidingKVCache: QuantizedPooledKV,
    RecurrentCache: PooledState,
    StateCache: PooledArrays,
    ConvolutionCache: PooledConvolution,
}


def pooled(cache: Any, ring: Ring | None) -> Any:
    """Return the empty pool of one layer, for sequences whose caches have the class and format of `cache`, or a pool.

    ring: the Ring that the layers of these caches share, None without a window. Raises ValueError for a kind of cache
    that no pool can hold.
    """
    pool = type(cache) if type(cache) in POOLS.values() else POOLS.get(type(cache))
    if pool is None:
        supported = ", ".join(kind.__name__ for kind in POOLS)
        raise ValueError(f"{type(cache).__name__}: no pool holds this kind of cache; supported are {supported}")
    if pool is PooledArrays:
        return pool(cache.count)
    if cache.is_state:
        return pool()
    return pool(cache.group_size, cache.bits, ring) if pool is QuantizedPooledKV else pool(ring)
