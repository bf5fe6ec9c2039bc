"""Multiply rows with an unquantized matrix (routers, LM heads); each row has the bits that MLX gives it alone."""

import mlx.core as mx

from ._source import DTYPES, Maybe, launch, on_metal, row_groups

FEW_ROWS, MOST_ROWS = 8, 16  # up to 8 rows, 5 share a request of the weights; above, 16 share one of fewer weights
MOST_SUMS = 32  # maximum sums in a thread's registers
DOT_THREADS = 256  # half of MLX's dot product's
DOT_BLOCK = 16384  # above this K MLX's dot product has partial sums in several threadgroups


def verify_gemv_ref(x: mx.array, w: mx.array, bias: Maybe = None) -> mx.array:
    """Return x @ w.T by MLX's matmul, which sums in float32, plus the bias, added to the rounded product."""
    y = x @ w.T
    return y if bias is None else y + bias


def _tile(k: int, n: int) -> tuple[int, int, int, int]:
    """Return MLX's choice for one row: lanes and simdgroups along K, simdgroups along N, rows of w per thread."""
    rows = 1 if n < 4 else 4
    if k <= 64:
        return 4, 1, 1, rows
    if k >= 16 * n:
        return 32, 8, 1, rows
    return 32, 1, 8 if n >= 4096 else 4, rows


def _spread(n: int, simds_n: int, rows: int) -> tuple[int, int]:
    """Return simdgroups along N and rows of w per thread, for many threadgroups; no bits depend on them."""
    return (1 if n < 1024 else simds_n), (2 if 128 <= n < 256 else rows)


def _verify_gemv_metal(x: mx.array, w: mx.array, bias: Maybe) -> mx.array:
    (m, k), n = x.shape, w.shape[0]
    groups, rows = row_groups(m) if m <= FEW_ROWS else row_groups(m, MOST_ROWS)
    if n == 1 and bias is None:
        return launch(
            "verify_dot",
            {"x": x, "w": w, "K": k, "M": m},
            {"y": ((m, 1), x.dtype)},
            template={"T": x.dtype, "ROWS": rows},
            grid=(DOT_THREADS * groups, 1, 1),
            group=(DOT_THREADS, 1, 1),
        )[0]
    lanes, simds_k, *along_n = _tile(k, n)
    simds_n, tm = _spread(n, *along_n)
    tm = min(tm, MOST_SUMS // rows)
    blocks = -(-n // (simds_n * (32 // lanes) * tm))
    return launch(
        "verify_gemv",
        {"x": x, "w": w, "bias": x if bias is None else bias, "K": k, "N": n, "M": m},
        {"y": ((m, n), x.dtype)},
        template={"T": x.dtype, "ROWS": rows, "TM": tm, "LANES": lanes, "SIMDS": simds_k, "BIAS": bias is not None},
        grid=(32 * groups, simds_k * blocks, simds_n),
        group=(32, simds_k, simds_n),
    )[0]


def _dtype(x: mx.array, w: mx.array, bias: Maybe) -> mx.Dtype:
    return mx.result_type(x, w, *([] if bias is None else [bias]))


def supported(x: mx.array, w: mx.array, bias: Maybe = None) -> bool:
    """Return whether the kernels support these: a float type, nothing empty; with N = 1 and no bias K <= 16384."""
    n, k = w.shape
    partial_sums = n == 1 and bias is None and k > DOT_BLOCK
    return _dtype(x, w, bias) in DTYPES and x.size > 0 and w.size > 0 and not partial_sums


def verify_gemv(x: mx.array, w: mx.array, bias: Maybe = None) -> mx.array:
    """Multiply x [..., K] with the transpose of w [N, K], and add bias [N]: [..., N].

    On Metal each row has the bits of MLX's `x @ w.T` (with a bias `addmm`) for that row alone and a `w` stored row by
    row. Types are float16, bfloat16 or float32, promoted as in matmul. Elsewhere, and where `supported` is False, MLX
    computes the product. Raises ValueError for shapes that do not match.
    """
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}; it must be (N, K)")
    if x.ndim == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape}; its last axis must be the {w.shape[1]} of w {w.shape}")
    if bias is not None and bias.shape != (w.shape[0],):
        raise ValueError(f"bias has shape {bias.shape}; it must be ({w.shape[0]},), a value per row of w")
    if not (on_metal() and supported(x, w, bias)):
        return verify_gemv_ref(x, w, bias)
    dtype, (n, k) = _dtype(x, w, bias), w.shape
    bias = None if bias is None else bias.astype(dtype)
    return _verify_gemv_metal(x.reshape(-1, k).astype(dtype), w.astype(dtype), bias).reshape(*x.shape[:-1], n)
