"""Compute the chain of drafts at every position of a text at once, as decoding computes it row by row.

Position i of every head reads the token at i + 1 and, at depth 0, the target's hidden row i; at depth j > 0 it reads
depth j-1's output at position i - 1, and its logits predict the token at i + 2. In decoding the tokens up to i + 1
are accepted ones or drafts. Chained heads attend to their own earlier rows. A recycled head, which drafts at depth
j from its own output, attends to its rows of depth 0 up to position i - j, which have read the target's hidden rows,
and behind them to one row of each depth up to j, those of the drafts in the same cycle.
"""

from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.utils import checkpoint as checkpointed

Parts = tuple[mx.array, ...]


class ChainCache:
    """Keys and values of one head at one depth, for rows [B, L] of packed documents.

    starts: int32 [B, L], the first position of each position's document in its row. window: number of positions that
    the head's attention reads; None for all. depth: of the draft. earlier: of a recycled head, its keys and values at
    each earlier depth. recycled: whether the head is.
    """

    offset = 0  # of the rotary embedding: all depths have the same positions

    def __init__(self, starts: mx.array, window: int | None, depth: int, earlier: list[Parts], *, recycled: bool):
        self.starts, self.window, self.depth, self.earlier, self.recycled = starts, window, depth, earlier, recycled
        self.parts: Parts = ()

    def update_and_fetch(self, *arrays: mx.array) -> Any:
        """Store keys, values and others of this depth; return them behind those of earlier depths."""
        self.parts = arrays
        return tuple(mx.concatenate(list(kind), axis=2) for kind in zip(*self.earlier, arrays, strict=True))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the boolean mask [B, 1, N, keys] of N = L positions; the other arguments are ignored.

        A position without earlier rows of its document attends to itself, so that its softmax is defined.
        """
        query, key = mx.arange(N)[:, None], mx.arange(N)[None]
        lag = self.depth if self.recycled else 0
        first = self.starts[..., None] + (0 if self.recycled else self.depth)
        seen = (key <= query - lag) & (key >= first)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        own = mx.broadcast_to(key == query, seen.shape)
        if lag == 0:
            return (seen | own)[:, None]
        inside = [(key == query - lag + depth) & (key >= first) for depth in range(1, lag)]
        return mx.concatenate([seen, *inside, own], axis=-1)[:, None]


def chain(
    model: Any, rows: mx.array, tokens: mx.array, starts: mx.array, depths: int, *, checkpoint: bool = False
) -> list[mx.array]:
    """Return the heads' outputs [B, L, H] of `depths` drafts, before the norm, for each position of packed documents.

    rows: the first head's input [B, L, H] from `capture`. tokens: int32 [B, L], the token after each position.
    starts: as in ChainCache. checkpoint: compute a depth again for its gradient instead of keeping its intermediate
    values. The output of depth j at position i is undefined where i - j precedes the document.
    """
    recycled, windows = model.spec.topology == "recycle", model.head_windows()
    outputs, hidden, earlier = list[mx.array](), rows, list[Parts]()
    for depth in range(depths):
        number = min(depth, len(windows) - 1)
        head: Any = model.mtp[number]
        call = partial(_head, head, starts, windows[number], depth, recycled)
        if checkpoint:
            call = checkpointed(head, call)
        flat = [array for parts in earlier for array in parts] if recycled else []
        output, *parts = call(model.embed(tokens, number), hidden, *flat)
        earlier.append(tuple(parts))
        outputs.append(output)
        feedback = head.feedback(output, hidden)
        hidden = mx.concatenate([mx.zeros_like(feedback[:, :1]), feedback[:, :-1]], axis=1)
    return outputs


def _head(
    head: Any,
    starts: mx.array,
    window: int | None,
    depth: int,
    recycled: bool,
    embeddings: mx.array,
    hidden: mx.array,
    *flat: mx.array,
) -> tuple[mx.array, ...]:
    """Return a head's output at one depth, and its keys, values and others there. flat: those of earlier depths."""
    kinds = len(flat) // max(depth, 1)
    earlier = [flat[i * kinds : (i + 1) * kinds] for i in range(depth)] if flat else []
    cache = ChainCache(starts, window, depth, earlier, recycled=recycled)
    output = head(embeddings, hidden, cache)
    return (output, *cache.parts)
