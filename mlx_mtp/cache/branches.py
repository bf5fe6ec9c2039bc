"""Read the rows of a tree as if each were a sequence of its own, whose text is the row's path.

The caches of such a pass have a batch of n * T sequences with one row each. A row sees exactly the positions and the
arithmetic of plain decoding, so its bits are those of plain decoding, whatever the layer is. The price is a copy of
keys and values per row. Nothing is written to the sequences' own caches but the new rows, in `fresh` or on the tape;
`LayerCache.keep_path` reduces these to the accepted path.
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from .layer_cache import LayerCache, OncePerPass, Parts
from .recurrent import RecurrentCache, Replay
from .ring import MAX_ROWS
from .slots import PooledKV, Span
from .tree import RowTree, along

COPIES = 2**30  # maximum bytes of one layer's keys and values, or state, once per row of a tree


def rows_with_room(layers: Iterable[Any]) -> int:
    """Return the maximum rows of a tree whose copies of any layer's arrays have at most COPIES bytes.

    layers: the caches of all sequences of the pass; each of them has as many rows. At most MAX_ROWS.
    """
    return min(MAX_ROWS, COPIES // max(1, *(c.nbytes for c in layers)))


def copied_bytes(layers: Iterable[Any]) -> int:
    """Return the bytes of the copies of a tree's pass: of two layers, because MLX frees them while it computes."""
    largest = max(0, *(c.nbytes for c in layers))
    return 2 * largest * min(MAX_ROWS, COPIES // max(1, largest))


class Branches:
    """The rows of one pass over a tree, which the caches of all layers share.

    layer: any of the sequences' caches. offset: the position of each row, int32 [n * T]. span: of n * T slots.
    """

    def __init__(self, tree: RowTree, layer: LayerCache):
        self.tree, (self.n, self.rows) = tree, tree.depth.shape
        self.base, self.limit, self.once = layer.offset, layer.limit, OncePerPass()
        self.offset = (self.base[:, None] + tree.depth).flatten()
        self.span = Span(range(self.n * self.rows), self.n * self.rows)
        shift = layer.shift
        self.shift = mx.repeat(shift, self.rows) if isinstance(shift, mx.array) else shift
        where = self.base[:, None, None] + mx.minimum(mx.arange(tree.levels), tree.depth[..., None])
        self.positions = where.reshape(-1, tree.levels)  # of each row's path, its own from its depth on
        self._index: dict[Any, mx.array] = {}

    def index(self, ring: Any) -> mx.array:
        """Return the places of each row's path in buffers, or in a ring, int32 [n * T, 1, D, 1]."""
        if ring not in self._index:
            levels = self.tree.levels
            places = ring.index_of(self.positions, levels) if ring else self.positions.reshape(-1, 1, levels, 1)
            self._index[ring] = places
        return self._index[ring]

    def by_sequence(self, rows: mx.array) -> mx.array:
        """Return rows [n * T, ...] as [n, T, ...]."""
        return rows.reshape(self.n, self.rows, *rows.shape[1:])

    def by_row(self, of_sequences: mx.array) -> mx.array:
        """Return an array [n, ...] with each sequence's part repeated for its T rows: [n * T, ...]."""
        return mx.repeat(of_sequences, self.rows, axis=0)

    def of(self, cache: Any) -> Any:
        """Return the cache of a layer for this pass."""
        made = BranchState(self, cache) if cache.is_state else BranchKV(self, cache)
        made.once = self.once
        return made


class BranchKV(PooledKV):
    """Keys and values of one layer as each row of a tree sees them: those before the tree, and those of its path."""

    of_tree = True

    def __init__(self, branches: Branches, cache: Any):
        super().__init__(getattr(cache, "ring", None))
        self.branches, self.cache = branches, cache
        self.offset, self.limit, self.shift = branches.offset, branches.limit, branches.shift
        self.span = branches.span
        for name in ("bits", "group_size"):
            if hasattr(cache, name):
                setattr(self, name, getattr(cache, name))

    def update_and_fetch(self, *arrays: mx.array):
        """Take one row of each path, arrays [n * T, H, 1, D]; return what they attend to, [n * T, H, S, D]."""
        cache, branches, tree = self.cache, self.branches, self.branches.tree
        rows = [branches.by_sequence(array)[:, :, :, 0] for array in cache._encode(*arrays)]
        past, cache.fresh = cache.before(tree.levels), (branches.base, *rows)
        where = branches.index(self.ring)
        self.parts = tuple([self._with_path(*pair, where) for pair in zip(past, rows, strict=True)])
        self.offset, self.limit = self.offset + 1, self.limit + 1
        return self._shared(cache._decode(self.parts))

    def _with_path(self, past: mx.array, rows: mx.array, where: mx.array) -> mx.array:
        """Return buffers [n, H, S, D] once per row, with the rows [n, T, H, D] of its path in their places."""
        path = along(rows, self.branches.tree.ancestors).flatten(0, 1).swapaxes(1, 2)
        whole = self.branches.by_row(past)
        return mx.put_along_axis(whole, mx.broadcast_to(where, path.shape), path, axis=2)

    def _visible(self, rows: int) -> int:
        return self.cache.seen(self.branches.tree.levels)


class BranchState(LayerCache):
    """A recurrent layer's state before each row of a tree, made from the state before the tree and the row's path."""

    is_state = final = of_tree = True  # final: the layer needs no state after each row

    def __init__(self, branches: Branches, cache: RecurrentCache):
        self.branches, self.cache, self.offset, self.shift = branches, cache, branches.offset, branches.shift
        self.limit = branches.limit
        self.rows: Any = None
        self.before: Any = None

    def convolved(self, rows: mx.array, taps: int) -> mx.array:
        """Return the convolution's input of one row per path, [n * T, taps, C], for new rows [n * T, 1, C]."""
        tree = self.branches.tree
        new = self.branches.by_sequence(rows)[:, :, 0]
        self.rows = self.cache.convolved(new, taps)
        back = tree.depth[..., None] - mx.arange(taps)[::-1]  # depths of the window's rows; negative: before the tree
        path = mx.take_along_axis(tree.ancestors, mx.clip(back, 0, tree.levels - 1), axis=-1)
        return along(self.rows, mx.where(back < 0, back, path) + taps - 1).flatten(0, 1)

    def state(self, replay: Replay, tape: Parts) -> mx.array:
        """Return the state before each row, [n * T, ...]. tape: of one row per path, [n * T, 1, ...] arrays."""
        self.before = self.cache.state(replay)
        tree, start = self.branches.tree, self.branches.by_row(self.before)
        above = tree.ancestors[..., :-1]
        path = [along(self.branches.by_sequence(rows)[:, :, 0], above).flatten(0, 1) for rows in tape]
        inside = (mx.arange(tree.levels - 1) < tree.depth[..., None]).flatten(0, 1)
        return replay(start, inside, *path)

    def advance(self, before: mx.array, after: mx.array, convolved: mx.array, tape: Parts) -> None:
        """Give the sequences' own cache the state before the tree and the rows' tape, in the order of rows."""
        own = [self.branches.by_sequence(rows)[:, :, 0] for rows in tape]
        self.cache.parts = (self.cache.offset, self.before, self.rows, *own)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None, as `RecurrentCache`."""
        return None


def hidden_of_tree(model: Any, layers: list[Any], tokens: mx.array, tree: RowTree) -> mx.array:
    """Return the target's hidden rows [n, T, H] of a tree of tokens [n, T]; its caches then await `keep_path`.

    Their positions are behind D rows, as after a verify of a path of D rows.
    """
    branches = Branches(tree, layers[0])
    hidden = model.hidden(tokens.reshape(-1, 1), [branches.of(c) for c in layers])
    offset = branches.base + tree.levels
    for c in layers:
        c.seek(offset, branches.limit + tree.levels)
    return branches.by_sequence(hidden[:, 0])
