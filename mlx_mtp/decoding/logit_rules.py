"""Describe changes of logits as data, and apply those of several sequences to all their rows at once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..cache.tree import RowTree, along
from ..kernels import Changes, Paths, Words, change_logits, change_logits_ref
from .masks import Masks

ALL = 2**30  # a context size above every length


class BadWords(NamedTuple):
    """Byte strings that an answer must not contain, as what each token must not complete.

    texts: bytes of each token, by id. order: the ids in the order of their bytes. always: tokens that contain a
    string. ranges: by each start of a string, the ranges (first, end) of `order` with tokens that complete it; after
    any bytes no token is in two of them. longest: number of bytes of the longest string.
    """

    texts: list[bytes]
    order: np.ndarray
    always: Collection[int]
    ranges: dict[bytes, list[tuple[int, int]]]
    longest: int


@dataclass(frozen=True, eq=False)
class LogitRules:
    """Changes of one sequence's logits; also one of mlx-lm's logits processors, with the bits of mlx-lm's own.

    logit_bias and the penalties, with their context sizes: as of mlx-lm's `make_logits_processors`; context size 0:
    all tokens. banned: tokens that are excluded. allowed: if given, the only tokens. early: tokens that are excluded
    at positions below `until`, counted with the prompt. bad_words: excluded from what follows `prompt` tokens.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    banned: Collection[int] = ()
    allowed: Collection[int] = ()
    early: Collection[int] = ()
    until: int = 0
    bad_words: BadWords | None = None
    prompt: int = 0

    def __post_init__(self):
        if (self.repetition_penalty or 0) < 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: allowed is 0 or more")

    @property
    def penalties(self) -> list[tuple[float, int]]:
        """Each penalty with the number of newest tokens that it applies to; 0 tokens for a penalty that is off."""
        names = ("repetition", "presence", "frequency")
        given = [(getattr(self, f"{name}_penalty"), getattr(self, f"{name}_context_size")) for name in names]
        return [(penalty, min(size or ALL, ALL)) if penalty else (1.0, 0) for penalty, size in given]

    @property
    def context(self) -> int:
        """Number of newest tokens that the penalties need."""
        return max(size for _, size in self.penalties)

    def tail(self, history: np.ndarray) -> bytes:
        """Return the newest bytes of an answer, at most those that `bad_words` need."""
        if self.bad_words is None:
            return b""
        texts, longest, found = self.bad_words.texts, self.bad_words.longest, b""
        for token in history[self.prompt :][::-1]:
            if len(found) >= longest:
                break
            found = (texts[token] if token < len(texts) else b"") + found
        return found[-longest:]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits [1, V] after `tokens` [T], changed."""
        return changed(logits[None], [self], [np.array(tokens, np.int32)], None)[0]


NONE = LogitRules()


def changed(
    logits: mx.array,
    rules: Sequence[LogitRules | None],
    histories: Sequence[np.ndarray | None],
    drafts: mx.array | None,
    masks: Masks = None,
    tree: RowTree | None = None,
    *,
    fused: bool = True,
) -> mx.array:
    """Return logits [n, R, V] of R rows of n sequences, changed by each one's rules and mask; a kernel if `fused`.

    histories: per sequence its tokens that the host has read; row r follows them and the first r of its `drafts`
    [n, R - 1], in a tree the drafts on its path. Without rules and masks nothing changes.
    """
    if masks is None and not any(rules):
        return logits
    if tree is not None:
        return _by_path(logits, rules, histories, drafts, masks, tree)
    own = tuple(each or NONE for each in rules)
    paths = _paths(own, histories, drafts)
    return (change_logits if fused else change_logits_ref)(logits, changes_of(own, logits.shape[-1]), paths, masks)


def _by_path(
    logits: mx.array,
    rules: Sequence[LogitRules | None],
    histories: Sequence[np.ndarray | None],
    drafts: Any,
    masks: Masks,
    tree: RowTree,
) -> mx.array:
    """Return what `changed` does, for a tree: each row is the last one of a sequence with its path's drafts."""
    own = tuple(each or NONE for each in rules for _ in range(tree.rows))
    every = [tokens for tokens in histories for _ in range(tree.rows)]
    path = along(drafts, mx.maximum(tree.ancestors[..., 1:] - 1, 0)).flatten(0, 1)
    paths = _paths(own, every, path)._replace(first=tree.depth.flatten())
    mask, rows = None if masks is None else masks.flatten(0, 1)[:, None], logits.flatten(0, 1)[:, None]
    return change_logits_ref(rows, changes_of(own, logits.shape[-1]), paths, mask).reshape(logits.shape)


