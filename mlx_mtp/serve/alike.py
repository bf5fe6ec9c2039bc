"""Tell whether decoding leaves the keys and values that reading the same text would."""

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..layers.target import Target

LAST = 4  # rows that are compared, as many as a cycle with three drafts checks
NEAR = 4  # times as far from a plain step's as checked drafts' rows are: a chunk's are of that kind


def rows_alike(model: Target, blank: PromptCache, rows: int) -> bool:
    """Compare what a model computes of tokens read one by one, a few at once, and `rows` (more than 4) at once.

    True where a chunk's rows are as near to plain steps' as those of checked drafts, on which every answer rests:
    to the bit with MLX's own BLAS, to the rounding of float32 with one that rounds a row by how many there are.
    False for other types.

    blank: an empty cache.
    """
    chunk, first = _hidden(model, blank, (rows,)), rows - LAST
    if chunk.dtype != mx.float32:
        return False
    plain, checked = _hidden(model, blank, (first, *[1] * LAST)), _hidden(model, blank, (first, LAST))
    return _apart(plain, chunk) <= NEAR * _apart(plain, checked)


def _hidden(model: Target, blank: PromptCache, pieces: tuple[int, ...]) -> mx.array:
    """Read the same tokens in pieces; return the last hidden rows [1, LAST, H]."""
    cache, begun, found = blank.like_new(), 0, []
    for n in pieces:
        tokens = mx.arange(begun, begun + n) * 7 % model.vocab_size
        found.append(model.hidden(tokens[None], cache.layers))
        mx.eval(found[-1], cache.arrays)
        begun += n
    return mx.concatenate(found, axis=1)[:, -LAST:]


def _apart(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())
