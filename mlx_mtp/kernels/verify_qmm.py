"""Multiply a few rows with quantized weights, each in the bits that MLX's one-row kernel gives it."""

import mlx.core as mx

from ._quantized import Quantized, biased, check_columns, launch, multiplied, parts, supported
from ._source import on_metal


def verify_qmm_ref(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Dequantize, multiply in float32, round once, and add the bias to that."""
    return biased(list(mx.split(multiplied(x, weights), list(weights.ends[:-1]), axis=-1)), weights)


def verify_qmm(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Multiply x [..., K] with each of the stacked linears, and add `weights.bias`: a list of [..., N_p].

    On Metal each row's bits are those of MLX's kernel for one row, and of its addition, and up to 8 rows share one
    request of the weights. Elsewhere, or for a format that `supported` denies: dequantized and multiplied in float32.
    Raises ValueError where x has another number of columns.
    """
    check_columns(x, weights)
    if not (on_metal() and supported(x, weights)):
        return verify_qmm_ref(x, weights)
    flat, bias = x.reshape(-1, weights.k).astype(weights.dtype(x)), weights.bias
    added = bias is not None and bias.dtype == flat.dtype
    more = {"ends": weights.ends_array, "bias": bias if added else flat}
    y = launch(
        "verify_qmm", flat, weights, m=flat.shape[0], more=more, template=[("BIAS", added)], columns=weights.ends[-1]
    )
    products = parts(y, x, weights)
    return products if added else biased(products, weights)
