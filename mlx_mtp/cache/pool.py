"""Hold the caches of several sequences of one layout in slots, and change the sequences of a pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .kinds import from_configs
from .layer_cache import CachedModel, OncePerPass
from .prompt_cache import PromptCache
from .slots import Span, gather, pooled
from .step_cache import StepCache


class PoolMark(NamedTuple):
    """A recorded state of a pool: positions and arrays of each cache; `kept` and `missed` of the heads.

    fresh: of the target's caches.
    """

    ends: list[Any]
    arrays: list[tuple[mx.array, ...]]
    kept: list[mx.array]
    missed: list[tuple[mx.array, mx.array]]
    has_heads: bool
    fresh: list[Any]


class PoolForm(NamedTuple):
    """Everything besides arrays that a step on a pool depends on.

    layers, heads: the `config`s of one sequence's caches; no heads if they are not in the step. span: the slots of a
    pass, and the number of all slots. starts: per cache in the step, whether any sequence's `start` is above 0.
    shifted: whether any sequence has a shift of RoPE positions, which its pictures cause, other than 0.
    """

    layers: tuple
    heads: tuple
    span: tuple[range, int]
    starts: tuple[bool, ...]
    shifted: bool = False

    def made(self, model: CachedModel) -> "Pool":
        """Return a pool of this form without arrays."""
        layers, heads = (from_configs([dict(config) for config in configs]) for configs in (self.layers, self.heads))
        pool = Pool(PromptCache(model, layers, heads, None, []))
        pool.live = pool.has_heads = bool(heads)
        for c in pool.stepped:
            c.span = Span(*self.span)
        return pool


class Pool(StepCache):
    """A pooled cache for each layer of the target and, while the heads follow it, for each head.

    has_heads: the heads are in the pool. missed: of each plain cycle that the heads have not read, hidden rows
    [n, 1, H] and the tokens [n, 1] that follow. configs: the `config`s of one sequence's (layers, heads).
    shifts: for each row of the pass, `next_shift` of its sequence; a free slot repeats another sequence's.
    """

    def __init__(self, like: PromptCache):
        self.configs = tuple(tuple(map(_config, caches)) for caches in (like.layers, like.heads))
        self.layers, self.heads = _pooled(like.layers), _pooled(like.heads)
        self.kept: list[mx.array] = []
        self.missed: list[tuple[mx.array, mx.array]] = []
        self.span, self.shifts = Span([0], 1), list[int]()
        self.live = self.has_heads = False

    @property
    def caches(self) -> list[Any]:
        return [*self.layers, *self.heads] if self.has_heads else self.layers

    @property
    def slots(self) -> int:
        """Number of sequences that the buffers of keys and values have slots for; 0 without buffers."""
        return max((c.parts[0].shape[0] for c in self.caches if not c.is_state and c.parts), default=0)

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays of the target's caches and, with `has_heads`, of the heads' and `kept`; for `mx.eval`."""
        return [part for c in self.caches for part in c.parts] + (self.kept if self.has_heads else [])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.arrays)

    @property
    def starts(self) -> list[Any]:
        return [c.start for c in self.stepped]

    @starts.setter
    def starts(self, values: list[Any]) -> None:
        for c, start in zip(self.stepped, values, strict=True):
            c.start = start

    def form(self) -> PoolForm:
        layers, heads = self.configs
        starts = tuple(not isinstance(start, int) for start in self.starts)
        span = self.span.slots, self.span.count
        return PoolForm(layers, heads if self.live else (), span, starts, any(self.shifts))

    def mark(self) -> PoolMark:
        caches = self.caches
        arrays = [c.parts for c in caches]
        return PoolMark([c.offset for c in caches], arrays, self.kept, [*self.missed], self.has_heads, self.fresh)

    def restore(self, mark: PoolMark) -> None:
        self.has_heads, self.kept, self.missed = mark.has_heads, mark.kept, [*mark.missed]
        for c, offset, arrays in zip(self.caches, mark.ends, mark.arrays, strict=True):
            c.offset, c.parts, c.fresh = offset, arrays, ()
        for c, fresh in zip(self.layers, mark.fresh, strict=False):
            c.fresh = fresh

    def copy_out(self, mark: PoolMark, cache: PromptCache, slot: int, row: int, *, base: int, rows: int) -> None:
        """Copy a sequence's state at `mark` to its own cache, whose positions the caller then sets (`settle`).

        slot: of its keys and values. row: in the pass that `mark` follows. base: position of that pass's first row.
        rows: number of its rows to include.
        """
        arrays = iter(mark.arrays)
        for c, target in zip(self.layers, cache.layers, strict=True):
            target.parts = c.copied(next(arrays), row) if c.is_state else c.copied(next(arrays), slot, base + rows)
        for target, fresh in zip(cache.layers, mark.fresh if rows else (), strict=False):
            if fresh:
                target.write_at(base, [each[row : row + 1, :rows] for each in fresh[1:]])
        if mark.has_heads:
            self._copy_out_heads(mark, cache, slot, row, base)

    def pause_heads(self, sequences: Sequence[tuple[int, int, int, PromptCache]]) -> None:
        """Copy each sequence's heads, `kept` and missed rows to its own cache; the pool has no heads then.

        sequences: (row, slot, position of the last pass's first row, own cache) of each.
        """
        mark, self.has_heads = self.mark(), False
        for row, slot, base, cache in sequences:
            self._copy_out_heads(mark, cache, slot, row, base)
        self.kept, self.missed = [], []
        for c in self.heads:
            c.parts, c.starts, c.offset = (), [], None

    def _copy_out_heads(self, mark: PoolMark, cache: PromptCache, slot: int, row: int, base: int) -> None:
        cache.primed = base - len(mark.missed)
        for c, target, arrays in zip(self.heads, cache.heads, mark.arrays[len(self.layers) :], strict=True):
            target.parts = c.copied(arrays, row) if c.is_state else c.copied(arrays, slot, cache.primed)
        cache.kept = [mx.contiguous(each[row : row + 1]) for each in mark.kept]
        cache.backlog = []
        if mark.missed:
            cache.push(mx.concatenate([hidden[row : row + 1] for hidden, _ in mark.missed], axis=1))

    def regroup(self, span: Span, order: Sequence[int], newcomers: Sequence[tuple[int, PromptCache]]) -> None:
        """Change the sequences of the next pass: assign rows to slots and copy newcomers into the pool.

        order: for each slot of the span its row in the last pass; numbers from the row count on are newcomers'.
        newcomers: (slot, own cache) of each, between generations; with `has_heads` its heads must have read all
        positions but the last.
        """
        self.span, index = span, mx.array(list(order))
        shifts = [*self.shifts, *(c.next_shift for _, c in newcomers)]
        self.shifts = [shifts[row] for row in order]
        shift = mx.array(self.shifts) if any(self.shifts) else 0
        for c in (*self.layers, *self.heads):
            c.shift = shift
        self._regroup(self.layers, [(slot, c.layers, c.offset) for slot, c in newcomers], order, index)
        if self.has_heads:
            self._regroup_heads(order, index, newcomers)

    def resume_heads(self, sequences: Sequence[tuple[int, PromptCache]]) -> None:
        """Copy the heads of all sequences into the pool. sequences: (slot, own cache) of each.

        The heads must have read all positions but the last.
        """
        places = {slot: row for row, (slot, _) in enumerate(sequences)}
        order, self.has_heads = [places.get(slot, 0) for slot in self.span.slots], True
        self._regroup_heads(order, mx.array(order), sequences)

    def _regroup_heads(
        self, order: Sequence[int], index: mx.array, newcomers: Sequence[tuple[int, PromptCache]]
    ) -> None:
        self._regroup(self.heads, [(slot, c.heads, c.primed) for slot, c in newcomers], order, index)
        kept = self.kept or [None] * (len(newcomers[0][1].kept) if newcomers else 0)
        self.kept = [gather(old, [c.kept[i] for _, c in newcomers], index) for i, old in enumerate(kept)]

    def _regroup(self, caches: list[Any], newcomers: list[Any], order: Sequence[int], index: mx.array) -> None:
        if not caches:  # a drafter without caches
            return
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
    """Return a cache's `config` without its `start`, which differs between sequences."""
    return tuple((name, value) for name, value in cache.config.items() if name != "start")
