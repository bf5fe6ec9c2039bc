"""Change the logits of several sequences by bias, penalties, excluded tokens and words, and masks."""

from typing import NamedTuple

import mlx.core as mx

from ._source import Maybe, constants, floats, launch, on_metal

TILE, THREADS = 2048, 256
TO_SIGN = mx.array([*range(31, -1, -1)], mx.int32)  # shifts that move each bit of a word to its sign


class Words(NamedTuple):
    """Byte strings after which ranges of tokens are excluded.

    entries: int32 [n, E, 4]: a string's start and size in `keys`, and the range (first, end) of ranks.
    keys, texts: uint8 [.]; token t has the bytes texts[starts[t]:starts[t + 1]], starts int32 [V + 1] or more.
    rank: int32 [V], of each token in the order of tokens' bytes.
    """

    entries: mx.array
    keys: mx.array
    rank: mx.array
    starts: mx.array
    texts: mx.array


class Changes(NamedTuple):
    """What changes the logits of n sequences.

    penalties: float32 [n, 3]: repetition, presence, frequency. sizes: int32 [n, 3]: the number of newest tokens that
    each applies to, 0 for none. bias: float32 [n, V], -0.0 for none. bans: int32 [n, 2, words], bits of tokens that
    are excluded in all rows, and in early rows.
    """

    penalties: mx.array
    sizes: mx.array
    bias: Maybe = None
    bans: Maybe = None
    words: Words | None = None


class Paths(NamedTuple):
    """The tokens before each row: row r follows the context and the first r drafts of its sequence.

    context: int32 [n, C], the newest last, padded in front with -1. drafts: int32 [n, R - 1], None if R = 1.
    early: int32 [n], the number of first rows that are early. tails: uint8 [n, L], the newest bytes of the answer
    before the drafts, of which the last tail_sizes [n] int32 are valid. first: int32 [n], the number of drafts before
    row 0, of paths of their own, as the rows of a tree have; None: 0. Only MLX's ops read it.
    """

    context: mx.array
    drafts: Maybe
    early: mx.array
    tails: mx.array
    tail_sizes: mx.array
    first: Maybe = None

    def counts(self, i: int, rows: int) -> mx.array:
        """Return the number of drafts before each of the rows of sequence i, int32 [rows]."""
        return mx.arange(rows) if self.first is None else self.first[i] + mx.arange(rows)


def bits(words: mx.array, size: int) -> mx.array:
    """Return the first `size` bits of words, int32 [..., words], as bool [..., size]; bit t % 32 of word t // 32."""
    return ((words[..., None] << TO_SIGN) < 0).flatten(-2)[..., :size]


def masked(logits: mx.array, mask: Maybe) -> mx.array:
    """Return logits [..., V], -infinity for the tokens that a mask, int32 [..., words], forbids; None: itself."""
    return logits if mask is None else mx.where(bits(mask, logits.shape[-1]), logits, -mx.inf)


def change_logits_ref(logits: mx.array, changes: Changes, paths: Paths, mask: Maybe = None) -> mx.array:
    """Return what `change_logits` returns, with MLX's ops."""
    return masked(mx.stack([_changed(row, changes, paths, i) for i, row in enumerate(logits)]), mask)


def _changed(x: mx.array, changes: Changes, paths: Paths, i: int) -> mx.array:
    """Return the logits [R, V] of sequence i, changed."""
    (rows, vocab), drafts = x.shape, paths.drafts
    if changes.bias is not None:
        x = x + changes.bias[i].astype(x.dtype)
    tokens = paths.context[i] if drafts is None else mx.concatenate([paths.context[i], drafts[i]])
    counts = paths.counts(i, rows)
    back = paths.context.shape[1] + counts[:, None] - mx.arange(tokens.size)  # 1: the newest token of a row
    x = mx.pad(x, [(0, 0), (0, 1)])  # a column for what is not in a context
    within = [mx.where((back > 0) & (back <= size) & (tokens >= 0), tokens, vocab) for size in changes.sizes[i]]
    repetition, presence, frequency = changes.penalties[i].astype(x.dtype)
    chosen = mx.take_along_axis(x, within[0], axis=1)
    chosen = mx.where(chosen < 0, chosen * repetition, chosen / repetition)
    x = mx.put_along_axis(x, within[0], chosen, axis=1)
    x = mx.put_along_axis(x, within[1], mx.take_along_axis(x, within[1], axis=1) - presence, axis=1)
    x = x.at[mx.arange(rows)[:, None], within[2]].subtract(frequency)[:, :vocab]
    least = mx.finfo(x.dtype).min
    if changes.bans is not None:
        always, early = bits(changes.bans[i], vocab)
        x = mx.where(always | (early & (counts[:, None] < paths.early[i])), least, x)
    return x if changes.words is None else mx.where(_completing(changes.words, paths, i, rows), least, x)


