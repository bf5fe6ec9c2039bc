"""Multiply 5 to 16 rows with quantized weights by 8x8 matrix products, for the fast lane.

The order of a sum is fixed: four simdgroups take turns at blocks of 128 values of K; a block is 16 steps of eight
products, whose sums are paired; then the simdgroups' sums are added in turn. So a row's result depends on that row,
its weights and the GPU's sum of eight products, not on other rows or stacked linears. It differs from MLX's bits.
"""

import mlx.core as mx

from ._quantized import Quantized, arrays, biased, check_columns, format_template, parts, supported
from ._source import constants, launch, on_metal
from .verify_qmm import verify_qmm_ref

SIDE = 8  # rows and columns of a matrix
MOST_BLOCKS = 2  # maximum blocks of SIDE rows of x per simdgroup
SPLIT = 4  # simdgroups that share K
TALL = 2048  # weight rows from which a simdgroup has two tiles of them, and requests x half as often

verify_qmm_mma_ref = verify_qmm_ref


def verify_qmm_mma(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Multiply x [..., K] with each of the stacked linears, and add `weights.bias`: a list of [..., N_p].

    Sums are in float32. On Metal up to 16 rows share one request of the weights. Elsewhere, or if `supported` is
    False: dequantized and multiplied in float32. Raises ValueError if x has another number of columns.
    """
    check_columns(x, weights)
    if not (on_metal() and supported(x, weights)):
        return verify_qmm_mma_ref(x, weights)
    flat, n = x.reshape(-1, weights.k).astype(weights.dtype(x)), weights.ends[-1]
    m, tiles = flat.shape[0], 2 if n >= TALL else 1
    blocks = min(-(-m // SIDE), MOST_BLOCKS)
    (y,) = launch(
        "verify_qmm_mma",
        {**arrays(weights, flat.dtype), "x": flat, "ends": constants(mx.int32, *weights.ends)},
        {"y": ((m * n,), flat.dtype)},
        template={**format_template(weights, flat.dtype), "TILES": tiles, "BLOCKS": blocks},
        grid=(32 * -(-m // (SIDE * blocks)), SPLIT * -(-n // (SIDE * tiles)), 1),
        group=(32, SPLIT, 1),
    )
    return biased(parts(y, x, weights), weights)
