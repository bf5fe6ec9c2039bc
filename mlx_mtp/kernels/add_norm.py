"""`add_norm`: a residual sum and the RMS norm of it in one launch.

Squares are summed as MLX's kernel sums them, so that each row has the same bits whatever the others are.
"""

import mlx.core as mx

from . import _source

TYPES = (mx.float16, mx.bfloat16, mx.float32)
INPUTS, OUTPUTS = ("x", "r", "weight", "eps"), ("h", "normed")
READS, MOST_THREADS, MOST_CHUNKS = 4, 1024, 4  # values in a chunk; what a group and a thread take at most


def add_norm_ref(x: mx.array, r: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """`add_norm` in MLX's own ops."""
    h = x + r
    return h, mx.fast.rms_norm(h, weight, eps)


def _add_norm_metal(x: mx.array, r: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    H = x.shape[-1]
    rows, chunks = x.size // H, -(-H // (READS * MOST_THREADS))
    threads = min(-(-H // (READS * 32)) * 32, MOST_THREADS)
    normed = mx.result_type(x, weight)
    outputs = _source.kernel("add_norm", INPUTS, OUTPUTS, ("rms",))(
        inputs=[x.reshape(rows, H), r.reshape(rows, H), weight, _source.constants(mx.float32, eps)],
        template=[("T", x.dtype), ("O", normed), ("CHUNKS", chunks)],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, normed],
    )
    return outputs[0], outputs[1]


def add_norm(x: mx.array, r: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """(h, normed): h = x + r, and mx.fast.rms_norm(h, weight, eps).

    x, r: [..., H] of one of float16, bfloat16 and float32. weight: [H]; with x it decides the type of `normed`.
    Raises ValueError where x and r, or weight and H, do not match.
    """
    if x.shape != r.shape:
        raise ValueError(f"x has shape {x.shape} and r {r.shape}; they must have the same")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}; for these rows it must be {x.shape[-1:]}")
    known = x.dtype in TYPES and r.dtype == x.dtype and weight.dtype in TYPES
    if _source.on_metal() and known and 0 < x.shape[-1] <= READS * MOST_THREADS * MOST_CHUNKS and x.size > 0:
        return _add_norm_metal(x, r, weight, eps)
    return add_norm_ref(x, r, weight, eps)
