"""Draw a token of each row from its n greatest logits, with the result of a draw from the whole row."""

import math
from typing import Any

import mlx.core as mx

from ._source import constants, launch, on_metal
from .verify_head import MOST_TOP, Top, draw_ref


def draw_top_ref(
    top: Top, key: mx.array, position: Any, *, temp: float, top_p: float, min_p: float, vocab_size: int
) -> mx.array:
    """Return the tokens that `draw_top` draws, with MLX's ops.

    top_p, then min_p, filter the n greatest logits at temperature 1; what remains is put into a row of -infinity, and
    a token is drawn from it at `temp`.
    """
    values, tokens, total = top
    logprobs = values - total[:, None]
    if 0 < top_p < 1:
        above = mx.cumsum(mx.exp(logprobs), axis=-1, inclusive=False)
        kept = (above < top_p).sum(axis=-1, keepdims=True)
        logprobs = mx.where(logprobs < mx.take_along_axis(logprobs, kept - 1, axis=-1), -math.inf, logprobs)
    if min_p > 0:
        lowest = logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
        logprobs = mx.where(logprobs < lowest, -math.inf, logprobs)
    rows = mx.full((len(values), vocab_size), -math.inf, logprobs.dtype)
    return draw_ref(mx.put_along_axis(rows, tokens, logprobs, axis=-1), key, position, temp)


def draw_top(
    top: Top, key: mx.array, position: Any, *, temp: float, top_p: float = 1.0, min_p: float = 0.0, vocab_size: int
) -> mx.array:
    """Return a token [M] int32 for each row, drawn from the n greatest of `vocab_size` logits, in one launch.

    top: as `verify_head_top` returns it: values [M, n] float32, sorted, their tokens [M, n] int32, and the logsumexp
        [M] of all logits; for n above 64 the reference runs.
    key, position: uint32 [2] and the position of row 0: a token gets the noise that `verify_head_draw` gives it.
    top_p, min_p: mlx-lm's filters, top_p first, of probabilities at temperature 1; 1 (or 0) and 0 for none.
    The reference draws the same tokens; on Metal probabilities are summed in their order. ValueError for temp <= 0.
    """
    values, tokens, total = top
    if temp <= 0:
        raise ValueError(f"temp={temp}: allowed is more than 0")
    if not on_metal() or values.shape[1] > MOST_TOP:
        return draw_top_ref(top, key, position, temp=temp, top_p=top_p, min_p=min_p, vocab_size=vocab_size)
    limits = 1.0 / temp, top_p if 0 < top_p < 1 else 1.0, math.log(min_p) if min_p > 0 else -math.inf
    inputs = {"values": values, "tokens": tokens, "total": total, "key": key}
    inputs |= {"position": mx.array(position).reshape(1).astype(mx.uint32), "limits": constants(mx.float32, *limits)}
    inputs["count"] = constants(mx.uint32, vocab_size)
    outputs, grid = {"drawn": ((len(values),), mx.int32)}, (32, len(values), 1)
    return launch("draw_top", inputs, outputs, template={}, grid=grid, group=(32, 1, 1))[0]
