"""Compute tokens, draws, or the n greatest logits of an LM head, without writing all logits.

A threadgroup keeps the n greatest logits of its tile of the vocabulary, of equal ones the lowest index, and a second
launch merges the tiles. Logits have the bits of `verify_qmm` and `verify_gemv`, in the lane `matrix` those of
`matrix_qmm` and `matrix_gemv`. A NaN is never chosen, as in the argmax on Metal (a CPU takes the first one). If
nothing is greater than -infinity, the token is 0.
"""

from typing import Any

import mlx.core as mx

from ._matrix import ROWS_ONCE, launch_tiles, matrix_tile
from ._quantized import (
    SPLIT_ROWS,
    WEIGHTS_ONCE,
    Quantized,
    arrays,
    check_columns,
    format_template,
    lanes,
    small,
    stock_product,
)
from ._quantized import supported as supported_format
from ._source import DTYPES, Maybe, constants, inverse, launch, on_metal, row_groups
from .change_logits import masked
from .matrix_products import matrix_gemv, matrix_qmm, matrix_served
from .verify_gemv import supported as supported_product

Weights = Quantized | mx.array  # [N, K], quantized or not
Top = tuple[mx.array, mx.array, mx.array]
Noise = tuple[mx.array, mx.array, mx.array]  # key, position and 1 / temp

MOST_TOP = 64
DENSE_ROWS = 16  # rows whose sums a thread keeps for unquantized weights; quantized ones need more sums per row
LOGITS = 4096  # maximum logits in a threadgroup's memory
SIMDGROUPS = 8  # per threadgroup
UNREAD: tuple[Any, ...] = (mx.uint32, 0, 0), (mx.uint32, 0), (mx.float32, 0.0)  # the Noise where nothing is drawn
LEAST_COLUMNS = 8  # MLX passes a smaller bias in constant memory


def logits_ref(x: mx.array, weights: Weights, bias: Maybe = None, *, matrix: bool = False) -> mx.array:
    """Return logits [M, N] of x [M, K] by MLX's product or, for quantized weights, `stock_product`; plus the bias.

    matrix: by the products of the lane `matrix`.
    """
    if matrix:
        y = matrix_gemv(x, weights) if isinstance(weights, mx.array) else matrix_qmm(x, weights)[0]
        return y if bias is None else y + bias
    if isinstance(weights, mx.array):
        return x @ weights.T if bias is None else mx.addmm(bias, x, weights.T)
    y = stock_product(x, weights)
    return y if bias is None else y + bias


def draw_ref(logits: mx.array, key: mx.array, position: Any, temp: float) -> mx.array:
    """Return a token [M] int32 for each row i of logits [M, N], drawn from softmax(logits / temp) at position + i.

    Row i draws as mx.random.categorical does with the second half of the split of key + [0, position + i].
    """
    rows = mx.array(position).reshape(1).astype(mx.uint32) + mx.arange(len(logits), dtype=mx.uint32)
    keys = mx.vmap(mx.random.split)(key + mx.stack([mx.zeros_like(rows), rows], axis=1))[:, 1]
    noise = mx.vmap(lambda dice: mx.random.gumbel(logits.shape[1:], key=dice))(keys)
    return mx.argmax(logits.astype(mx.float32) * inverse(temp) + noise, axis=-1).astype(mx.int32)


def top_ref(logits: mx.array, n: int) -> Top:
    """Return the n greatest logits of each row, greatest first, their tokens, and the logsumexp [M] of all N logits.

    Logits are float32 [M, n], tokens int32 [M, n]; of equal logits the lower token is first.
    """
    logits = logits.astype(mx.float32)
    order = mx.argsort(-logits, axis=-1)[:, :n]  # stable: of equal ones the lowest index
    values = mx.take_along_axis(logits, order, axis=-1)
    return values, order.astype(mx.int32), mx.logsumexp(logits, axis=-1)


def verify_head_ref(x: mx.array, weights: Weights, bias: Maybe = None) -> mx.array:
    return mx.argmax(logits_ref(x, weights, bias), axis=-1).astype(mx.int32)


def tile(n: int) -> int:
    """Return the number of weight rows per tile, if the n greatest logits of each tile are kept."""
    return 128 if n <= 8 else 256 if n <= 16 else 512


