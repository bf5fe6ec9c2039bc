"""`verify_qmm`: a few rows of x times quantized weights, with the bits that MLX's one-row kernel gives each row."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ._rows import row_groups
from ._source import kernel, on_metal

RESULTS = 4  # weight rows that share the x in a lane's registers
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Quantized:
    """Weights of one or several linears that read the same x, stacked along N.

    w [N, K * bits / 32] uint32; scales, biases [N, K / group_size] (biases: affine only); `ends`: where each linear
    ends along N.
    """

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str
    ends: tuple[int, ...]

    @property
    def k(self) -> int:
        return self.scales.shape[-1] * self.group_size

    def dtype(self, x: mx.array) -> mx.Dtype:
        """The type that MLX computes x times these weights in."""
        return x.dtype if self.biases is None else mx.result_type(x, self.scales, self.biases)


def supported(x: mx.array, weights: Quantized) -> bool:
    """Whether the kernel takes these: a format of BITS and GROUP_SIZES, and x of 16 or 32 bits."""
    return (
        weights.bits in BITS.get(weights.mode, ())
        and weights.group_size in GROUP_SIZES[weights.mode]
        and weights.dtype(x) in DTYPES
        and weights.w.ndim == 2
        and x.size > 0
    )


def lanes(weights: Quantized) -> tuple[int, int]:
    """(values of K that a lane takes at a time, lanes per weight row) of MLX 0.32.4's kernel for one row."""
    k, bits = weights.k, weights.bits
    if k in (64, 128) and bits in (2, 4, 8):
        return k // 4, 4  # qmv_quad
    pack = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    fast = pack * (1 if bits == 2 else 2)
    return (fast if k % (32 * fast) == 0 else pack), 32  # qmv_fast, qmv


def verify_qmm_ref(x: mx.array, weights: Quantized) -> list[mx.array]:
    """Dequantized, multiplied in float32, rounded once."""
    full = [a if a is None or a.dtype == mx.uint8 else a.astype(mx.float32) for a in (weights.scales, weights.biases)]
    w = mx.dequantize(
        weights.w, *full, weights.group_size, weights.bits, mode=weights.mode, dtype=mx.float32
    )
    y = (x.astype(mx.float32) @ w.T).astype(weights.dtype(x))
    return mx.split(y, list(weights.ends[:-1]), axis=-1)


def _verify_qmm_metal(x: mx.array, weights: Quantized) -> list[mx.array]:
    dtype, n = weights.dtype(x), weights.w.shape[0]
    rows_of_x = x.reshape(-1, weights.k).astype(dtype)
    m = rows_of_x.shape[0]
    groups, rows = row_groups(m)
    values, lanes_per_row = lanes(weights)
    scales, biases = weights.scales, weights.biases
    if biases is not None:
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    launch = kernel("verify_qmm", ("w", "scales", "biases", "x", "ends"), ("y",), ("quantized",))
    (y,) = launch(
        inputs=[weights.w, scales, scales if biases is None else biases, rows_of_x, mx.array(weights.ends)],
        template=[
            *(("T", dtype), ("S", scales.dtype), ("BITS", weights.bits), ("GROUP", weights.group_size)),
            *(("FP", biases is None), ("VALUES", values), ("LANES", lanes_per_row), ("ROWS", rows)),
        ],
        grid=(32 * groups, 2 * -(-n // (2 * RESULTS * (32 // lanes_per_row))), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(m * n,)],
        output_dtypes=[dtype],
    )
    return split_rows(y, m, weights.ends, x.shape[:-1])


def split_rows(y: mx.array, m: int, ends: Sequence[int], shape: Sequence[int]) -> list[mx.array]:
    """The flat output [m * N] of stacked weights as one array [*shape, N_p] per weight, without copies."""
    starts = (0, *ends[:-1])
    return [y[m * a : m * b].reshape(*shape, b - a) for a, b in zip(starts, ends, strict=True)]


def verify_qmm(x: mx.array, weights: Quantized) -> list[mx.array]:
    """x [..., K] times each of the stacked linears: a list of [..., N_p].

    On Metal each row's bits are those of MLX's kernel for one row, and up to 5 rows share one request of the weights.
    Elsewhere, or for a format that `supported` denies: dequantized and multiplied in float32.
    """
    if x.shape[-1] != weights.k:
        raise ValueError(f"x has {x.shape[-1]} columns; the weights have {weights.k}")
    return _verify_qmm_metal(x, weights) if on_metal() and supported(x, weights) else verify_qmm_ref(x, weights)
