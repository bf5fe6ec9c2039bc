"""Compute the chain of drafts at every position of a text at once, as decoding computes it row by row.

Position i of every head reads the token at i + 1 and, at depth 0, the target's hidden row i; at depth j > 0 it reads
depth j-1's output at position i - 1, and its logits predict the token at i + 2. In decoding the tokens up to i + 1 are
accepted ones or equal drafts. Chained heads attend to their own earlier rows. A recycled head, which drafts at depth
j from its own output, attends to its rows of depth 0 up to position i - j, which have read the target's hidden rows,
and behind them to one row of each depth up to j, those of the drafts in the same cycle.
"""

from typing import Any

import mlx.core as mx


class ChainCache:
    """Keys and values of one head for all depths that it computes, for rows [B, L] of packed documents.

    starts: int32 [B, L], the first position of each position's document in its row. window: number of positions that
    the head's attention reads; None for all. recycled: later depths attend to the rows of earlier ones.
    """

    offset = 0  # of the rotary embedding: all depths have the same positions

    def __init__(self, starts: mx.array, window: int | None, *, recycled: bool):
        self.starts, self.window, self.recycled = starts, window, recycled
        self.parts: list[tuple[mx.array, ...]] = []
        self.depth = 0

    def at(self, depth: int) -> "ChainCache":
        """Set the depth that the next call of the head computes."""
        self.depth = depth
        return self

    def update_and_fetch(self, *arrays: mx.array) -> Any:
        """Append the keys, values and other rows of the current depth; return those of all depths so far."""
        self.parts = [*(self.parts if self.recycled else []), arrays]
        return tuple(mx.concatenate(kind, axis=2) for kind in zip(*self.parts, strict=True))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the boolean mask [B, 1, N, keys] of the current depth; the other arguments are ignored."""
        query, key = mx.arange(N)[:, None], mx.arange(N)[None]
        lag = self.depth if self.recycled else 0
        first = self.starts[..., None] + (0 if self.recycled else self.depth)
        seen = (key <= query - lag) & (key >= first)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        own = mx.broadcast_to(key == query, seen.shape)
        if lag == 0:
            return (seen | own)[:, None]
        behind = [mx.broadcast_to(key == query - lag + depth, seen.shape) for depth in range(1, lag)]
        inside = [mask & (key >= self.starts[..., None]) for mask in behind]
        return mx.concatenate([seen, *inside, own], axis=-1)[:, None]


def chain(model: Any, rows: mx.array, tokens: mx.array, starts: mx.array, depths: int) -> list[mx.array]:
    """Return the heads' outputs [B, L, H] of `depths` drafts, before the norm, for each position of packed documents.

    rows: the first head's input [B, L, H] from `capture`. tokens: int32 [B, L], the token after each position.
    starts: as in ChainCache. The output of depth j at position i is undefined where i - j precedes the document.
    """
    recycled = model.spec.topology == "recycle"
    caches = [ChainCache(starts, window, recycled=recycled) for window in model.head_windows()]
    outputs, hidden = [], rows
    for depth in range(depths):
        number = min(depth, len(caches) - 1)
        head = model.mtp[number]
        output = head(model.embed(tokens, number), hidden, caches[number].at(depth))
        outputs.append(output)
        feedback = head.feedback(output, hidden)
        hidden = mx.concatenate([mx.zeros_like(feedback[:, :1]), feedback[:, :-1]], axis=1)
    return outputs
