"""Cut prompt caches into pieces of their text, and join pieces that follow each other to a cache again.

Rows of keys and values can be cut anywhere. What is no row (recurrent states, wrapped windows, what the heads have
yet to read) belongs to one moment, and is noted for that.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from .growing import round_up
from .layer_cache import LayerCache, Parts, shapes_of
from .prompt_cache import PromptCache

ALIGNED = 256  # bytes between the beginnings of packed arrays: kernels load words of up to 16 bytes


class Checkpoint(NamedTuple):
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


def checkpoint_of(cache: PromptCache) -> Checkpoint:
    """Note what of a cache at rest is no row, as copies that keep nothing else alive."""
    backlog = [mx.concatenate(cache.backlog, axis=1)] if cache.backlog else []
    whole = {i: c.parts for i, c in enumerate(cache.caches) if not has_rows(c)}
    starts = [c.start for c in cache.caches]
    return packed_checkpoint(Checkpoint(cache.offset, cache.primed, cache.kept, backlog, whole, starts))


def packed_checkpoint(at: Checkpoint) -> Checkpoint:
    """Copy a moment's arrays into one buffer per type."""
    arrays = iter(packed(at.arrays))
    kept, backlog = ([next(arrays) for _ in group] for group in (at.kept, at.backlog))
    whole = {i: tuple(next(arrays) for _ in parts) for i, parts in at.whole.items()}
    return at._replace(kept=kept, backlog=backlog, whole=whole)


def has_rows(c: LayerCache) -> bool:
    """Tell whether a cache holds rows that can be cut anywhere."""
    return not (c.is_state or c.wraps)


def cut(cache: PromptCache, rows: tuple[int, int], heads: tuple[int, int]) -> list[Parts]:
    """Copy the rows of two spans of positions, the target's and the heads'; () of a cache without any."""
    spans = [rows] * len(cache.layers) + [heads] * len(cache.heads)
    return packed_rows(
        [
            tuple(part[:, :, a:b] for part in c.parts) if has_rows(c) and a < b else ()
            for c, (a, b) in zip(cache.caches, spans, strict=True)
        ]
    )


def packed_rows(rows: list[Parts]) -> list[Parts]:
    """Copy the rows of all caches into one buffer per type."""
    arrays = iter(packed([part for parts in rows for part in parts]))
    return [tuple(next(arrays) for _ in parts) for parts in rows]


def packed(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return copies of arrays that are views of one buffer per type: Metal limits the number of buffers.

    Each begins at a multiple of ALIGNED bytes. The same array given twice is copied once.
    """
    own = {id(array): array for array in arrays}
    views: dict[int, mx.array] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        begin, pieces, grain = 0, [], ALIGNED // dtype.size
        places = {}
        for key, array in own.items():
            if array.dtype == dtype:
                places[key], pad = begin, -array.size % grain
                pieces += [array.reshape(-1), *([mx.zeros(pad, dtype)] if pad else [])]
                begin += array.size + pad
        buffer = mx.concatenate(pieces) if len(pieces) > 1 else mx.contiguous(pieces[0])
        views |= {key: buffer[at : at + own[key].size].reshape(own[key].shape) for key, at in places.items()}
    return [views[id(array)] for array in arrays]


def buffers(arrays: Iterable[mx.array]) -> int:
    """Count the buffers of arrays that were packed together."""
    return len({array.dtype for array in arrays if array.size})


def join(blank: PromptCache, pieces: list[list[Parts]], at: Checkpoint, tokens: list[int], room: int) -> PromptCache:
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


def check_piece(rows: list[Parts], at: Checkpoint | None, like: PromptCache, tokens: int, primed: int) -> None:
    """Raise ValueError if a piece, read from a file, has other shapes than `like`, a cache that holds rows.

    tokens, primed: positions that it covers, of the target and of the heads.
    """
    spans = [tokens] * len(like.layers) + [primed] * len(like.heads)
    right = [_suits(parts, c, span) for parts, c, span in zip(rows, like.caches, spans, strict=True)]
    if at:
        right += [like.caches[i].fits(parts) or not (parts or i < len(like.layers)) for i, parts in at.whole.items()]
        right += [shapes_of(at.kept) == shapes_of(like.kept), len(at.starts) == len(like.caches)]
        right += [shapes_of([rows[:, :0]]) == shapes_of([like.backlog[0][:, :0]]) for rows in at.backlog]
        waiting, unread = sum(rows.shape[1] for rows in at.backlog), at.length - at.primed
        right.append(not like.heads or waiting == unread or (like.reach or unread) <= waiting < unread)
    if not all(right):
        raise ValueError("its arrays do not have the shapes of this model's caches")


def _suits(parts: Parts, like: LayerCache, span: int) -> bool:
    """Return whether parts have the shapes that `cut` returns for a span of positions of a cache like this one."""
    expected = like.parts if has_rows(like) and span > 0 else ()
    return shapes_of(parts) == [((*a.shape[:2], span, *a.shape[3:]), a.dtype) for a in expected]


def _padded(parts: tuple[mx.array, ...], rows: int) -> mx.array:
    """Join parts along their rows, with zeros behind up to so many."""
    like = parts[0]
    blank = mx.zeros((*like.shape[:2], rows - sum(part.shape[2] for part in parts), like.shape[3]), like.dtype)
    return mx.concatenate([*parts, blank], axis=2)
