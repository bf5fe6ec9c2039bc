"""Define the interface of one layer's cache, and what caches need from their model."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from .tree import along

Parts = tuple[mx.array, ...]
CONTEXTS = (0, 1024, 16384)  # lengths from which other kernels may be faster


class OncePerPass:
    """The last result per function, so that what depends on the position only is computed once per pass.

    All caches of a sequence share one OncePerPass.
    """

    def __init__(self):
        self._last: dict[Callable, tuple] = {}

    def __call__(self, fn: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        """Return fn(a, b), or fn's previous result if a and b are the same objects as then."""
        last = self._last.get(fn)
        if last is None or last[0] is not a or last[1] is not b:
            last = self._last[fn] = a, b, fn(a, b)
        return last[2]

    def __deepcopy__(self, memo: dict) -> "OncePerPass":
        """Return an empty OncePerPass: copies of a cache share nothing, and MLX's functions cannot be copied."""
        return OncePerPass()


class LayerCache:
    """Interface of one layer's cache of one sequence (B = 1): keys and values, or a recurrent state.

    offset: number of positions held: an `int` while the host counts them, int32 [1] while the device does.
    limit:  the host's upper bound of `offset`.
    parts:  the arrays; () before the first row.
    start:  the first position with contents; int32 [1] in a recorded cycle.
    shift:  added to a text row's number for its RoPE position: an int, 0 without pictures, or int32 [1].
    axes:   RoPE positions of a call's rows on three axes, int32 [3, L], if the call reads a picture, else None.
    window: number of positions held, None for all: the first `keep` and the last ones.
    config: entry for this cache in `kinds.from_configs`, which creates it without its `parts`; in files as JSON.
    once:   shared with the sequence's other layers.
    context: the largest of CONTEXTS that the sequence had reached when its answer began. It chooses the kernels, so
        that all rows of an answer have the same ones; `limit` cannot, because it depends on drafts.

    A class also sets `is_state` (one state of the whole sequence, no rows), `wraps` (new rows overwrite old ones, so
    a lower offset does not restore them), `rereads` (accepted rows are read again if others of their verify were
    rejected) and `is_mlx_lm` (mlx-lm's own caches, for which no cycle is built ahead).
    fetched: what `update_and_fetch` returned in this pass of a foreign model; None outside of one.
    fresh: rows of the last pass, a tree's, that are not in `parts` yet: the position of the first, int32 [n], then
        arrays [n, rows, H, D], in the order of positions after `keep_path`; () without such rows.
    of_tree: each row of a pass has a path of its own (`branches.py`).
    """

    is_state = wraps = rereads = is_mlx_lm = of_tree = False
    fetched: Any = None
    fresh: Any = ()
    start: Any = 0
    shift: Any = 0
    axes: mx.array | None = None
    context: int = 0
    window: int | None = None
    keep: int = 0
    rewinds: Any = True  # whether `seek` can return to an earlier position now
    offset: Any
    limit: int
    parts: Any
    config: Any
    once: OncePerPass

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def position(self) -> Any:
        """RoPE position of the next row, an int or int32 [1]; in a call that reads a picture `axes`, int32 [3, L]."""
        if self.axes is not None:
            return self.axes
        unmoved = isinstance(self.shift, int) and not self.shift
        return self.offset if unmoved else self.once(moved, self.offset, self.shift)

    @property
    def trims(self) -> bool:
        """Whether `seek` alone can return to any earlier position."""
        return not self.is_state and self.rewinds

    @property
    def empty_config(self) -> dict[str, Any]:
        """The `config` of an empty cache of this layout."""
        return self.config

    # Conversions between a row's keys and values and their stored form.
    def _encode(self, *rows: mx.array) -> Parts:
        return rows

    def _decode(self, parts: Parts):
        return parts

    def reserve(self, rows: int) -> None:
        """Note that `rows` positions are expected in all: the next growth of growing buffers reaches these."""

    def hold(self, rows: int) -> None:
        """Make room for `rows` positions in all now; nothing happens before the first row."""

    @property
    def places(self) -> int:
        """Number of positions that the buffers can hold, rounded down to a multiple of STEP; in a pool, of GRAIN.

        0 for a ring or a state, for mlx-lm's caches, and before the first row.
        """
        return 0

    def seek(self, offset: Any, limit: int) -> None:
        """Set the position (a host integer, or int32 [1] on the device) and the host's upper bound of it."""
        self.offset, self.limit = offset, limit

    def keep_path(self, path: mx.array) -> None:
        """Keep, of the rows of a tree that was read last, those of a path in this order. path: int32 [n, D]."""
        if self.fresh:
            at, *rows = self.fresh
            self.fresh = at, *(along(each, path) for each in rows)

    def flush(self) -> None:
        """Write the rows in `fresh` to their positions in `parts`."""

    def _shared(self, fetched: Any) -> Any:
        """Return what `update_and_fetch` returns; in a pass of a foreign model it is kept for `keys_and_values`."""
        if self.fetched is not None:  # elsewhere a reference would make the next write a copy
            self.fetched = fetched
        return fetched

    def keys_and_values(self) -> Any:
        """Return the keys and values of this pass, which several layers of a foreign model read."""
        return self.fetched

    def passed(self, sequences: int, rows: int) -> None:
        """End a pass of a foreign model over the next rows of a number of sequences."""
        self.fetched = None

    def used(self) -> Parts:
        """Return the arrays to save: rows up to a multiple of STEP after the last; a ring or a state as it is."""
        return self.parts

    def check(self) -> None:
        """Raise ValueError if `parts`, read from a file, have too few rows for `offset`, or not a ring's size."""

    def fits(self, parts: Parts) -> bool:
        """Return whether `parts`, read from a file, have the shapes and types of this cache, which is not empty."""
        return shapes_of(parts) == shapes_of(self.parts)

    def to_quantized(self, bits: int, group_size: int) -> "LayerCache":
        """Return a cache of the same positions in `bits` bits; one without keys and values returns itself."""
        return self


def moved(offset: Any, shift: Any) -> Any:
    """Return offset + shift. `OncePerPass` stores the result by its function, so this function needs a name."""
    return offset + shift


def shapes_of(parts: Sequence[mx.array]) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Return the shape and type of each array."""
    return [(tuple(part.shape), part.dtype) for part in parts]


CacheKind = int | None | Callable[[], LayerCache]  # a window, all positions, or what creates another cache


class CachedModel(Protocol):
    """What caches need from their model.

    mtp: its MTP heads. args: config.json's fields. vocab_size: V. NO_KV_BITS: why keys and values cannot be
    quantized, None if they can. runtime: its adapters and other state that is no part of its weights.
    axes: the number of RoPE frequencies that turn with each of the three axes of a picture's positions; () for a
    model whose pictures have the positions of text.
    vision: `Runtime.vision`.
    """

    mtp: Sequence[Any]
    args: Any
    runtime: Any
    NO_KV_BITS: str | None

    @property
    def axes(self) -> tuple[int, ...]: ...

    @property
    def vision(self) -> Any: ...

    @property
    def vocab_size(self) -> int: ...

    def windows(self) -> list[CacheKind]:
        """Return the kind of cache of each of the target's layers that has one."""
        ...

    def head_windows(self) -> list[CacheKind]:
        """Return the kind of each of the drafter's caches; for an MTP head its attention's window."""
        ...

    def no_hidden(self) -> mx.array:
        """Return a hidden row of zeros, [1, 1, H], in the model's floating-point type."""
        ...
