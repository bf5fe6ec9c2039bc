"""Take an LM head straight to tokens, a draw, or the first n; no logits are written.

Of each tile of the vocabulary a threadgroup keeps the first n, greatest first and of equal ones the lowest index, and
a second launch merges the tiles. Logits have the bits of `verify_qmm` and `verify_gemv`; a NaN is never chosen (so on
Metal's argmax; on a CPU's the first NaN is) unless nothing is greater than -infinity, where the token is 0.
"""

from typing import Any

import mlx.core as mx

from ._quantized import SPLIT_ROWS, WEIGHTS_ONCE, Quantized, arrays, check_columns, format_template, lanes, small
from ._quantized import supported as supported_format
from ._source import DTYPES, Maybe, constants, launch, on_metal, row_groups
from .verify_gemv import supported as supported_product

Weights = Quantized | mx.array  # [N, K], quantized or not
Top = tuple[mx.array, mx.array, mx.array]
Noise = tuple[mx.array, mx.array, mx.array]  # key, position and 1 / temp

MOST_TOP = 64
DENSE_ROWS = 16  # that a thread keeps sums of in registers; of quantized weights it has other sums besides
LOGITS = 4096  # that a group of threads keeps
SIMDGROUPS = 8  # in a group of threads
UNREAD = (mx.uint32, 0, 0), (mx.uint32, 0), (mx.float32, 0.0)  # the Noise where nothing is drawn
LEAST_COLUMNS = 8  # of fewer a bias is not in device memory


def logits_ref(x: mx.array, weights: Weights, bias: Maybe = None) -> mx.array:
    """Compute logits [M, N] of x [M, K] by MLX's own product."""
    if isinstance(weights, mx.array):
        return x @ weights.T if bias is None else mx.addmm(bias, x, weights.T)
    w, scales, biases = weights.w, weights.scales, weights.biases
    y = mx.quantized_matmul(x, w, scales=scales, biases=biases, transpose=True, **weights.format)
    return y if bias is None else y + bias


def draw_ref(logits: mx.array, key: mx.array, position: Any, temp: float) -> mx.array:
    """Draw from each row i of logits [M, N] as mx.random.categorical does, by half of the key of position + i."""
    first, drawn = mx.array(position).reshape(1).astype(mx.uint32), []
    for i, row in enumerate(logits.astype(mx.float32) * (1.0 / temp)):
        dice = mx.random.split(key + mx.pad(first + i, (1, 0)))[1]
        drawn.append(mx.argmax(row + mx.random.gumbel(row.shape, key=dice)))
    return mx.stack(drawn).astype(mx.int32)


def top_ref(logits: mx.array, n: int) -> Top:
    """Find the first n of logits [M, N], values and tokens, and the logarithm of the sum of all exponentials."""
    logits = logits.astype(mx.float32)
    order = mx.argsort(-logits, axis=-1)[:, :n]  # stable: of equal ones the lowest index
    values = mx.take_along_axis(logits, order, axis=-1)
    return values, order.astype(mx.int32), mx.logsumexp(logits, axis=-1)


def verify_head_ref(x: mx.array, weights: Weights, bias: Maybe = None) -> mx.array:
    return mx.argmax(logits_ref(x, weights, bias), axis=-1).astype(mx.int32)


def tile(n: int) -> int:
    """Choose how many weight rows make a tile, of which the first n are kept."""
    return 128 if n <= 8 else 256 if n <= 16 else 512


