"""Choose a token in every row of logits of several sequences, each with its own sampling options, without a sort."""

import math
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from ._source import DTYPES, inverse, launch, on_metal

LOW = {mx.float32: 0, mx.float16: 13, mx.bfloat16: 16}  # bits of a float32 that a logit's type lacks
THREADS = 1024  # maximum per row
LEAST_VALUES = 8  # MLX passes fewer values in constant memory


class RowOptions(Protocol):
    """Sampling options with mlx-lm's names; `greedy`: whether the likeliest token is always taken."""

    @property
    def greedy(self) -> bool: ...
    @property
    def temp(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def min_tokens_to_keep(self) -> int: ...
    @property
    def xtc_probability(self) -> float: ...
    @property
    def xtc_threshold(self) -> float: ...
    @property
    def xtc_special_tokens(self) -> tuple[int, ...]: ...


def filtered(logprobs: mx.array, options: RowOptions, coins: mx.array) -> mx.array:
    """Return logprobs [R, V] after mlx-lm's filters, -infinity for a removed token.

    coins: uint32 [R, 2], the keys that decide in which rows XTC applies.
    """
    if 0 < options.top_p < 1:
        logprobs = apply_top_p(logprobs, options.top_p)
    if options.min_p > 0:
        logprobs = apply_min_p(logprobs, options.min_p, options.min_tokens_to_keep)
    if options.xtc_probability > 0:
        # mlx-lm's filter with probability 1; the coin is drawn here, with a key of the position.
        cut = apply_xtc(logprobs, 1.0, options.xtc_threshold, list(options.xtc_special_tokens))
        tossed = mx.vmap(lambda key: mx.random.uniform(key=key))(coins)
        logprobs = mx.where(tossed[:, None] < options.xtc_probability, cut, logprobs)
    if options.top_k > 0:
        logprobs = apply_top_k(logprobs, options.top_k)
    return logprobs


def draw_rows_ref(logits: mx.array, options: RowOptions, key: mx.array, position: mx.array) -> mx.array:
    """Return the tokens [R] int32 that a sequence's options choose in its rows of logits [R, V].

    Row r is drawn with the key of position + r, or of position r of several; key uint32 [2], position uint32 [], [R].
    """
    at = position if position.ndim else position + mx.arange(len(logits), dtype=mx.uint32)
    return mx.argmax(draw_scores(logits, options, key, at), axis=-1).astype(mx.int32)


def draw_scores(
    logits: mx.array,
    options: RowOptions,
    key: mx.array,
    at: mx.array,
    tokens: mx.array | None = None,
    vocab_size: int = 0,
) -> mx.array:
    """Return float32 [R, V], the greatest of which is the token that options choose in rows of logits [R, V].

    They contain the noise of a position. at: uint32 [R], position of each row, or [1] of all. key: uint32 [2].
    tokens: ids, int32 [R, V], of logits of some of `vocab_size` tokens; None: of all.
    """
    if options.greedy:
        return logits.astype(mx.float32)
    vocab_size = logits.shape[-1] if tokens is None else vocab_size
    keys = mx.vmap(mx.random.split)(key + mx.stack([mx.zeros_like(at), at], axis=-1))
    logprobs = filtered(logits - mx.logsumexp(logits, axis=-1, keepdims=True), options, keys[:, 0])
    noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys[:, 1])
    if tokens is not None:
        noise = mx.take_along_axis(mx.broadcast_to(noise, (len(tokens), vocab_size)), tokens, axis=-1)
    return logprobs.astype(mx.float32) * inverse(options.temp) + noise


def choose_rows_ref(logits: mx.array, samplings: Sequence[RowOptions], key: mx.array, position: mx.array) -> mx.array:
    """Return the tokens of `choose_rows` by MLX's ops: filters read log-probabilities in the type of the logits."""
    if all(options.greedy for options in samplings):
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    sequences = zip(logits, samplings, key, position.astype(mx.uint32), strict=True)
    return mx.stack([draw_rows_ref(*each) for each in sequences])


def option_row(options: RowOptions) -> tuple[float, ...]:
    """Return the options as eight numbers, in the order of `choose_rows.metal`."""
    if options.greedy:
        return 0.0, 1.0, -math.inf, 1, 0.0, 0.0, 0, 0
    top_p = options.top_p if 0 < options.top_p < 1 else 1.0
    log_min_p = math.log(options.min_p) if options.min_p > 0 else -math.inf
    xtc = options.xtc_probability, options.xtc_threshold
    return inverse(options.temp), top_p, log_min_p, options.min_tokens_to_keep, *xtc, options.top_k, 0


def choose_rows(
    logits: mx.array, samplings: Sequence[RowOptions], key: mx.array, position: mx.array, *, fused: bool = True
) -> mx.array:
    """Return a token [n, R] int32 for each row of logits [n, R, V], by the options of its sequence, in one launch.

    key: uint32 [n, 2]; position: int32 or uint32 [n], of each sequence's first row, or [n, R], of each row, which
    MLX's ops read. Row r draws with the key
    + [0, position + r]: the first half of its split decides whether XTC applies, the second is the noise's.
    Filters are mlx-lm's, in its order: top_p, min_p, XTC, top_k; the probabilities are of float32 logits at
    temperature 1, and of equal logits top_k and min_tokens_to_keep keep the lowest tokens. Greedy rows have none.
    Of logits so large that scores have no bits for the noise, the greatest is subtracted. A NaN is never chosen; if
    nothing is greater than -infinity, the token is 0. Without Metal, unless `fused`, and for fewer than 8 logits
    `choose_rows_ref` runs.
    """
    chain = position.ndim == 1
    if not (fused and chain and on_metal() and logits.dtype in DTYPES and logits.size >= LEAST_VALUES):
        return choose_rows_ref(logits, samplings, key, position)
    n, rows, vocab_size = logits.shape
    threads = min(THREADS, 32 * -(-vocab_size // 32))
    kept = [tuple(options.xtc_special_tokens) if options.xtc_probability > 0 else () for options in samplings]
    specials = max(LEAST_VALUES, *map(len, kept))
    special = [(*tokens, *[-1] * (specials - len(tokens))) for tokens in kept]
    inputs = {"logits": logits, "key": key, "position": position.view(mx.uint32)}
    inputs["options"] = mx.array([number for options in samplings for number in option_row(options)], mx.float32)
    inputs["special"] = mx.array([token for tokens in special for token in tokens], mx.int32)
    outputs, grid = {"tokens": ((n, rows), mx.int32)}, (threads * n * rows, 1, 1)
    template = {"T": logits.dtype, "LOW": LOW[logits.dtype]}
    return launch("choose_rows", inputs, outputs, template=template, grid=grid, group=(threads, 1, 1))[0]
