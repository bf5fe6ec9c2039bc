"""Make the mask of a block drafter's rows over the slots of a cache, from positions alone."""

from typing import Any, NamedTuple

import mlx.core as mx


class Reach(NamedTuple):
    """What a layer's rows attend to; the block begins at position T.

    before: a row at T + j reads the context from T + j - before on; None: all of it.
    from_anchor: every row reads the context from T - before on.
    causal: rows read no later row of the block. bounded: a row reads no row of the block more than `before` later
    and, unless from_anchor, none more than `before` earlier.
    """

    before: int | None = None
    from_anchor: bool = False
    causal: bool = False
    bounded: bool = False


def block_mask(kv: Any, position: mx.array, rows: int, slots: int, reach: Reach) -> mx.array:
    """Return a boolean [n, 1, rows, slots]: the slots that each row of the block attends to within its reach.

    The mask is [n, 1, 1, slots] if all rows attend to the same slots. The block begins at `position`, int32 [n] or
    [1]. Slots are masked that have no position from `kv.start` to the block's end, as those of rejected rows.
    """
    first = position.reshape(-1, 1, 1, 1)
    end = first + rows
    queries = first + mx.arange(rows)[:, None]
    positions, ring = mx.arange(slots), getattr(kv, "ring", None)
    if ring is not None:  # the newest position before `end` in each slot, negative where there is none
        positions = (end - 1) - ((end - 1) - positions) % ring.turn
    seen = (positions >= kv.start) & (positions < end)
    if reach.causal:
        seen = seen & (positions <= queries)
    if reach.before is None:
        return seen
    near = positions >= (first if reach.from_anchor else queries) - reach.before
    if not reach.bounded:
        return seen & (near | (positions >= first))
    return seen & near & (positions <= queries + reach.before)
