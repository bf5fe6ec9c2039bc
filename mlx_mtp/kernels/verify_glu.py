"""Compute gate, up and SwiGLU in one launch, in the bits of MLX's one-row kernels and its activation."""

import mlx.core as mx

from ._quantized import Quantized, check_columns, launch, small, supported
from ._source import constants, on_metal
from .verify_qmm import verify_qmm, verify_qmm_ref


def activated(gate: mx.array, up: mx.array, limit: float | None) -> mx.array:
    """Compute silu(gate) * up; with a limit silu(gate) is at most that, and up within its negative and it."""
    gate = gate * mx.sigmoid(gate)
    if limit is not None:
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return gate * up


def verify_glu_ref(x: mx.array, weights: Quantized, limit: float | None = None) -> mx.array:
    """Compute silu(gate) * up of products rounded to x's dtype; with a limit both are clamped as Step-3.5 does."""
    gate, up = verify_qmm_ref(x, weights)
    return activated(gate, up, limit)


def verify_glu(x: mx.array, weights: Quantized, limit: float | None = None) -> mx.array:
    """Compute swiglu(x times gate, x times up) [..., H] of x [..., K], gate and up [H, K] stacked in `weights`.

    With `limit` silu(gate) is at most that, and up within its negative and it (Step-3.5). On Metal each row has the
    bits of MLX's one-row kernels followed by its activation, in one launch unless there is a `weights.bias`;
    elsewhere the reference. Raises ValueError where x has another number of columns, or `weights` is not two of one
    height.
    """
    check_columns(x, weights)
    if len(weights.ends) != 2 or weights.ends[1] != 2 * weights.ends[0]:
        raise ValueError(f"the weights end at {weights.ends}; gate and up must have the same number of rows")
    if not (on_metal() and supported(x, weights)) or small(weights) or weights.bias is not None:
        gate, up = verify_qmm(x, weights)
        return activated(gate, up, limit)
    dtype, columns = weights.dtype(x), weights.ends[0]
    flat = x.reshape(-1, weights.k).astype(dtype)
    y = launch(
        "verify_glu",
        flat,
        weights,
        m=flat.shape[0],
        more={"limit": constants(dtype, limit or 0.0)},
        template=[("CLAMPED", limit is not None)],
        headers=("activations",),
        columns=columns,
    )
    return y.reshape(*x.shape[:-1], columns)