def _product(x: mx.array, weights: Weights) -> tuple[str, dict, dict]:
    """The kernel for these weights, and what is its own of its inputs and template arguments."""
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
    with_sum: bool = False,
    split: bool = False,
) -> list[mx.array]:
    """Find values and tokens [M, n] of each row's first n; behind the values the logsumexp where it is asked for."""
    x = x.astype(_dtype(x, weights, bias))
    m, tiles = x.shape[0], -(-_columns(weights) // tile(n))
    registers = SPLIT_ROWS if split else DENSE_ROWS if isinstance(weights, mx.array) else WEIGHTS_ONCE
    groups, rows = row_groups(m, min(registers, LOGITS // tile(n)))
    op, inputs, template = _product(x, weights)
    key, position, inverse = noise or [constants(*unread) for unread in UNREAD]
    inputs |= {"x": x, "bias": x if bias is None else bias.astype(x.dtype), "key": key}
    inputs |= {"position": position, "inverse": inverse, "n": constants(mx.int32, n)}
    outputs = {"values": ((m, tiles, n + with_sum), mx.float32), "indices": ((m, tiles, n), mx.int32)}
    template |= {"ROWS": rows, "TILE": tile(n), "BIAS": bias is not None, "SUM": with_sum}
    grid, group = (32 * groups, SIMDGROUPS * tiles, 1), (32, SIMDGROUPS, 1)
    values, indices = launch(op, inputs, outputs, template=template, grid=grid, group=group)
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
    """Tell whether the kernels choose: a float type that a bias does not change, and eight tokens or more."""
    if _columns(weights) < LEAST_COLUMNS or x.size == 0:
        return False
    if isinstance(weights, mx.array):
        n, k = weights.shape
        return _dtype(x, weights, bias) in DTYPES and k < 16 * n and supported_product(x, weights, bias)
    same = _dtype(x, weights, bias) == weights.dtype(x)
    return same and supported_format(x, weights) and not small(weights)


def _check(x: mx.array, weights: Weights, bias: Maybe) -> None:
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}; it must be (M, K)")
    if isinstance(weights, Quantized):
        check_columns(x, weights)
    elif weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"x has shape {x.shape}; its last axis must be that of the weights {weights.shape}")
    if bias is not None and bias.shape != (_columns(weights),):
        raise ValueError(f"bias has shape {bias.shape}; it must be ({_columns(weights)},), a value per token")


def verify_head(x: mx.array, weights: Weights, bias: Maybe = None, *, split: bool = False) -> mx.array:
    """Choose the greatest logit's token [M] int32 for each row x [M, K]; of equal ones the lowest.

    weights: Quantized, or [N, K] float16, bfloat16 or float32; bias [N]; split: as in `verify_qmm`. Where `supported`
    says no, and without Metal, MLX's own product and argmax. Raises ValueError for shapes that do not fit.
    """
    _check(x, weights, bias)
    if not (on_metal() and supported(x, weights, bias)):
        return verify_head_ref(x, weights, bias)
    return _verify_head_metal(x, weights, bias, split=split)[1][:, 0]


def verify_head_draw(
    x: mx.array,
    weights: Weights,
    key: mx.array,
    position: Any,
    temp: float,
    bias: Maybe = None,
    *,
    split: bool = False,
) -> mx.array:
    """Draw a token [M] int32 from softmax(logits / temp) of each row x [M, K]; row i's by position + i.

    key: uint32 [2]; a row is drawn with the second half of the split of key + [0, position + i], from whose bits the
        noise of each token is that of mx.random.gumbel. position: an integer or int32 [] or [1].
    weights, bias, split: as in `verify_head`. Raises ValueError for shapes that do not fit and for temp <= 0.
    """
    _check(x, weights, bias)
    if temp <= 0:
        raise ValueError(f"temp={temp}: allowed is more than 0")
    if not (on_metal() and supported(x, weights, bias)):
        return draw_ref(logits_ref(x, weights, bias), key, position, temp)
    noise = (key, mx.array(position).reshape(1).astype(mx.uint32), constants(mx.float32, 1.0 / temp))
    return _verify_head_metal(x, weights, bias, noise=noise, split=split)[1][:, 0]


def verify_head_top(x: mx.array, weights: Weights, n: int, bias: Maybe = None, *, split: bool = False) -> Top:
    """Find the n greatest logits of each row x [M, K], and the logsumexp of all of them.

    Returns values [M, n] float32, sorted, tokens [M, n] int32, of equal values the lower token first, and the
    logsumexp [M] float32.

    weights, bias, split: as in `verify_head`. Raises ValueError for shapes that do not fit and for an n that is not
    between 1 and 64 or exceeds N.
    """
    _check(x, weights, bias)
    if not 1 <= n <= min(MOST_TOP, _columns(weights)):
        raise ValueError(f"n={n}: allowed is 1 to {min(MOST_TOP, _columns(weights))}")
    if not (on_metal() and supported(x, weights, bias)):
        return top_ref(logits_ref(x, weights, bias), n)
    values, tokens = _verify_head_metal(x, weights, bias, n, with_sum=True, split=split)
    return values[:, :n], tokens, values[:, n]
