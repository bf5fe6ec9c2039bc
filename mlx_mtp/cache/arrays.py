"""Keep the arrays that a layer of mlx-lm's assigns into its cache: states, or the last rows of a convolution.

They are known only after the last row of a pass. A verify therefore keeps those before it too; if it has rejected
rows, the accepted ones are read again from there (`decoding/again.py`).
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .layer_cache import LayerCache, OncePerPass, Parts


class StateCache(LayerCache, ArraysCache):
    """mlx-lm's ArraysCache of `count` arrays of one sequence (B = 1), with positions like `LinearKVCache`.

    parts: the arrays after the last row, [1, 0] for one that was never assigned. After a verify those before it come
           first. A pass continues from those after the last row: rejected rows must be undone before.
    """

    name = "arrays"
    is_state = rereads = True

    def __init__(self, count: int):
        self.count, self.once, self.lengths = count, OncePerPass(), None
        self.offset: Any = 0
        self.limit, self.parts = 0, ()
        self.assigned: dict[int, mx.array] = {}  # by the pass that is being built

    @property
    def newest(self) -> Parts:
        """The arrays after the last row that was read."""
        return self.parts[-self.count :]

    def __getitem__(self, i: Any) -> Any:
        stored = self.newest or (None,) * self.count
        found = [self.assigned.get(j, array) for j, array in enumerate(stored)]
        return [None if array is None or not array.size else array for array in found][i]

    def __setitem__(self, i: int, array: mx.array) -> None:
        self.assigned = {**self.assigned, i: array}  # a copy of this cache has the same dict

    def advance(self, N: int) -> None:
        """Do nothing: only some of mlx-lm's layers call this; `passed` counts the rows."""

    def passed(self, sequences: int, rows: int) -> None:
        before = self.newest or tuple(mx.zeros((sequences, 0)) for _ in range(self.count))
        after = tuple(self.assigned.get(i, array) for i, array in enumerate(before))
        self.parts = after if isinstance(self.offset, int) else (*before, *after)
        self.seek(self.offset + rows, self.limit + rows)

    def seek(self, offset: Any, limit: int) -> None:
        """Set the position. With a host integer, the arrays before the last verify are dropped."""
        self.offset, self.limit, self.assigned = offset, limit, {}
        if isinstance(offset, int):
            self.parts = self.newest

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None: rows are processed one after another and need no mask."""
        return None

    def check(self) -> None:
        if len(self.parts) != (self.count if self.offset else 0):
            raise ValueError("it has other arrays than its positions need")

    @property
    def config(self) -> dict:
        return {"window": self.name, "count": self.count}


def rereads(model: Any) -> bool:
    """Return whether rejected drafts cost a model a further pass: one of its caches is a `StateCache`."""
    return any(getattr(kind, "func", None) is StateCache for kind in model.windows())
