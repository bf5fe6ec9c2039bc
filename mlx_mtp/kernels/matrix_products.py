"""Multiply rows with weights, quantized or not, in the lane `matrix`: a row's bits do not depend on the other rows.

They differ from MLX's bits, and depend on the order in which this machine's simdgroup_matrix adds eight products.
Without Metal, and where kernels do not support the weights, the references of the exact lane run.
"""

import math

import mlx.core as mx

from ._matrix import launch_tiles, matrix_tile
from ._quantized import Quantized, biased, check_columns, known, parts, small, supported
from ._source import DTYPES, Maybe, constants, on_metal
from .verify_gemv import verify_gemv
from .verify_qmm import activated, check_heads, check_pair, verify_qmm_heads_ref, verify_qmm_ref

FARTHEST = 2**31  # bytes between two weight rows of a threadgroup, below which an int holds them


def matrix_qmm(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Multiply x [..., K] with each of the stacked linears, and add `weights.bias`: a list of [..., N_p].

    Up to 16 rows share one request of the weights. Raises ValueError if x has another number of columns.
    """
    check_columns(x, weights)
    if not (on_metal() and supported(x, weights)):
        return verify_qmm_ref(x, weights)
    flat, bias = x.reshape(-1, weights.k).astype(weights.dtype(x)), weights.bias
    added = bias is not None and bias.dtype == flat.dtype
    y = _product(flat, weights, weights.ends, bias if added else None)
    return parts(y, x, weights) if added else biased(parts(y, x, weights), weights)


def _product(x: mx.array, weights: Quantized | mx.array, ends: tuple[int, ...], bias: Maybe) -> mx.array:
    """Return x [M, K] times each of the weights that end at `ends`, plus the bias: one [M, N_p] after another."""
    m, n = x.shape[0], ends[-1]
    tile = matrix_tile(x, n, weights)
    more = {"ends": constants(mx.int32, *ends), "bias": x if bias is None else bias}
    groups = -(-m // tile.rows), -(-n // tile.height), 1
    outputs, template = {"y": ((m * n,), x.dtype)}, {"BIAS": bias is not None}
    return launch_tiles("matrix_qmm", x, weights, outputs, tile, groups, more, template)[0]


def matrix_gemv(x: mx.array, w: mx.array, bias: Maybe = None) -> mx.array:
    """Multiply x [..., K] with the transpose of w [N, K], float16, bfloat16 or float32, and add bias [N]: [..., N].

    Types are promoted as in matmul. Raises ValueError for shapes that do not match.
    """
    if w.ndim != 2 or x.shape[-1:] != w.shape[1:]:
        raise ValueError(f"x has shape {x.shape} and w {w.shape}; they must be (..., K) and (N, K)")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias has shape {bias.shape}; it must be ({w.shape[0]},), a value per row of w")
    dtype = mx.result_type(x, w, *([] if bias is None else [bias]))
    if not (on_metal() and matrix_served(x, w, dtype)):
        return verify_gemv(x, w, bias)
    flat = x.reshape(-1, x.shape[-1]).astype(dtype)
    y = _product(flat, w, (w.shape[0],), None if bias is None else bias.astype(dtype))
    return y.reshape(*x.shape[:-1], w.shape[0])


def matrix_served(x: mx.array, w: mx.array, dtype: mx.Dtype) -> bool:
    """Return whether the kernels multiply x with unquantized weights [N, K]: floats, K at least 8, nothing empty."""
    return dtype in DTYPES and w.shape[1] >= 8 and x.size > 0 and w.size > 0


def matrix_glu(x: mx.array, weights: Quantized, limit: float | None = None) -> mx.array:
    """Return swiglu(x times gate, x times up) [..., H] of x [..., K], gate and up [H, K] stacked in `weights`.

    `limit`: as in `verify_glu`. One launch, unless weights are `small` or have a bias. Raises ValueError if x has
    another number of columns, or `weights` are not two linears of equal height.
    """
    check_pair(x, weights)
    large = weights.w.nbytes >= FARTHEST  # of whose rows the kernel could not state the distance
    if not (on_metal() and supported(x, weights)) or small(weights) or large or weights.bias is not None:
        gate, up = matrix_qmm(x, weights)
        return activated(gate, up, limit)
    flat, height = x.reshape(-1, weights.k).astype(weights.dtype(x)), weights.ends[0]
    m, tile = flat.shape[0], matrix_tile(flat, 2 * height, weights)
    more = {"limit": constants(flat.dtype, math.inf if limit is None else limit)}
    groups = -(-m // tile.rows), -(-2 * height // tile.height), 1
    (y,) = launch_tiles("matrix_glu", flat, weights, {"y": ((m, height), flat.dtype)}, tile, groups, more, {})
    return y.reshape(*x.shape[:-1], height)


def matrix_heads(x: mx.array, weights: Quantized, *, heads_first: bool) -> mx.array:
    """Multiply the first K values of each head of x [1, M, H, D >= K] with the head's matrix: [1, H, M, N].

    Without `heads_first` the result is [1, M, H, N]. weights: as in `verify_qmm_heads`. ValueError if shapes do not
    match.
    """
    check_heads(x, weights)
    if not (on_metal() and known(x, weights)):
        return verify_qmm_heads_ref(x, weights, heads_first=heads_first)
    x = x.astype(weights.dtype(x))
    (_, m, heads, _), (n,) = x.shape, weights.ends
    tile, shape = matrix_tile(x[0], n, weights), (1, heads, m, n) if heads_first else (1, m, heads, n)
    groups = -(-m // tile.rows), -(-n // tile.height), heads
    outputs, template = {"y": (shape, x.dtype)}, {"HEADS_FIRST": heads_first}
    return launch_tiles("matrix_heads", x, weights, outputs, tile, groups, {}, template)[0]
