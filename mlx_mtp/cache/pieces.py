"""Cut prompt caches into pieces, and join consecutive pieces into a cache.

Rows of keys and values can be cut anywhere. Everything else (recurrent states, wrapped windows, the heads' pending
rows) belongs to one position: a `Checkpoint`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from .growing import round_up
from .layer_cache import LayerCache, Parts, shapes_of
from .prompt_cache import PromptCache

ALIGNED = 256  # bytes to which packed arrays are aligned; kernels load words of up to 16 bytes


class Checkpoint(NamedTuple):
    """All of a prompt cache but the rows that `cut` returns; with those before `length`, decoding resumes there.

    whole: the arrays of caches without rows, by index among all caches. starts: `start` of every cache.
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
    """Return a checkpoint of a cache between generations, as copies that keep no other array alive."""
    backlog = [mx.concatenate(cache.backlog, axis=1)] if cache.backlog else []
    whole = {i: c.parts for i, c in enumerate(cache.caches) if not has_rows(c)}
    starts = [c.start for c in cache.caches]
    return packed_checkpoint(Checkpoint(cache.offset, cache.primed, cache.kept, backlog, whole, starts))


def packed_checkpoint(at: Checkpoint) -> Checkpoint:
    """Return a checkpoint with copies of its arrays, in one buffer per type."""
    arrays = iter(packed(at.arrays))
    kept, backlog = ([next(arrays) for _ in group] for group in (at.kept, at.backlog))
    whole = {i: tuple(next(arrays) for _ in parts) for i, parts in at.whole.items()}
    return at._replace(kept=kept, backlog=backlog, whole=whole)


def has_rows(c: LayerCache) -> bool:
    """Return whether a cache has rows that can be cut anywhere."""
    return not (c.is_state or c.wraps)


def cut(cache: PromptCache, rows: tuple[int, int], heads: tuple[int, int]) -> list[Parts]:
    """Return copies of the rows of each cache in a range of positions (first, end); () for a cache without such rows.

    rows: the range of the target's caches. heads: that of the heads' caches.
    """
    spans = [rows] * len(cache.layers) + [heads] * len(cache.heads)
    each = zip(cache.caches, spans, strict=True)
    return packed_rows([tuple(p[:, :, a:b] for p in c.parts) if has_rows(c) and a < b else () for c, (a, b) in each])


def packed_rows(rows: list[Parts]) -> list[Parts]:
    """Return copies of the rows of all caches, in one buffer per type."""
    arrays = iter(packed([part for parts in rows for part in parts]))
    return [tuple(next(arrays) for _ in parts) for parts in rows]


def packed(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return copies of arrays, of the same shapes and order, as views of one buffer per type.

    Metal limits the number of buffers.

    Views start at multiples of ALIGNED bytes; an array that occurs twice is copied once.
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
    """Return the number of buffers of arrays that were packed together: one per type, without empty arrays."""
    return len({array.dtype for array in arrays if array.size})


def join(blank: PromptCache, pieces: list[list[Parts]], at: Checkpoint, tokens: list[int], room: int) -> PromptCache:
    """Return a cache that holds `tokens`, made of consecutive pieces of `cut` from position 0 on.

    blank: a cache of the same layout, which stays as it is. at: the checkpoint after the last piece, at position
    len(tokens). room: least number of positions for which buffers have room.
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
    """Raise ValueError if a piece, read from a file, does not fit the shapes and types of `like`, a non-empty cache.

    at: the checkpoint at its end, None without one. tokens, primed: number of positions in the piece, of the target
    and of the heads.
    """
    spans = [tokens] * len(like.layers) + [primed] * len(like.heads)
    right = [_suits(parts, c, span) for parts, c, span in zip(rows, like.caches, spans, strict=True)]
    if at:
        right += [like.caches[i].fits(parts) or not (parts or i < len(like.layers)) for i, parts in at.whole.items()]
        right += [shapes_of(at.kept) == shapes_of(like.kept), len(at.starts) == len(like.caches)]
        right += [shapes_of([rows[:, :0]]) == shapes_of([like.backlog[0][:, :0]]) for rows in at.backlog]
        pending, unread = sum(rows.shape[1] for rows in at.backlog), at.length - at.primed
        right.append(not like.heads or pending == unread or (like.reach or unread) <= pending < unread)
    if not all(right):
        raise ValueError("its arrays do not fit this model's caches")


def _suits(parts: Parts, like: LayerCache, span: int) -> bool:
    """Return whether parts have the shapes that `cut` returns for `span` positions of this cache."""
    expected = like.parts if has_rows(like) and span > 0 else ()
    return shapes_of(parts) == [((*a.shape[:2], span, *a.shape[3:]), a.dtype) for a in expected]


def _padded(parts: tuple[mx.array, ...], rows: int) -> mx.array:
    """Concatenate parts [B, H, S, D] along S, padded with zeros to `rows`, which must not be fewer than they have."""
    like = parts[0]
    blank = mx.zeros((*like.shape[:2], rows - sum(part.shape[2] for part in parts), like.shape[3]), like.dtype)
    return mx.concatenate([*parts, blank], axis=2)
