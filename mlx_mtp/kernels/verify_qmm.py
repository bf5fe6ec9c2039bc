"""Multiply a few rows with quantized weights, also per head or activated, with the bits of MLX's one-row kernels."""

import math

import mlx.core as mx

from ._quantized import (
    Quantized,
    biased,
    check_columns,
    dequantized,
    known,
    multiplied,
    multiply,
    parts,
    small,
    supported,
)
from ._source import constants, on_metal


def verify_qmm_ref(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Return x times each stacked linear [..., N_p]: dequantized, in float32, rounded once, then plus the bias."""
    return biased(list(mx.split(multiplied(x, weights), list(weights.ends[:-1]), axis=-1)), weights)


def verify_qmm(x: mx.array, weights: Quantized, *, split: bool = False) -> list[mx.array]:
    """Multiply x [..., K] with each of the stacked linears, and add `weights.bias`: a list of [..., N_p].

    On Metal each row has the bits of MLX's kernel for one row, and of its addition; up to 12 rows share one request
    of the weights, with `split` (for GPUs with few registers) up to 4. Elsewhere, or if `supported` is False:
    dequantized and multiplied in float32. Raises ValueError if x has another number of columns.
    """
    check_columns(x, weights)
    if not (on_metal() and supported(x, weights)):
        return verify_qmm_ref(x, weights)
    x, bias = x.astype(weights.dtype(x)), weights.bias
    added = bias is not None and bias.dtype == x.dtype
    more = {"ends": constants(mx.int32, *weights.ends), "bias": bias if added else x}
    y = multiply("verify_qmm", x, weights, columns=weights.ends[-1], more=more, template={"BIAS": added}, split=split)
    products = parts(y, x, weights)
    return products if added else biased(products, weights)


def verify_qmm_heads_ref(x: mx.array, weights: Quantized, *, heads_first: bool) -> mx.array:
    rows = x[..., : weights.k].swapaxes(1, 2).astype(mx.float32)
    y = (rows @ dequantized(weights).swapaxes(1, 2)).astype(weights.dtype(x))
    return y if heads_first else y.swapaxes(1, 2)


def check_heads(x: mx.array, weights: Quantized) -> None:
    """Raise ValueError if x [1, M, H, D] and the matrices of H heads have shapes that do not match."""
    if weights.w.ndim != 3:
        raise ValueError(f"w has shape {weights.w.shape}; it must have three axes, the first of heads")
    heads = weights.w.shape[0]
    if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != heads or x.shape[3] < weights.k:
        raise ValueError(f"x has shape {x.shape}; for these weights it must be (1, M, {heads}, {weights.k} or more)")


def verify_qmm_heads(x: mx.array, weights: Quantized, *, heads_first: bool, split: bool = False) -> mx.array:
    """Multiply the first K values of each head of x [1, M, H, D >= K] with the head's matrix: [1, H, M, N].

    Without `heads_first` the result is [1, M, H, N]. weights: w [H, N, K * bits / 32], scales and biases
    [H, N, K / group_size]. On Metal each row has the bits of MLX's kernel for one row; up to 12 rows, with `split` 4,
    share one request. Else, or unless `known`, the reference runs, in float32. ValueError if shapes do not match.
    """
    check_heads(x, weights)
    if not (on_metal() and known(x, weights)):
        return verify_qmm_heads_ref(x, weights, heads_first=heads_first)
    (_, m, heads, _), (n,) = x.shape, weights.ends
    shape = (1, heads, m, n) if heads_first else (1, m, heads, n)
    how = {"template": {"HEADS_FIRST": heads_first}, "shape": shape, "split": split}
    return multiply("verify_qmm_heads", x, weights, columns=n, **how)


def activated(gate: mx.array, up: mx.array, limit: float | None) -> mx.array:
    """Return silu(gate) * up; with a limit silu(gate) is at most that, and up is clipped to -limit..limit."""
    gate = gate * mx.sigmoid(gate)
    if limit is not None:
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return gate * up


def verify_glu_ref(x: mx.array, weights: Quantized, limit: float | None = None) -> mx.array:
    """Return silu(gate) * up [..., H] of the two products (gate, up) of `verify_qmm_ref`.

    Without a bias products have the type in which MLX computes them, `weights.dtype(x)`. limit: as in `verify_glu`.
    """
    gate, up = verify_qmm_ref(x, weights)
    return activated(gate, up, limit)


def check_pair(x: mx.array, weights: Quantized) -> None:
    """Raise ValueError if x has another number of columns, or weights are not two linears of equal height."""
    check_columns(x, weights)
    if len(weights.ends) != 2 or weights.ends[1] != 2 * weights.ends[0]:
        raise ValueError(f"the linears end at rows {weights.ends}; they must be two of equal height, gate and up")


def verify_glu(x: mx.array, weights: Quantized, limit: float | None = None, *, split: bool = False) -> mx.array:
    """Return swiglu(x times gate, x times up) [..., H] of x [..., K], gate and up [H, K] stacked in `weights`.

    `limit`: maximum of silu(gate), and up is clipped to -limit..limit. On Metal each row has the bits of MLX's
    one-row kernels followed by its activation, in one launch unless weights are `small` or have a bias; elsewhere, or
    if `supported` is False, the reference runs. split: as in `verify_qmm`. Raises ValueError if x has another number
    of columns, or `weights` are not two linears of equal height.
    """
    check_pair(x, weights)
    if not (on_metal() and supported(x, weights)) or small(weights) or weights.bias is not None:
        gate, up = verify_qmm(x, weights, split=split)
        return activated(gate, up, limit)
    more = {"limit": constants(weights.dtype(x), math.inf if limit is None else limit)}
    y = multiply("verify_glu", x, weights, columns=weights.ends[0], more=more, split=split)
    return y.reshape(*x.shape[:-1], weights.ends[0])
