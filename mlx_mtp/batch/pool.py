"""Hold the caches of the texts of one layout in slots, and change who is in the next pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.layer_cache import OncePerPass
from ..cache.prompt_cache import PromptCache
from ..cache.slots import Span, gather, pooled


class Mark(NamedTuple):
    """A pool's arrays at one moment, by cache, and what joins its heads if it has them, and what these missed."""

    arrays: list[tuple[mx.array, ...]]
    kept: list[mx.array]
    missed: list[tuple[mx.array, mx.array]]
    live: bool


class PoolArrays(NamedTuple):
    """The arrays of a pool that a cycle reads and writes; those of heads that have no part in it are left out.

    ends: where the target's texts stand, int32 [n], and where the heads do, None without them.
    """

    ends: tuple[Any, Any]
    parts: list[tuple[mx.array, ...]]
    kept: list[mx.array]


class Pool:
    """A pooled cache for each of the target's layers and, while they follow it, of its heads.

    kept: as in PromptCache, [n, 1, H] each. live: the heads are in the pool. missed: the hidden rows [n, 1, H], and
    the tokens [n, 1] behind them, of plain cycles that they have not read. configs: of a text's own layers and heads.
    """

    def __init__(self, like: PromptCache):
        self.configs = tuple(tuple(map(_config, caches)) for caches in (like.layers, like.heads))
        self.layers, self.heads = _pooled(like.layers), _pooled(like.heads)
        self.kept: list[mx.array] = []
        self.missed: list[tuple[mx.array, mx.array]] = []
        self.span = Span([0], 1)
        self.live = False

    @property
    def caches(self) -> list[Any]:
        return [*self.layers, *self.heads] if self.live else self.layers

    @property
    def slots(self) -> int:
        """Count the slots of the buffers."""
        return max((c.buffers[0].shape[0] for c in self.caches if not c.is_state and c.buffers), default=0)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the pool, for `mx.eval`."""
        return [part for c in self.caches for part in _arrays(c)] + (self.kept if self.live else [])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.arrays)

    def unload(self, *, heads: bool) -> PoolArrays:
        """Give out what a cycle reads and writes, the heads' if they have a part in it."""
        part = self.heads if heads else []
        ends = self.layers[0].offset, part[0].offset if part else None
        return PoolArrays(ends, [_arrays(c) for c in (*self.layers, *part)], self.kept if part else [])

    def load(self, arrays: PoolArrays) -> None:
        """Take in what `unload` gave out."""
        every, heads = iter(arrays.parts), arrays.ends[1] is not None
        for c in self.layers:
            c.offset = arrays.ends[0]
            _hold(c, next(every))
        for c in self.heads if heads else ():
            c.offset = arrays.ends[1]
            _hold(c, next(every))
        self.kept = arrays.kept if heads else self.kept

    def mark(self) -> Mark:
        """Note what the pool holds now; keys and values are not written in place while this is held."""
        return Mark([_arrays(c) for c in self.caches], self.kept, [*self.missed], self.live)

    def copy_out(self, mark: Mark, cache: PromptCache, slot: int, row: int, *, base: int, rows: int) -> None:
        """Copy a text's state to its own cache: what a pass left that began at position `base`, and `rows` of it."""
        arrays = iter(mark.arrays)
        for c, mine in zip(self.layers, cache.layers, strict=True):
            mine.parts = c.copied(next(arrays), row) if c.is_state else c.copied(next(arrays), slot, base + rows)
        if mark.live:
            self._copy_out_heads(mark, cache, slot, row, base)

    def retire_heads(self, texts: Sequence[tuple[int, int, int, PromptCache]]) -> None:
        """Give each text its heads back, with what they missed; texts: row, slot, position of the last pass's first
        row, and own cache.
        """
        mark, self.live = self.mark(), False
        for row, slot, base, cache in texts:
            self._copy_out_heads(mark, cache, slot, row, base)
        self.kept, self.missed = [], []
        for c in self.heads:
            c.buffers, c.starts, c.offset = (), [], None

    def _copy_out_heads(self, mark: Mark, cache: PromptCache, slot: int, row: int, base: int) -> None:
        cache.primed = base - len(mark.missed)
        for c, mine, arrays in zip(self.heads, cache.heads, mark.arrays[len(self.layers) :], strict=True):
            mine.parts = c.copied(arrays, slot, cache.primed)
        cache.kept = [mx.contiguous(each[row : row + 1]) for each in mark.kept]
        cache.backlog = []
        if mark.missed:
            cache.push(mx.concatenate([hidden[row : row + 1] for hidden, _ in mark.missed], axis=1))

    def rollback(self, n: mx.array) -> None:
        """Take back each text's last n positions, int32 [n] on the device."""
        offset = self.layers[0].offset - n
        for c in self.layers:
            c.offset = offset

    def heads_follow(self) -> None:
        """Move the heads to where the target stands."""
        for c in self.heads:
            c.offset = self.layers[0].offset

    def bound(self, limit: int, heads_limit: int) -> None:
        """Note the most positions that a text of the target and of its heads may hold."""
        for c in self.layers:
            c.limit = limit
        for c in self.heads:
            c.limit = heads_limit

    def regroup(self, span: Span, order: Sequence[int], newcomers: Sequence[tuple[int, PromptCache]]) -> None:
        """Let the next pass be of other texts.

        order: for each slot of the span its row in the last pass, or, from the number of those on, a newcomer's.
        newcomers: the slot of each and its own cache, at rest, whose heads have read all but its last position.
        """
        self.span, index = span, mx.array(list(order))
        self._regroup(self.layers, [(slot, c.layers, c.offset) for slot, c in newcomers], order, index)
        if self.live:
            self._regroup_heads(order, index, newcomers)

    def wake(self, texts: Sequence[tuple[int, PromptCache]]) -> None:
        """Take in the heads of all texts, by slot, which have read all but their last position."""
        places = {slot: row for row, (slot, _) in enumerate(texts)}
        order, self.live = [places.get(slot, 0) for slot in self.span.slots], True
        self._regroup_heads(order, mx.array(order), texts)

    def _regroup_heads(
        self, order: Sequence[int], index: mx.array, newcomers: Sequence[tuple[int, PromptCache]]
    ) -> None:
        self._regroup(self.heads, [(slot, c.heads, c.primed) for slot, c in newcomers], order, index)
        kept = self.kept or [None] * (len(self.heads) - 1)
        self.kept = [gather(old, [c.kept[i] for _, c in newcomers], index) for i, old in enumerate(kept)]

    def _regroup(self, caches: list[Any], newcomers: list[Any], order: Sequence[int], index: mx.array) -> None:
        offset = gather(caches[0].offset, [mx.array([rows]) for _, _, rows in newcomers], index)
        for i, c in enumerate(caches):
            c.offset = offset
            own = [(slot, each[i], rows) for slot, each, rows in newcomers]
            if c.is_state:
                c.regroup(index, [cache for _, cache, _ in own])
            else:
                c.regroup(self.span, order, own)


def _pooled(caches: list[Any]) -> list[Any]:
    once, found = OncePerPass(), []
    for cache in caches:
        found.append(pooled(cache, getattr(cache, "ring", None)))
        found[-1].once = once
    return found


def _config(cache: Any) -> tuple:
    """Return a cache's `config` without its start, of which each text has its own."""
    return tuple((name, value) for name, value in cache.config.items() if name != "start")


def _arrays(c: Any) -> tuple[mx.array, ...]:
    return c.parts if c.is_state else c.buffers


def _hold(c: Any, arrays: tuple[mx.array, ...]) -> None:
    if c.is_state:
        c.parts = arrays
    else:
        c.buffers = arrays
