"""Multiply each head's rows with its own quantized matrix, in the bits of MLX's kernel for one row."""

import mlx.core as mx

from ._quantized import Quantized, dequantized, known, launch
from ._source import on_metal


def verify_qmm_heads_ref(x: mx.array, weights: Quantized, *, heads_first: bool) -> mx.array:
    """Dequantize, multiply in float32, round once."""
    rows = x[..., : weights.k].swapaxes(1, 2).astype(mx.float32)
    y = (rows @ dequantized(weights).swapaxes(1, 2)).astype(weights.dtype(x))
    return y if heads_first else y.swapaxes(1, 2)


def verify_qmm_heads(x: mx.array, weights: Quantized, *, heads_first: bool) -> mx.array:
    """Multiply of each head of x [1, M, H, D >= K] the first K values with its matrix: [1, H, M, N], or without
    `heads_first` [1, M, H, N].

    weights: w [H, N, K * bits / 32], scales and biases [H, N, K / group_size]. On Metal each row of a head has the
    bits of MLX's kernel for one row, and up to 8 rows share one request of the weights. Elsewhere, or for a format
    that the kernels do not know: dequantized and multiplied in float32. Raises ValueError where shapes do not fit.
    """
    if weights.w.ndim != 3:
        raise ValueError(f"w has shape {weights.w.shape}; it must have three axes, the first of heads")
    heads = weights.w.shape[0]
    if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != heads or x.shape[3] < weights.k:
        raise ValueError(f"x has shape {x.shape}; for these weights it must be (1, M, {heads}, {weights.k} or more)")
    if not (on_metal() and known(x, weights)):
        return verify_qmm_heads_ref(x, weights, heads_first=heads_first)
    m, (n,) = x.shape[1], weights.ends
    shape = (1, heads, m, n) if heads_first else (1, m, heads, n)
    template, x = [("HEADS_FIRST", heads_first)], x.astype(weights.dtype(x))
    return launch("verify_qmm_heads", x, weights, m=m, template=template, columns=n, heads=heads, shape=shape)
