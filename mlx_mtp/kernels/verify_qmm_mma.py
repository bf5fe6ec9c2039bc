"""Multiply rows with quantized weights by 8x8 matrix products, for 5 to 16 rows of the fast lane.

Fixed is the order of a sum: blocks of 128 values of K in turn to four simdgroups, a block in 16 steps of eight
products whose sums are paired, then the four simdgroups' sums in turn. So a row's result depends on nothing but that
row, its weights, and how the GPU sums the eight products of a step: neither on other rows, which are columns of the
matrix product, nor on their number, nor on what is stacked. It has not the bits of MLX's kernels.
"""

import mlx.core as mx

from ._quantized import Quantized, arrays, biased, check_columns, format_template, parts, supported
from ._source import launch, on_metal
from .verify_qmm import verify_qmm_ref

SIDE = 8  # of a matrix
MOST_BLOCKS = 2  # of as many rows of x
SPLIT = 4  # simdgroups that share K
TALL = 2048  # weight rows from which on a simdgroup has two tiles of them, and asks for x half as often

verify_qmm_mma_ref = verify_qmm_ref


def verify_qmm_mma(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Multiply x [..., K] with each of the stacked linears, and add `weights.bias`: a list of [..., N_p].

    Sums are of float32. On Metal up to 16 rows share one request of the weights. Elsewhere, or for a format that
    `supported` denies: dequantized and multiplied in float32. Raises ValueError where x has other columns.
    """
    check_columns(x, weights)
    if not (on_metal() and supported(x, weights)):
        return verify_qmm_mma_ref(x, weights)
    flat, n = x.reshape(-1, weights.k).astype(weights.dtype(x)), weights.ends[-1]
    m, tiles = flat.shape[0], 2 if n >= TALL else 1
    blocks = min(-(-m // SIDE), MOST_BLOCKS)
    (y,) = launch(
        "verify_qmm_mma",
        {**arrays(weights, flat.dtype), "x": flat, "ends": weights.ends_array},
        {"y": ((m * n,), flat.dtype)},
        template={**format_template(weights, flat.dtype), "TILES": tiles, "BLOCKS": blocks},
        grid=(32 * -(-m // (SIDE * blocks)), SPLIT * -(-n // (SIDE * tiles)), 1),
        group=(32, SPLIT, 1),
    )
    return biased(parts(y, x, weights), weights)
