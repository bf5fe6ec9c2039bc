"""`gated_norm`: the RMS norm of each head and its gate, silu(z), in one launch.

Squares are summed as MLX's kernel sums them, and each operation rounds as MLX's: the norm to the type of y and the
weight, the gate and the product to float32, the result to y's.
"""

import mlx.core as mx
from mlx import nn

from . import _source

TYPES = (mx.float16, mx.bfloat16, mx.float32)
INPUTS, OUTPUTS = ("y", "z", "weight", "eps"), ("out",)
BLOCK, MOST_BLOCKS = 128, 2  # values of a head that a simdgroup takes at once, and how often
SIMDGROUPS = 4


def gated_norm_ref(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`gated_norm` in MLX's own ops."""
    z = z.reshape(y.shape)
    normed = mx.fast.rms_norm(y, weight, eps).astype(mx.float32)
    return (nn.silu(z.astype(mx.float32)) * normed).astype(y.dtype)


def _gated_norm_metal(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    _, T, H, D = y.shape
    (out,) = _source.kernel("gated_norm", INPUTS, OUTPUTS, ("rms", "activations"), strided=True)(
        inputs=[y, z, weight, _source.constants(mx.float32, eps)],
        template=[("T", y.dtype), ("O", mx.result_type(y, weight)), ("BLOCKS", -(-D // BLOCK))],
        grid=(32, H, T),
        threadgroup=(32, SIMDGROUPS, 1),
        output_shapes=[y.shape],
        output_dtypes=[y.dtype],
    )
    return out


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """mx.fast.rms_norm(y, weight, eps) * silu(z), the product in float32: [B, T, H, D] in y's dtype.

    y: [B, T, H, D], z: [B, T, G, H D / G], its heads in groups of whole ones; float16, bfloat16 or float32, each its
        own, and views if need be. weight: [D].
    Raises ValueError where y and z, or weight and D, do not match.
    """
    if y.ndim != 4 or z.ndim != 4 or y.shape[:2] != z.shape[:2] or y.size != z.size or z.shape[3] % y.shape[3]:
        raise ValueError(f"y has shape {y.shape} and z {z.shape}; they must be the same heads, [B, T, heads, values]")
    if weight.shape != y.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}; for these heads it must be {y.shape[-1:]}")
    known = {y.dtype, z.dtype, weight.dtype} <= set(TYPES)
    if _source.on_metal() and known and y.shape[0] == 1 and y.size > 0 and y.shape[-1] <= BLOCK * MOST_BLOCKS:
        return _gated_norm_metal(y, z, weight, eps)
    return gated_norm_ref(y, z, weight, eps)
