"""Compute the drafts of all depths at every position of a text at once; decoding computes them one after another.

Depth j is the index of a draft in its cycle, from 0. Position i at every depth reads the token at i + 1, and its
logits predict the token at i + 2. It also reads the target's hidden row i at depth 0, and at depth j > 0 what the
head's `feedback` returned at depth j - 1 and position i - 1. In decoding the tokens up to i + 1 are accepted ones or
drafts. Heads of a chain attend to their own earlier rows. A recycled head, which computes all depths, attends to its
rows of depth 0 up to position i - j, which have read the target's hidden rows, and after them to one row of each
depth from 1 to j: the drafts of the same cycle.
"""

from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.utils import checkpoint as checkpointed

Parts = tuple[mx.array, ...]


class ChainCache:
    """The cache that a head's block receives at one depth, for B rows of L positions of joined documents.

    starts: int32 [B, L], the index in its row where each position's document begins. window: number of last positions
    that the head's attention reads; None for all. depth: index of the draft in its cycle, from 0. earlier: of a
    recycled head, the `parts` of each earlier depth; empty for other heads. recycled: whether one head computes all
    depths. parts: the arrays that the block has stored at this depth, () before.
    """

    offset = 0  # of the rotary embedding: all depths have the same positions

    def __init__(self, starts: mx.array, window: int | None, depth: int, earlier: list[Parts], *, recycled: bool):
        self.starts, self.window, self.depth, self.earlier, self.recycled = starts, window, depth, earlier, recycled
        self.parts: Parts = ()

    def update_and_fetch(self, *arrays: mx.array) -> Any:
        """Store this depth's arrays (keys, values, ...) [B, heads, L, D]; return each appended to earlier depths'.

        The result is a tuple of one array for each argument, joined along axis 2, depth 0 first.
        """
        self.parts = arrays
        return tuple(mx.concatenate(list(kind), axis=2) for kind in zip(*self.earlier, arrays, strict=True))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask of the attention, bool [B, 1, N, keys], True where a position attends; N is L.

        keys is N, or for a recycled head N for each depth up to this one. The other arguments are ignored. Every
        position attends to its own row of this depth, so that its softmax is defined.
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
    """Return a list of the outputs [B, L, H] of `depths` drafts, before the head's norm; the first draft's is first.

    The last of model.mtp computes all depths for which there is no head. rows: the first head's input [B, L, H] from
    `model.capture`. tokens: int32 [B, L], the token after each position. starts: as in ChainCache. checkpoint:
    compute a depth again for its gradient instead of keeping its intermediate values. The output of depth j at
    position i is meaningless where position i - j is not in the document of position i.
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
    """Return a head's output [B, L, H] at one depth, followed by the `parts` of its cache (keys, values, ...).

    embeddings, hidden: the head's inputs [B, L, H]. flat: of a recycled head, the parts of all earlier depths.
    """
    kinds = len(flat) // max(depth, 1)
    earlier = [flat[i * kinds : (i + 1) * kinds] for i in range(depth)] if flat else []
    cache = ChainCache(starts, window, depth, earlier, recycled=recycled)
    output = head(embeddings, hidden, cache)
    return (output, *cache.parts)
