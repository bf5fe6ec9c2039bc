"""Add a residual and take the sum's RMS norm in one launch.

Squares are summed in the order of MLX's kernel, so a row's bits do not depend on other rows.
"""

import mlx.core as mx

from ._source import constants, floats, launch, on_metal

READS, MOST_THREADS, MOST_CHUNKS = 4, 1024, 4  # values per chunk; MLX's maximum threads; chunks per thread


def add_norm_ref(x: mx.array, r: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Return h = x + r and mx.fast.rms_norm(h, weight, eps) by MLX's own ops: the reference of `add_norm`."""
    h = x + r
    return h, mx.fast.rms_norm(h, weight, eps)


def add_norm(x: mx.array, r: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Return h = x + r and mx.fast.rms_norm(h, weight, eps), both [..., H].

    x, r: [..., H] of one of float16, bfloat16 and float32. weight: [H]. h has x's type, the norm the type to which x
    and weight are promoted.
    Raises ValueError if x and r, or weight and H, do not match.
    """
    if x.shape != r.shape:
        raise ValueError(f"x has shape {x.shape} and r {r.shape}; they must have the same shape")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}; for these rows it must be {x.shape[-1:]}")
    H = x.shape[-1]
    known = floats(x, weight) and r.dtype == x.dtype
    if not (on_metal() and known and 0 < H <= READS * MOST_THREADS * MOST_CHUNKS and x.size > 0):
        return add_norm_ref(x, r, weight, eps)
    rows, chunks = x.size // H, -(-H // (READS * MOST_THREADS))
    threads = min(-(-H // (READS * 32)) * 32, MOST_THREADS)
    share = 2 if chunks == MOST_CHUNKS else 1
    of_normed = mx.result_type(x, weight)
    h, normed = launch(
        "add_norm",
        {"x": x.reshape(rows, H), "r": r.reshape(rows, H), "weight": weight, "eps": constants(mx.float32, eps)},
        {"h": (x.shape, x.dtype), "normed": (x.shape, of_normed)},
        template={"T": x.dtype, "O": of_normed, "CHUNKS": chunks, "SHARE": share},
        grid=(rows * threads // share, 1, 1),
        group=(threads // share, 1, 1),
    )
    return h, normed
