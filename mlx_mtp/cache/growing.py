"""Store keys and values of all positions in growing buffers; roll back without a host read.

The type of `offset` decides the mode. An `int` (prefill, plain decoding): slices are exact and masks are `None` or
"causal". An `mx.array` [1] (verify): rows are written at a device position, masks are computed from positions, and
`limit`, the host's upper bound of the offset, decides how much of the buffer is read.
"""

import copy
import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from .layer_cache import LayerCache, OncePerPass, Parts

STEP = 256  # sizes of buffers and of their views are multiples of this number of rows


def round_up(n: int) -> int:
    """Round up to a multiple of STEP."""
    return -(-n // STEP) * STEP


class LinearKVCache(LayerCache):
    """Keys, values and any other rows of all positions of one sequence (B = 1), for mlx-lm's attention modules.

    Buffers grow by at least an eighth. `start`: the first position with contents (an MTP head of depth j has none
    before position j).
    """

    def __init__(self, start: int = 0):
        self.start = start
        self.offset: int | mx.array = 0
        self.limit = 0
        self.parts: Parts = ()
        self.once = OncePerPass()
        self._reserved = 0

    def reserve(self, rows: int) -> None:
        self._reserved = rows

    @property
    def capacity(self) -> int:
        return self.parts[0].shape[2] if self.parts else 0

    def _grow(self, rows: int, like: Parts) -> None:
        """Make room for `rows` rows after `limit`, by a copy if needed. like: arrays of the stored form."""
        need = self.limit + rows
        if need <= self.capacity:
            return
        capacity = round_up(max(need, self._reserved, self.capacity * 9 // 8))
        blank = [mx.zeros((*p.shape[:2], capacity - self.capacity, p.shape[3]), p.dtype) for p in like]
        if self.parts:
            blank = [mx.concatenate([a, b], axis=2) for a, b in zip(self.parts, blank, strict=True)]
        self.parts = tuple(blank)

    def hold(self, rows: int) -> None:
        self._grow(rows - self.limit, self.parts)

    @property
    def places(self) -> int:
        return self.capacity // STEP * STEP

    def _write(self, new: Parts) -> None:
        if isinstance(self.offset, int):
            self._assign(self.offset, new)
        else:
            pairs = zip(self.parts, new, strict=True)
            self.parts = tuple(mx.slice_update(part, rows, self.offset, axes=[2]) for part, rows in pairs)

    def flush(self) -> None:
        if self.fresh:
            (at, *rows), self.fresh = self.fresh, ()
            self.write_at(at, rows)

    def write_at(self, position: Any, rows: Sequence[mx.array]) -> None:
        """Write rows, arrays [n, L, H, D], from a position on, without a change of `offset`."""
        offset, self.offset = self.offset, position
        self._write(tuple([each.swapaxes(1, 2) for each in rows]))
        self.offset = offset

    def seek(self, offset: Any, limit: int) -> None:
        """Set the position. With a host integer, the rows in `fresh` are written first."""
        if self.fresh and isinstance(offset, int):
            self.flush()
        self.offset, self.limit = offset, limit

    def before(self, rows: int) -> Parts:
        """Return what `rows` rows at the next positions attend to, themselves not yet written: [n, H, S, D] each."""
        self.flush()
        self._grow(rows, self.parts)
        return tuple([part[:, :, : self.seen(rows)] for part in self.parts])

    def seen(self, rows: int) -> int:
        """Return the number of places of the buffers that `rows` more rows, counted by the device, attend to."""
        return self._visible(rows).stop

    def _assign(self, slot: int, new: Parts) -> None:
        """Write rows from a slot on, through new array objects: those that a mark refers to keep the old contents."""
        self.parts, end = tuple([copy.copy(part) for part in self.parts]), slot + new[0].shape[2]
        for part, rows in zip(self.parts, new, strict=True):
            part[:, :, slot:end] = rows

    def _visible(self, rows: int) -> slice:
        """Return the slice of the buffers' rows that attention gets once `rows` more rows are written.

        If the device counts positions, it has further rows, which the mask hides.
        """
        if isinstance(self.offset, int):
            return slice(self.start, self.offset + rows)
        return slice(0, round_up(self.limit + rows))

    def update_and_fetch(self, *arrays: mx.array):
        """Append L rows of keys, values and others, [B, H, L, D] each; return the arrays that these attend to.

        If the device counts positions, the returned arrays have further rows, which the mask hides. A quantized cache
        returns two tuples (packed, scales, biases), one of the keys and one of the values.
        """
        rows = arrays[0].shape[2]
        if self.fresh:
            self.flush()
        new = self._encode(*arrays)
        self._grow(rows, new)
        self._write(new)
        view, parts = self._visible(rows), self.parts
        offset = self.offset
        self.offset = offset + rows if isinstance(offset, int) else self.once(operator.add, offset, rows)
        self.limit += rows
        if view.start or view.stop < self.capacity:
            parts = tuple([part[:, :, view] for part in parts])  # an ellipsis is four times slower
        return self._shared(self._decode(parts))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return the mask of the next N rows: None (one row sees all), "causal", or boolean [N, visible slots].

        It is boolean if the device counts positions, or for N > 1 with `return_array`; window_size is ignored.
        """
        if isinstance(self.offset, int):
            if N == 1:
                return None
            return create_causal_mask(N, self.offset - self.start) if return_array else "causal"
        queries = self.offset + mx.arange(N)[:, None]
        slots = mx.arange(self._visible(N).stop)[None]
        # The output of a row before `start` is not used; it attends to itself so that its softmax is defined.
        return (slots <= queries) & (slots >= mx.minimum(self.start, queries))

    @property
    def config(self) -> dict:
        return {"window": None, "start": self.start}

    def check(self) -> None:
        if self.parts and self.capacity < self.offset:
            raise ValueError("its arrays have fewer rows than positions")

    def used(self) -> Parts:
        return tuple(part[:, :, : round_up(self.limit)] for part in self.parts)

    def to_quantized(self, bits: int, group_size: int) -> "LinearKVCache":
        return self._filled(QuantizedLinearKVCache(group_size, bits, self.start))

    def _filled(self, quantized: Any) -> Any:
        self.flush()
        quantized.seek(self.offset, self.limit)
        if self.parts:
            quantized.parts = quantized._encode(*self.parts)
        return quantized


class QuantizedStorage:
    """Mixin that stores packed integers, which mlx-lm's quantized attention reads (it checks for `bits`)."""

    def __init__(self, group_size: int, bits: int, *args: Any, **kwargs: Any):
        """Pass the remaining arguments to the class that follows this mixin."""
        super().__init__(*args, **kwargs)
        self.group_size, self.bits = group_size, bits

    def _encode(self, *rows):
        return tuple(q for x in rows for q in mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def _decode(self, parts):
        return parts[:3], parts[3:]

    @property
    def config(self) -> dict:
        return {**super().config, "group_size": self.group_size, "bits": self.bits}  # type: ignore[misc]


class QuantizedLinearKVCache(QuantizedStorage, LinearKVCache):
    """LinearKVCache with `bits`-bit keys and values."""
