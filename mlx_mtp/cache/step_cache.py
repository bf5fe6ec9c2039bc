"""Define the operations of a decoding step on the caches of one or several sequences."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from .layer_cache import CachedModel


class CacheArrays(NamedTuple):
    """The arrays of a StepCache that a step reads and writes, without those of a drafter that is not in the step.

    ends: position of the target, and of the drafter or None: int32 [n], or an int while the host counts.
    shift: added to row numbers to get RoPE positions, int32 [n]; None if it is 0 for all. fresh: `LayerCache.fresh`
    of each of the target's caches after a tree; [] after other rows.
    """

    ends: tuple[Any, Any]
    parts: list[Any]
    kept: list[mx.array]
    shift: mx.array | None = None
    fresh: Sequence[Any] = ()


class CacheForm(Protocol):
    """Everything in a StepCache besides its arrays that a recorded step depends on: a hashable part of its key."""

    def made(self, model: CachedModel) -> "StepCache":
        """Return a cache of this form without arrays."""
        ...


class StepCache(Protocol):
    """The caches of n sequences: a `PromptCache` holds one, a `Pool` several.

    layers: the target's, all at the same positions. heads: the drafter's own.
    kept:   arrays that a drafter passes from one step to the next besides its caches, [n, 1, H] each.
    live:   the drafter is in the step: it reads the last run's rows, and its caches follow the target.
    starts: first positions with contents, as inputs of a recorded step: of all caches in it, or of heads only.
    """

    layers: list[Any]
    heads: list[Any]
    kept: list[mx.array]
    live: bool
    starts: Any

    @property
    def stepped(self) -> list[Any]:
        """The caches that are in the step."""
        return [*self.layers, *self.heads] if self.live else self.layers

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for `mx.eval`."""
        ...

    def unload(self) -> CacheArrays:
        """Return the arrays that a step reads and writes."""
        ends = self.layers[0].offset, self.heads[0].offset if self.live and self.heads else None
        shift = self.layers[0].shift
        shift = shift if isinstance(shift, mx.array) else mx.array([shift]) if shift else None
        parts, kept = [c.parts for c in self.stepped], self.kept if self.live else []
        return CacheArrays(ends, parts, kept, shift, self.fresh)

    @property
    def fresh(self) -> list[Any]:
        """`LayerCache.fresh` of each of the target's caches; [] if all are empty."""
        found = [c.fresh for c in self.layers]
        return found if any(found) else []

    def load(self, arrays: CacheArrays, limit: int, heads_limit: int) -> None:
        """Set the positions, shift and arrays that `unload` or a step returned, and the positions' upper bounds."""
        parts, shift = iter(arrays.parts), 0 if arrays.shift is None else arrays.shift
        for c in self.stepped:
            c.shift = shift
        for c in self.layers:
            c.fresh = ()
            c.seek(arrays.ends[0], limit)
            c.parts = next(parts)
        for c, fresh in zip(self.layers, arrays.fresh, strict=False):
            c.fresh = fresh
        for c in self.heads if self.live else ():
            c.seek(arrays.ends[1], heads_limit)
            c.parts = next(parts)
        self.kept = arrays.kept if self.live else self.kept

    def rollback(self, n: mx.array) -> None:
        """Lower the position of each sequence in the target's caches by n, int32 [n] on the device."""
        seek(self.layers, self.layers[0].offset - n, self.layers[0].limit)

    def keep_path(self, path: mx.array) -> None:
        """Keep a path's rows of the tree that the target read last, in this order. path: int32 [n, D]."""
        for c in self.layers:
            c.keep_path(path)

    def heads_follow(self) -> None:
        """Set the position of the drafter's caches to the target's; the next call overwrites their later rows."""
        seek(self.heads, self.layers[0].offset, self.layers[0].limit)

    def mark(self) -> Any:
        """Return a mark of the state, for `restore`; while it holds arrays, these are not written in place."""
        ...

    def restore(self, mark: Any) -> None:
        """Return to the state of a mark."""
        ...

    def form(self) -> CacheForm:
        """Return the form of these caches, from which a recorded step makes them again."""
        ...


def seek(caches: list[Any], offset: Any, limit: int) -> None:
    """Set the position of each cache, and its upper bound on the host."""
    for c in caches:
        c.seek(offset, limit)