def _completing(words: Words, paths: Paths, i: int, rows: int) -> mx.array:
    """Return which tokens are in a range of `words` after each row of sequence i, bool [rows, V]."""
    start, size, first, end = words.entries[i].T
    length = paths.tails.shape[1]
    far = mx.arange(1, length + 1)  # distances from the end, of each byte of a key
    own = mx.zeros(1, mx.int32) if paths.drafts is None else mx.pad(paths.drafts[i], (0, 1))  # the last has no effect
    starts = words.starts[own]
    before = mx.cumsum(words.starts[own + 1] - starts, inclusive=False)  # bytes of the drafts before each row
    at = before[paths.counts(i, rows)][:, None] - far
    draft = (before[:, None, None] <= at).sum(axis=0) - 1
    found = words.texts[mx.maximum(starts[mx.maximum(draft, 0)] + at - before[mx.maximum(draft, 0)], 0)]
    found = mx.where(at < 0, paths.tails[i][mx.clip(length + at, 0, length - 1)], found)
    valid = at >= -paths.tail_sizes[i]
    matches = mx.ones((rows, size.size), mx.bool_)
    for j in range(length):  # a byte of all entries at a time: memory does not grow with the longest one
        key = words.keys[mx.maximum(start + size - j - 1, 0)]
        matches = matches & (((found[:, j, None] == key) & valid[:, j, None]) | (j >= size))
    matches = matches.astype(mx.int32)
    ends = mx.zeros((rows, words.starts.size + 1), mx.int32)
    return mx.cumsum(ends.at[:, first].add(matches).at[:, end].subtract(matches), axis=1)[:, words.rank] > 0


def change_logits(logits: mx.array, changes: Changes, paths: Paths, mask: Maybe = None) -> mx.array:
    """Return logits [n, R, V] of R rows of n sequences, changed by bias, penalties, bans and masks, in one launch.

    The result has the bits that mlx-lm's logits processors give each row. An excluded token gets the dtype's minimum,
    which leaves a row of nothing else with probabilities. mask: int32 [n, R, words], bits of allowed tokens, at least
    one word per 32 tokens; the others get -infinity, after all else.
    """
    if not (on_metal() and floats(logits)) or paths.first is not None:
        return change_logits_ref(logits, changes, paths, mask)
    n, rows, vocab = logits.shape
    unread, words = constants(mx.int32, 0).reshape(1, 1, 1), changes.words
    inputs = {"logits": logits, "penalties": changes.penalties, "sizes": changes.sizes, "context": paths.context}
    inputs |= {"drafts": constants(mx.int32, 0).reshape(1, 1) if paths.drafts is None else paths.drafts}
    inputs |= {"bias": unread if changes.bias is None else changes.bias}
    inputs |= {"bans": unread if changes.bans is None else changes.bans, "early": paths.early}
    inputs |= {"mask": unread if mask is None else mask, "least": constants(mx.float32, mx.finfo(logits.dtype).min)}
    inputs |= {"tails": paths.tails, "tail_sizes": paths.tail_sizes}
    inputs |= words._asdict() if words else dict.fromkeys(Words._fields, unread)
    template = {"T": logits.dtype, "BIAS": changes.bias is not None, "BANS": changes.bans is not None}
    template |= {"MASK": mask is not None, "WORDS": words is not None}
    grid, outputs = (THREADS * -(-vocab // TILE), n * rows, 1), {"changed": (logits.shape, logits.dtype)}
    return launch("change_logits", inputs, outputs, template=template, grid=grid, group=(THREADS, 1, 1))[0]