def _product(x: mx.array, weights: Weights) -> tuple[str, dict, dict]:
    """Return the kernel for these weights, and its own inputs and template arguments."""
    if isinstance(weights, mx.array):
        template = {"T": x.dtype, "LANES": 4 if weights.shape[1] <= 64 else 32}
        return "verify_head_dense", {"w": weights.astype(x.dtype)}, template
    values, lanes_per_row = lanes(weights)
    template = {**format_template(weights, x.dtype), "VALUES": values, "LANES": lanes_per_row}
    return "verify_head", arrays(weights, x.dtype), template


def _verify_head_metal(
    x: mx.array,
    weights: Weights,
    bias: Maybe,
    n: int = 1,
    noise: Noise | None = None,
    mask: Maybe = None,
    with_sum: bool = False,
    split: bool = False,
    matrix: bool = False,
) -> list[mx.array]:
    """Return values and tokens [M, n] of each row's n greatest logits, with `noise` of logits / temp plus noise.

    with_sum: the values are [M, n + 1]; the last is the logsumexp.
    """
    x = x.astype(_dtype(x, weights, bias))
    size = min(tile(n), LOGITS // ROWS_ONCE) if matrix else tile(n)
    m, tiles = x.shape[0], -(-_columns(weights) // size)
    key, position, scale = noise or [constants(*unread) for unread in UNREAD]
    more = {"bias": x if bias is None else bias.astype(x.dtype), "key": key}
    more |= {"position": position, "inverse": scale, "n": constants(mx.int32, n)}
    more["mask"] = constants(mx.int32, 0).reshape(1, 1) if mask is None else mask
    outputs = {"values": ((m, tiles, n + with_sum), mx.float32), "indices": ((m, tiles, n), mx.int32)}
    template = {"TILE": size, "BIAS": bias is not None, "MASK": mask is not None, "SUM": with_sum}
    if matrix:
        part = matrix_tile(x, _columns(weights), weights, low=size > tile(1))
        groups = -(-m // part.rows), tiles, 1
        values, indices = launch_tiles("matrix_head", x, weights, outputs, part, groups, more, template)
    else:
        registers = SPLIT_ROWS if split else DENSE_ROWS if isinstance(weights, mx.array) else WEIGHTS_ONCE
        groups, template["ROWS"] = row_groups(m, min(registers, LOGITS // size))
        op, inputs, form = _product(x, weights)
        grid, group = (32 * groups, SIMDGROUPS * tiles, 1), (32, SIMDGROUPS, 1)
        inputs |= {"x": x, **more}
        values, indices = launch(op, inputs, outputs, template={**form, **template}, grid=grid, group=group)
    return launch(
        "verify_head_merge",
        {"values": values, "indices": indices},
        {"best": ((m, n + with_sum), mx.float32), "tokens": ((m, n), mx.int32)},
        template={"SUM": with_sum},
        grid=(32 * SIMDGROUPS * m, 1, 1),
        group=(32 * SIMDGROUPS, 1, 1),
    )


def _columns(weights: Weights) -> int:
    return (weights if isinstance(weights, mx.array) else weights.scales).shape[0]


def _dtype(x: mx.array, weights: Weights, bias: Maybe) -> mx.Dtype:
    dtype = weights.dtype(x) if isinstance(weights, Quantized) else mx.result_type(x, weights)
    return dtype if bias is None else mx.result_type(mx.zeros(0, dtype), bias)


def supported(x: mx.array, weights: Weights, bias: Maybe = None) -> bool:
    """Return whether the kernels support these: a float type, at least one row and 8 tokens.

    Quantized weights need a known format, a bias that does not change the type, and not to be `small`; others [N, K]
    need K < 16 N.
    """
    if _columns(weights) < LEAST_COLUMNS or x.size == 0:
        return False
    if isinstance(weights, mx.array):
        n, k = weights.shape
        return _dtype(x, weights, bias) in DTYPES and k < 16 * n and supported_product(x, weights, bias)
    same = _dtype(x, weights, bias) == weights.dtype(x)
    return same and supported_format(x, weights) and not small(weights)


def _launches(x: mx.array, weights: Weights, bias: Maybe, matrix: bool) -> bool:
    """Return whether kernels choose from the products of these, in the lane `matrix` or not."""
    served = not matrix or isinstance(weights, Quantized) or matrix_served(x, weights, _dtype(x, weights, bias))
    return on_metal() and supported(x, weights, bias) and served


def _check(x: mx.array, weights: Weights, bias: Maybe, mask: Maybe = None) -> None:
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}; it must be (M, K)")
    if isinstance(weights, Quantized):
        check_columns(x, weights)
    elif weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"x has shape {x.shape} and the weights {weights.shape}; they must be (M, K) and (N, K)")
    if bias is not None and bias.shape != (_columns(weights),):
        raise ValueError(f"bias has shape {bias.shape}; it must be ({_columns(weights)},), one per row of weights")
    if mask is not None and (mask.shape[0] != len(x) or 32 * mask.shape[1] < _columns(weights)):
        raise ValueError(f"mask has shape {mask.shape}; it must be ({len(x)}, {-(-_columns(weights) // 32)} or more)")


def verify_head(
    x: mx.array,
    weights: Weights,
    bias: Maybe = None,
    *,
    mask: Maybe = None,
    split: bool = False,
    matrix: bool = False,
) -> mx.array:
    """Return the token [M] int32 of the greatest logit of each row x [M, K]; of equal ones the lowest.

    weights: Quantized, or [N, K] float16, bfloat16 or float32; bias [N]. mask: as in `masked`. split: at most 4 rows
    share a request of the weights. matrix: whether logits are those of the lane `matrix`. Where `supported` is False,
    and without Metal, MLX's own product and argmax run.
    Raises ValueError for shapes that do not match.
    """
    _check(x, weights, bias, mask)
    if not _launches(x, weights, bias, matrix):
        return mx.argmax(masked(logits_ref(x, weights, bias, matrix=matrix), mask), axis=-1).astype(mx.int32)
    return _verify_head_metal(x, weights, bias, mask=mask, split=split, matrix=matrix)[1][:, 0]


def greatest_logit(
    x: mx.array, weights: Weights, bias: Maybe = None, *, split: bool = False, matrix: bool = False
) -> mx.array:
    """Return the logit, float32 [M], of the token that `verify_head` returns, by the same launches."""
    _check(x, weights, bias)
    if not _launches(x, weights, bias, matrix):
        return logits_ref(x, weights, bias, matrix=matrix).astype(mx.float32).max(axis=-1)
    return _verify_head_metal(x, weights, bias, split=split, matrix=matrix)[0][:, 0]


def verify_head_draw(
    x: mx.array,
    weights: Weights,
    key: mx.array,
    position: Any,
    temp: float,
    bias: Maybe = None,
    *,
    mask: Maybe = None,
    split: bool = False,
    matrix: bool = False,
) -> mx.array:
    """Return a token [M] int32 for each row i of x [M, K], drawn from softmax(logits / temp) at position + i.

    key: uint32 [2]; row i uses the second half of the split of key + [0, position + i], and the noise of each token
        is that of mx.random.gumbel. position: an integer or int32 [] or [1].
    weights, bias [N], mask, split, matrix: as in `verify_head`. Raises ValueError for shapes that do not
        match and temp <= 0.
    """
    _check(x, weights, bias, mask)
    if temp <= 0:
        raise ValueError(f"temp={temp}: allowed is more than 0")
    if not _launches(x, weights, bias, matrix):
        return draw_ref(masked(logits_ref(x, weights, bias, matrix=matrix), mask), key, position, temp)
    noise = (key, mx.array(position).reshape(1).astype(mx.uint32), constants(mx.float32, inverse(temp)))
    return _verify_head_metal(x, weights, bias, noise=noise, mask=mask, split=split, matrix=matrix)[1][:, 0]


def verify_head_top(
    x: mx.array, weights: Weights, n: int, bias: Maybe = None, *, split: bool = False, matrix: bool = False
) -> Top:
    """Return the n greatest logits [M, n] float32 of each row x [M, K], descending, their tokens, and a logsumexp.

    The tokens are int32 [M, n], of equal logits the lower token first; the logsumexp [M] float32 is of all logits.
    weights, bias, split, matrix: as in `verify_head`. Raises ValueError for shapes that do not match and for an n
    above 64 or N, or below 1.
    """
    _check(x, weights, bias)
    if not 1 <= n <= min(MOST_TOP, _columns(weights)):
        raise ValueError(f"n={n}: allowed is 1 to {min(MOST_TOP, _columns(weights))}")
    if not _launches(x, weights, bias, matrix):
        return top_ref(logits_ref(x, weights, bias, matrix=matrix), n)
    values, tokens = _verify_head_metal(x, weights, bias, n, with_sum=True, split=split, matrix=matrix)
    return values[:, :n], tokens, values[:, n]
