"""Store keys and values of the last positions in a ring; masks do not depend on when it wrapped."""

from functools import cached_property

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

from .growing import LinearKVCache, QuantizedStorage, round_up
from .layer_cache import Parts

MAX_ROWS = 16  # maximum rows of a verify
# Maximum rows of one call: MTP heads read a verify's rows and up to eight drafts (see `Ring`)
CALL_ROWS = MAX_ROWS + 8


class Ring:
    """Geometry of a ring: keys and values of `window` positions in `window + 2 * MAX_ROWS` slots.

    The first `keep` of the window's positions are never overwritten; later positions share the other slots in turn.
    Layers of a sequence with the same window share one, so that a pass computes functions of the position once.

    A rollback only lowers the position: rejected rows stay until they are overwritten. Such a row, at position p, has
    replaced the position one turn of the ring earlier, and a mask takes it for that one, which is outside the window
    of a query at q if p <= q + 2 * MAX_ROWS. This always holds. A generation can stop at the first row of a verify
    after that verify and the next have written MAX_ROWS rows each. Drafters read a verify's rows one cycle later, so
    only one of their steps is rolled back: CALL_ROWS rows of MTP heads, at most 2 * MAX_ROWS of other drafters.
    """

    def __init__(self, window: int, keep: int = 0):
        self.window, self.keep = window, keep
        self.slots = window + 2 * MAX_ROWS
        self.turn = self.slots - keep
        self._last: tuple = (None, 0, None)

    @cached_property
    def _band(self) -> mx.array:
        """Boolean [1, 2 * slots], of which each position's mask of one row is a slice."""
        ages = (self.slots - 1 - mx.arange(2 * self.slots)) % self.slots
        return (ages < self.window)[None]

    def slot(self, position: int) -> int:
        """Return the slot of a position."""
        return min(position, self.keep + (position - self.keep) % self.turn)

    def index(self, offset: mx.array, rows: int) -> mx.array:
        """Return the slots [n, 1, rows, 1] of rows at a device-side offset: int32 [1], or [n, 1] for n sequences."""
        if self._last[0] is not offset or self._last[1] != rows:
            self._last = offset, rows, self.index_of(offset + mx.arange(rows), rows)
        return self._last[2]

    def index_of(self, positions: mx.array, rows: int) -> mx.array:
        """Return the slots [n, 1, rows, 1] of positions, int32 [n, rows] or [rows]."""
        index = self.keep + (positions - self.keep) % self.turn if self.keep else positions % self.slots
        index = mx.minimum(positions, index) if self.keep else index
        return index.reshape(-1, 1, rows, 1)

    def mask(self, offset: mx.array, rows: int, visible: int, start: int) -> mx.array:
        """Return a boolean [rows, visible]: the slots, of the first `visible`, that each next row may attend to.

        Slots are seen as they are once all of these rows are written. offset: position of the first row, an integer
        or int32 [1]. start: the first position with contents. For n sequences offset is [n, 1, 1, 1],
        start too or 0, and the mask [n, 1, rows, visible].
        """
        queries, slots = offset + mx.arange(rows)[:, None], mx.arange(visible)[None]
        last = offset + (rows - 1)
        # The newest position that maps to each slot; negative where none was written yet.
        positions = last - (last - slots) % self.turn
        if self.keep:
            positions = mx.where(slots < self.keep, slots, mx.where(positions < self.keep, -1, positions))
        return self.seen(positions, queries) & (positions >= mx.minimum(start, queries))

    def seen(self, positions: mx.array, queries: mx.array) -> mx.array:
        """Return whether the window of each query's position contains each position: booleans, both broadcast.

        A window ends with the query itself and includes the `keep` first positions. Negative positions count as kept
        ones if `keep` is above 0.
        """
        near = positions > queries - (self.window - self.keep)
        return (positions <= queries) & (near | (positions < self.keep) if self.keep else near)

    def mask_of_one(self, positions: range, visible: int) -> mx.array:
        """Return the mask [1, visible] of one row, made on the host: true at the slots of `positions` and kept ones.

        positions: consecutive ones after the kept ones, the last of which is the row's own.
        """
        if len(positions) == self.window and not self.keep:
            first = self.slots - 1 - (positions.stop - 1) % self.slots
            return self._band[:, first : first + visible]
        mask = np.zeros((1, visible), bool)
        mask[:, : self.keep] = True
        mask[:, self.keep + (np.arange(positions.start, positions.stop) - self.keep) % self.turn] = True
        return mx.array(mask)


