"""Cut prompt caches into pieces of their text, and join pieces that follow each other to a cache again.

Rows of keys and values can be cut anywhere. What is no row (recurrent states, wrapped windows, what the heads have
yet to read) belongs to one moment, and is noted for that.
"""

from typing import NamedTuple

import mlx.core as mx

from .growing import round_up
from .layer_cache import LayerCache, Parts
from .prompt_cache import PromptCache


class Moment(NamedTuple):
    """All of a prompt cache at rest that is no row: to go on from its `length` with the rows of the pieces before.

    whole:  by the place of a cache among all, its parts, if they are no rows. starts: `start` of every cache.
    """

    length: int
    primed: int
    kept: list[mx.array]
    backlog: list[mx.array]
    whole: dict[int, Parts]
    starts: list[int]

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.kept, *self.backlog, *(part for parts in self.whole.values() for part in parts)]


def moment(cache: PromptCache) -> Moment:
    """Note what of a cache at rest is no row, as copies that keep nothing else alive."""
    backlog = [mx.contiguous(mx.concatenate(cache.backlog, axis=1))] if cache.backlog else []
    whole = {i: c.parts for i, c in enumerate(cache.caches) if not has_rows(c)}
    kept = [mx.contiguous(row) for row in cache.kept]
    return Moment(cache.offset, cache.primed, kept, backlog, whole, [c.start for c in cache.caches])


def has_rows(c: LayerCache) -> bool:
    """Tell whether a cache holds rows that can be cut anywhere."""
    return not (c.is_state or c.wraps)


def cut(cache: PromptCache, rows: tuple[int, int], heads: tuple[int, int]) -> list[Parts]:
    """Copy the rows of two spans of positions, the target's and the heads'; () of a cache without any."""
    spans = [rows] * len(cache.layers) + [heads] * len(cache.heads)
    return [
        tuple(mx.contiguous(part[:, :, a:b]) for part in c.parts) if has_rows(c) and a < b else ()
        for c, (a, b) in zip(cache.caches, spans, strict=True)
    ]


def join(blank: PromptCache, pieces: list[list[Parts]], at: Moment, tokens: list[int], room: int) -> PromptCache:
    """Make a cache that holds `tokens` [at.length], of pieces that follow each other from position 0 on.

    blank: an empty cache of the same layout. room: positions that it will hold in the end.
    """
    cache = blank.like_new()
    for i, c in enumerate(cache.caches):
        c.start = at.starts[i]
        rows = [piece[i] for piece in pieces if piece[i]]
        if not has_rows(c):
            c.parts = at.whole[i]
        elif rows:
            c.parts = tuple(_padded(parts, round_up(max(room, at.length))) for parts in zip(*rows, strict=True))
    cache.primed, cache.kept, cache.backlog = at.primed, list(at.kept), list(at.backlog)
    cache.settle(list(tokens))
    return cache


def _padded(parts: tuple[mx.array, ...], rows: int) -> mx.array:
    """Join parts along their rows, with zeros behind up to so many."""
    like = parts[0]
    blank = mx.zeros((*like.shape[:2], rows - sum(part.shape[2] for part in parts), like.shape[3]), like.dtype)
    return mx.concatenate([*parts, blank], axis=2)
