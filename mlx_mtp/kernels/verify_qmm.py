"""`verify_qmm`: a few rows of x times quantized weights, with the bits that MLX's one-row kernel gives each row."""

import mlx.core as mx

from ._quantized import Quantized, check_columns, launch, multiplied, parts, supported
from ._source import on_metal


def verify_qmm_ref(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Dequantized, multiplied in float32, rounded once."""
    return list(mx.split(multiplied(x, weights), list(weights.ends[:-1]), axis=-1))


def _verify_qmm_metal(x: mx.array, weights: Quantized) -> list[mx.array]:
    flat = x.reshape(-1, weights.k).astype(weights.dtype(x))
    last = ("ends", weights.ends_array)
    y = launch("verify_qmm", flat, weights, last=last, columns=weights.ends[-1])
    return parts(y, x, weights)


def verify_qmm(x: mx.array, weights: Quantized) -> list[mx.array]:
    """x [..., K] times each of the stacked linears: a list of [..., N_p].

    On Metal each row's bits are those of MLX's kernel for one row, and up to 8 rows share one request of the weights.
    Elsewhere, or for a format that `supported` denies: dequantized and multiplied in float32. Raises ValueError where
    x has another number of columns.
    """
    check_columns(x, weights)
    return _verify_qmm_metal(x, weights) if on_metal() and supported(x, weights) else verify_qmm_ref(x, weights)
