"""Describe the rows of a pass that form a tree: each row continues the text of its parent."""

from typing import NamedTuple

import mlx.core as mx


class RowTree(NamedTuple):
    """The rows of a pass of n sequences, T each, as trees: row 0 is the newest certain token, the others are drafts.

    ancestors: int32 [n, T, D], at [s, i, d] the row at depth d of the path to row i, from the depth of i on row i
    itself. depth: int32 [n, T], the number of drafts on the path to each row, its own included: 0 to D - 1.
    parents: int32 [n, T - 1], the row that each of the rows 1, 2 ... continues.
    """

    ancestors: mx.array
    depth: mx.array
    parents: mx.array

    @classmethod
    def of(cls, parents: mx.array, levels: int) -> "RowTree":
        """Return the tree of T - 1 drafts per sequence, none of which is deeper than `levels`.

        parents: int32 [n, T - 1], the row that each of the rows 1, 2 ... continues: an earlier one.
        """
        n, drafts = parents.shape
        up = mx.concatenate([mx.zeros((n, 1), mx.int32), parents], axis=1)  # row 0 continues itself
        back = [mx.broadcast_to(mx.arange(drafts + 1), up.shape)]
        for _ in range(levels):
            back.append(mx.take_along_axis(up, back[-1], axis=1))
        steps = mx.stack(back, axis=-1)  # at j: the row j steps towards row 0
        depth = (steps > 0).sum(axis=-1).astype(mx.int32)
        left = mx.maximum(depth[..., None] - mx.arange(levels + 1), 0)
        return cls(mx.take_along_axis(steps, left, axis=-1), depth, parents)

    @property
    def rows(self) -> int:
        """Number of rows per sequence, T."""
        return self.depth.shape[1]

    @property
    def levels(self) -> int:
        """Number of rows of the longest path that fits, D."""
        return self.ancestors.shape[2]


def along(rows: mx.array, index: mx.array) -> mx.array:
    """Return rows [n, T, ...] at an index, int32 [n, ...]: [n, *index.shape[1:], ...]."""
    n, picked = rows.shape[0], index.reshape(index.shape[0], -1)
    found = mx.take_along_axis(rows, picked.reshape(n, -1, *[1] * (rows.ndim - 2)), axis=1)
    return found.reshape(n, *index.shape[1:], *rows.shape[2:])
