"""State what the cache of one layer offers, and what caches ask of the model that they belong to."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

Parts = tuple[mx.array, ...]
CONTEXTS = (0, 1024, 16384)  # positions from which on other kernels may be the faster ones


class OncePerPass:
    """Compute what follows from the position alone once for all layers of a pass: the layers of a text share one."""

    def __init__(self):
        self._last: dict[Callable, tuple] = {}

    def __call__(self, fn: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        """Return fn(a, b), as the last time where a and b are the very same objects."""
        known = self._last.get(fn)
        if known is None or known[0] is not a or known[1] is not b:
            known = self._last[fn] = a, b, fn(a, b)
        return known[2]

    def __deepcopy__(self, memo: dict) -> "OncePerPass":
        """Begin anew: a copy of a cache shares nothing with it, and MLX's functions cannot be copied."""
        return OncePerPass()


class LayerCache:
    """Keys and values, or a state, of one layer for one text (B = 1); these defaults suit what holds no rows.

    offset: positions held, an `int` while the host counts them, int32 [1] while the device does.
    limit:  an upper bound of `offset` that the host knows.
    parts:  the arrays of the state; () before the first row.
    start:  positions below it hold nothing; int32 [1] where a cycle is recorded.
    window: how many last positions it holds, None for all; keep: first positions that it holds beside these.
    config: arguments of `kinds.from_configs` that make this cache again, but for its `parts`; kept in files as JSON.
    once:   what it shares with the text's other layers.
    context: of CONTEXTS the one that the text had reached when its answer began. Kernels are chosen by it, so that
        all rows of an answer have the same ones: `limit` depends on what was drafted.

    Facts of a kind: `is_state` (one state of the whole text, no rows), `wraps` (new rows overwrite old ones, so that
    a lower offset does not bring them back), `is_mlx_lm` (mlx-lm's own caches, on which nothing is built ahead).
    """

    is_state = wraps = is_mlx_lm = False
    start: Any = 0
    context: int = 0
    window: int | None = None
    keep: int = 0
    rewinds: Any = True  # whether `seek` can go back now
    offset: Any
    limit: int
    parts: Any
    config: Any
    once: OncePerPass

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def trims(self) -> bool:
        """Whether `seek` can go back to any position, and needs nothing else for it."""
        return not self.is_state and self.rewinds

    @property
    def empty_config(self) -> dict[str, Any]:
        """The `config` of an empty cache of this layout."""
        return self.config

    # Storage: what a row's keys, values and perhaps more become, and how attention gets them back.
    def _encode(self, *rows: mx.array) -> Parts:
        return rows

    def _decode(self, parts: Parts):
        return parts

    def reserve(self, rows: int) -> None:
        """Make the next growth reach `rows` positions at once, where a longer run is known to come."""

    def hold(self, rows: int) -> None:
        """Have room for `rows` positions now; what the cache holds has to have a form already."""

    def seek(self, offset: Any, limit: int) -> None:
        """Set the position, a host integer or int32 [1], and its upper bound on the host."""
        self.offset, self.limit = offset, limit

    def used(self) -> Parts:
        """Return the arrays to save, without rows that were never reached."""
        return self.parts

    def check(self) -> None:
        """Raise ValueError where `parts`, read from a file, cannot belong to `offset`."""

    def fits(self, parts: Parts) -> bool:
        """Whether `parts`, read from a file, are of the shapes and types of this cache's own, which holds rows."""
        return shapes_of(parts) == shapes_of(self.parts)

    def to_quantized(self, bits: int, group_size: int) -> "LayerCache":
        """Return a cache with these contents in `bits` bits, positions kept; a state stays in full precision."""
        return self


def shapes_of(parts: Sequence[mx.array]) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """List the shapes and types of arrays."""
    return [(tuple(part.shape), part.dtype) for part in parts]


CacheKind = int | None | type[LayerCache]  # what a layer needs: a window, all positions, or a cache of another class


class CachedModel(Protocol):
    """What a text's caches need to know of a model.

    mtp: its MTP heads. args: config.json's fields. vocab_size: V. NO_KV_BITS: what forbids quantized keys and values.
    """

    mtp: Sequence[Any]
    args: Any
    NO_KV_BITS: str | None

    @property
    def vocab_size(self) -> int: ...

    def windows(self) -> list[CacheKind]:
        """Return what each layer that has a cache needs."""
        ...

    def head_windows(self) -> list[CacheKind]:
        """Return what each cache of its drafter needs; of an MTP head its attention's window."""
        ...

    def no_hidden(self) -> mx.array:
        """Return a hidden row of zeros, [1, 1, H], of the model's type."""
        ...
