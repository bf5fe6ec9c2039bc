"""The convolution of a gated-delta layer over a tape: its window, sums, SiLU and cut into q, k, v in one launch.

Rows are summed as MLX's depthwise kernel does: in float32, from the oldest tap on, rounded once. SiLU is computed in
the rows' type, as MLX's unary and binary kernels do. Only the latter are in MLX's wheel: tests run them, but compare
the sums with a formulation of their own.
"""

import mlx.core as mx
from mlx import nn

from . import _source

TYPES = (mx.float16, mx.bfloat16, mx.float32)
INPUTS, OUTPUTS = ("before", "accepted", "x", "w", "key_dim"), ("q", "k", "v", "rows")
Convolved = tuple[mx.array, mx.array, mx.array, mx.array]  # q, k, v, rows


def conv_verify_ref(
    x: mx.array, before: mx.array, weight: mx.array, key_dim: int, accepted: mx.array | None = None
) -> Convolved:
    """`conv_verify` in plain ops, with sums in float32."""
    if accepted is not None:
        before = mx.take(before, accepted + mx.arange(weight.shape[1] - 1), axis=1)
    rows = mx.concatenate([before, x], axis=1)
    sums = mx.conv1d(rows.astype(mx.float32), weight.astype(mx.float32), groups=x.shape[2])
    q, k, v = mx.split(nn.silu(sums.astype(x.dtype)), [key_dim, 2 * key_dim], axis=-1)
    return q, k, v, rows


def _conv_verify_metal(
    x: mx.array, before: mx.array, weight: mx.array, key_dim: int, accepted: mx.array | None
) -> Convolved:
    (_, T, C), behind = x.shape, weight.shape[1] - 1
    if accepted is None:
        accepted = mx.array([0])
    return _source.kernel("conv_verify", INPUTS, OUTPUTS)(
        inputs=[before, accepted, x, weight, key_dim],
        template=[("InT", x.dtype)],
        grid=(C, behind + T, 1),
        threadgroup=(min(C, 256), 1, 1),
        output_shapes=[(1, T, key_dim), (1, T, key_dim), (1, T, C - 2 * key_dim), (1, behind + T, C)],
        output_dtypes=[x.dtype] * 4,
    )


def conv_verify(
    x: mx.array, before: mx.array, weight: mx.array, key_dim: int, accepted: mx.array | None = None
) -> Convolved:
    """SiLU of a causal depthwise convolution over new rows that follow the first `accepted` rows of a tape.

    x: [1, T, C] float16, bfloat16 or float32. before: [1, taps-1+P, C], the rows before and on the tape of P rows,
        of which those after the accepted may hold anything. weight: [C, taps, 1]. Both of x's dtype.
    accepted: [1] int32, from 0 to P. None: there is no tape, P = 0.

    Returns q, k [1, T, key_dim], v [1, T, C - 2 key_dim], and the rows [1, taps-1+T, C] that the next call needs.
    Raises ValueError where `before` has too few rows, or a tape and no `accepted`.
    """
    tape = before.shape[1] - (weight.shape[1] - 1)
    if tape < 0 or (tape > 0 and accepted is None):
        needed = f"{weight.shape[1] - 1} rows" + (" without `accepted`" if tape > 0 else " or more")
        raise ValueError(f"before has {before.shape[1]} rows; it must have {needed}")
    if _source.on_metal() and x.dtype in TYPES and x.dtype == before.dtype == weight.dtype:
        return _conv_verify_metal(x, before, weight, key_dim, accepted)
    return conv_verify_ref(x, before, weight, key_dim, accepted)