def _paths(own: Sequence[LogitRules], histories: Sequence[np.ndarray | None], drafts: Any) -> Paths:
    past = [np.zeros(0, np.int32) if tokens is None else tokens for tokens in histories]
    contexts = [
        tokens[len(tokens) - min(len(tokens), each.context) :] for each, tokens in zip(own, past, strict=True)
    ]
    tails = [np.frombuffer(each.tail(tokens), np.uint8) for each, tokens in zip(own, past, strict=True)]
    early = [max(0, each.until - len(tokens)) for each, tokens in zip(own, past, strict=True)]
    return Paths(
        mx.array(_aligned(contexts, -1, np.int32, 1)),
        None if drafts is None or drafts.size == 0 else drafts,
        mx.array(early, mx.int32),
        mx.array(_aligned(tails, 0, np.uint8, max(each.bad_words.longest if each.bad_words else 1 for each in own))),
        mx.array([*map(len, tails)], mx.int32),
    )


def _aligned(rows: Sequence[np.ndarray], fill: int, dtype: Any, least: int) -> np.ndarray:
    """Return rows of different lengths as one array, padded in front, with at least `least` columns."""
    found = np.full((len(rows), max(least, *map(len, rows))), fill, dtype)
    for row, values in zip(found, rows, strict=True):
        row[row.size - len(values) :] = values
    return found


@lru_cache(maxsize=8)
@np.errstate(over="ignore")  # above the greatest float32 is infinity, as in MLX
def changes_of(rules: tuple[LogitRules, ...], vocab: int) -> Changes:
    """Return the arrays of `change_logits` that stay the same while these sequences decode together.

    Raises ValueError for bad words of different tokenizers.
    """
    penalties, sizes = np.moveaxis(np.array([each.penalties for each in rules], np.float64), -1, 0)
    bias = bans = None
    if any(each.logit_bias for each in rules):
        values = np.full((len(rules), vocab), -0.0, np.float32)  # x + -0.0 is x, for every x
        for row, each in zip(values, rules, strict=True):
            ids = _within(each.logit_bias, vocab)
            row[ids] = [each.logit_bias[token] for token in ids.tolist()]
        bias = mx.array(values)
    flags = np.zeros((len(rules), 2, -(-vocab // 32) * 32), bool)
    for row, each in zip(flags, rules, strict=True):
        row[0] = bool(each.allowed)
        row[0, _within(each.allowed, vocab)] = False
        for ids in (each.banned, each.bad_words.always if each.bad_words else ()):
            row[0, _within(ids, vocab)] = True
        row[1, _within(each.early, vocab)] = True
    if flags.any():
        bans = mx.array(np.packbits(flags, axis=-1, bitorder="little").view(np.int32))
    words = _words([each.bad_words for each in rules], vocab)
    return Changes(mx.array(penalties.astype(np.float32)), mx.array(sizes.astype(np.int32)), bias, bans, words)


def _within(ids: Collection[int], vocab: int) -> np.ndarray:
    found = np.array([*ids], np.int64)
    return found[(found >= 0) & (found < vocab)]


def _words(words: Sequence[BadWords | None], vocab: int) -> Words | None:
    """Return the arrays of bad words; None if no token completes one of them."""
    given = [each for each in words if each is not None and each.ranges]
    if not given:
        return None
    texts, order = given[0].texts, given[0].order
    if any(each.texts is not texts and each.texts != texts for each in given):
        raise ValueError("bad_words: those of sequences that decode together must be of one tokenizer")
    keys, entries = bytearray(), list[list[tuple[int, int, int, int]]]()
    for each in words:
        entries.append([])
        for key, ranges in each.ranges.items() if each else ():
            entries[-1] += [(len(keys), len(key), *found) for found in ranges]
            keys += key
    most = max(map(len, entries))
    padded = [own + [(0, 1, 0, 0)] * (most - len(own)) for own in entries]  # with ranges of no token
    rank = np.full(max(vocab, len(texts)), len(texts), np.int32)
    rank[order] = np.arange(len(order))
    starts = np.zeros(rank.size + 1, np.int32)
    starts[1:] = np.cumsum([*map(len, texts), *[0] * (rank.size - len(texts))])
    joined = np.frombuffer(b"".join(texts) or b"\0", np.uint8)
    return Words(
        mx.array(np.array(padded, np.int32)),
        mx.array(np.frombuffer(bytes(keys), np.uint8)),
        mx.array(rank[:vocab]),
        mx.array(starts),
        mx.array(joined),
    )
