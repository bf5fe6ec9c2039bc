"""Compute the RMS norm of each head times its gate, silu(z), in one launch.

Squares are summed in the order of MLX's kernel, and each operation is rounded as MLX's: the norm to the type of y and
the weight, the gate and the product to float32, the result to y's type.
"""

import mlx.core as mx
from mlx import nn

from ._source import BLOCK, MOST_BLOCKS, constants, floats, launch, on_metal

SIMDGROUPS = 4


def gated_norm_ref(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return mx.fast.rms_norm(y, weight, eps) * silu(z) by MLX's own ops: the reference of `gated_norm`."""
    z = z.reshape(y.shape)
    normed = mx.fast.rms_norm(y, weight, eps).astype(mx.float32)
    return (nn.silu(z.astype(mx.float32)) * normed).astype(y.dtype)


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return mx.fast.rms_norm(y, weight, eps) * silu(z), the product in float32: [B, T, H, D] in y's dtype.

    y: [B, T, H, D]. z: [B, T, G, H D / G], the same heads in G groups. Each float16, bfloat16 or float32, and
        possibly a view. weight: [D]. Raises ValueError if y and z, or weight and D, do not match.
    """
    if y.ndim != 4 or z.ndim != 4 or y.shape[:2] != z.shape[:2] or y.size != z.size or z.shape[3] % y.shape[3]:
        raise ValueError(f"y has shape {y.shape} and z {z.shape}; they must be the same heads, [B, T, heads, values]")
    if weight.shape != y.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}; for these heads it must be {y.shape[-1:]}")
    B, T, H, D = y.shape
    if not (on_metal() and floats(y, z, weight) and B == 1 and y.size > 0 and D <= BLOCK * MOST_BLOCKS):
        return gated_norm_ref(y, z, weight, eps)
    return launch(
        "gated_norm",
        {"y": y, "z": z, "weight": weight, "eps": constants(mx.float32, eps)},
        {"out": (y.shape, y.dtype)},
        template={"T": y.dtype, "O": mx.result_type(y, weight), "BLOCKS": -(-D // BLOCK)},
        grid=(32, H, T),
        group=(32, SIMDGROUPS, 1),
    )[0]