class SlidingKVCache(LinearKVCache):
    """Keys and values of the last positions in a Ring, of one layer and sequence.

    A row's arithmetic depends neither on when the ring wrapped nor on rejected rows: masks are made from positions,
    and a rejected row is overwritten, or masked, before a window reaches its slot (see `Ring`).
    """

    wraps = True
    window: int

    def __init__(self, ring: Ring, start: int = 0):
        super().__init__(start)
        self.ring, self.window, self.keep = ring, ring.window, ring.keep

    @property
    def trims(self) -> bool:
        return self.limit <= self.ring.slots

    @property
    def config(self) -> dict:
        return {"window": self.window, "keep": self.keep, "start": self.start}

    @property
    def places(self) -> int:
        return 0

    def _grow(self, rows: int, like: Parts) -> None:
        if not self.parts:
            self.parts = tuple(mx.zeros((*p.shape[:2], self.ring.slots, p.shape[3]), p.dtype) for p in like)

    def _write(self, new: Parts) -> None:
        ring, rows = self.ring, new[0].shape[2]
        if not isinstance(self.offset, int):
            index = ring.index(self.offset, rows)
            pairs = zip(self.parts, new, strict=True)
            whole = [mx.put_along_axis(part, mx.broadcast_to(index, r.shape), r, axis=2) for part, r in pairs]
            self.parts = tuple(whole)  # a generator is slower
            return
        if rows == 1:
            return self._assign(ring.slot(self.offset), new)
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
        slots, stop = self.ring.slots, round_up(self.limit + rows)
        return slice(0, stop if stop < slots else slots)

    def used(self) -> Parts:
        return self.parts

    def check(self) -> None:
        if self.parts and self.capacity != self.ring.slots:
            raise ValueError("its arrays do not have the ring's size")

    def to_quantized(self, bits: int, group_size: int) -> "SlidingKVCache":
        return self._filled(QuantizedSlidingKVCache(group_size, bits, self.ring, self.start))

    def _past(self) -> range:
        """Return the positions before the next row that its window contains, without the kept first ones."""
        first = max(self.offset - (self.window - self.keep) + 1, self.keep, self.start)
        return range(min(first, self.offset), self.offset)

    def _kept(self) -> range:
        return range(min(self.keep, self.offset))

    def update_and_fetch(self, *arrays: mx.array):
        rows = arrays[0].shape[2]
        if not isinstance(self.offset, int) or rows == 1:
            assert rows <= CALL_ROWS, "more rows than a ring can take back"
            return super().update_and_fetch(*arrays)
        # Prefill: attend to the past in order, then to the chunk; the ring may keep only the chunk's end.
        assert not self.fresh, "a prefill begins at a host position"
        new = self._encode(*arrays)
        self._grow(rows, new)
        slots = mx.array([self.ring.slot(p) for p in (*self._kept(), *self._past())], mx.int32)
        past = [mx.take(part, slots, axis=2) for part in self.parts]
        self._write(new)
        self.offset += rows
        self.limit += rows
        whole = tuple(mx.concatenate([a, b], axis=2) for a, b in zip(past, new, strict=True))
        return self._shared(self._decode(whole))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if not isinstance(self.offset, int):
            return self.ring.mask(self.offset, N, self._visible(N).stop, self.start)
        if N > 1 and self.keep:
            positions = mx.array([*self._kept(), *self._past(), *range(self.offset, self.offset + N)])
            return self.ring.seen(positions, mx.arange(self.offset, self.offset + N)[:, None])
        if N > 1:
            return create_causal_mask(N, len(self._past()), window_size=self.window)
        if self.offset < self.window:
            return None  # the view is exactly the row's window
        return self.ring.mask_of_one(range(self._past().start, self.offset + 1), self._visible(1).stop)


class QuantizedSlidingKVCache(QuantizedStorage, SlidingKVCache):
    """SlidingKVCache with `bits`-bit keys and values."""
