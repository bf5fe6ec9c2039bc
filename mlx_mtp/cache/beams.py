"""Continue the texts of n sequences in several ways each, in copies of their caches: the paths of a draft tree."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .growing import round_up
from .layer_cache import OncePerPass
from .slots import Span, pooled


def branched(caches: Sequence[Any], index: mx.array, offset: mx.array, rows: int) -> list[Any]:
    """Return copies of caches for m texts, of which text i continues that of sequence `index[i]`, int32 [m].

    The given caches are not written. The price is a copy of keys and values per text and level.
    offset: position of each sequence's next row, int32 [n]. rows: maximum number of rows that the copies read.
    """
    span, once, at = Span(range(index.size), index.size), OncePerPass(), of_texts(offset, index)
    return [_branched(c, index, at, rows, span, once) for c in caches]


def of_texts(rows: mx.array, index: mx.array) -> mx.array:
    """Return rows [n, ...] of sequences for each text, [m, ...]."""
    return mx.take(rows, index, axis=0)


def _branched(cache: Any, index: mx.array, offset: mx.array, rows: int, span: Span, once: OncePerPass) -> Any:
    made, parts = pooled(cache, getattr(cache, "ring", None)), cache.parts
    made.once, made.context, made.shift = once, cache.context, cache.shift
    if isinstance(cache.shift, mx.array):
        made.shift = of_texts(cache.shift, index)
    if not cache.is_state:
        assert not cache.fresh, "a drafter's caches have no rows of a tree"
        slots = cache.span.view if hasattr(cache, "span") else slice(None)
        parts, made.span = [part[slots, :, : round_up(cache.limit + rows)] for part in parts], span
        if isinstance(cache.start, mx.array) or cache.start:
            starts = mx.broadcast_to(mx.array(cache.start).reshape(-1), (len(parts[0]),))
            made.start = of_texts(starts, index).reshape(-1, 1, 1, 1)
    made.parts = tuple([of_texts(part, index) for part in parts])
    made.seek(offset, cache.limit)
    return made
