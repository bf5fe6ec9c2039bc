"""Hand quantized weights to kernels, and launch those that share their order of sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ._source import DTYPES, launch, row_groups

BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}
SIMDGROUPS = 2  # in a group of threads
WEIGHTS_ONCE = 12  # rows of x for which the weights are requested once
MOST_SUMS = 24  # that a lane keeps in registers
SPLIT_ROWS = 4  # of x in a group where rows are split: their kernel is compiled in any case
DEVICE = 8  # arrays of fewer elements are not in device memory, where the kernels look for them


@dataclass(frozen=True)
class Quantized:
    """Weights of one or several linears that read the same x, stacked along N.

    w: [N, K * bits / 32] uint32. scales, biases: [N, K / group_size], biases of affine formats only. ends: where each
        linear ends along N. bias: [N], added to the rounded product where the op says so.
    """

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str
    ends: tuple[int, ...]
    bias: mx.array | None = None

    @cached_property
    def ends_array(self) -> mx.array:
        return mx.array(self.ends)

    @property
    def format(self) -> dict[str, Any]:
        """As MLX's functions take it, by keyword."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def k(self) -> int:
        return self.scales.shape[-1] * self.group_size

    @property
    def kind(self) -> str:
        """Name what a kernel of these weights is compiled for: the format, and how lanes share a row."""
        values, lanes_per_row = lanes(self)
        bias = "" if self.bias is None else " with bias"
        return f"{self.mode} {self.bits}-bit g{self.group_size}, {lanes_per_row} lanes of {values}{bias}"

    def dtype(self, x: mx.array) -> mx.Dtype:
        """The type that MLX computes x times these weights in."""
        return x.dtype if self.biases is None else mx.result_type(x, self.scales, self.biases)


def check_columns(x: mx.array, weights: Quantized) -> None:
    """Raise ValueError where x [..., K] does not fit the weights."""
    if x.shape[-1] != weights.k:
        raise ValueError(f"x has {x.shape[-1]} columns; the weights have {weights.k}")


def served(mode: str, bits: int, group_size: int) -> bool:
    """Tell whether the kernels know this format."""
    return bits in BITS.get(mode, ()) and group_size in GROUP_SIZES[mode]


def known(x: mx.array, weights: Quantized) -> bool:
    """Tell whether the kernels know the format, and x is of 16 or 32 bits."""
    return served(weights.mode, weights.bits, weights.group_size) and weights.dtype(x) in DTYPES and x.size > 0


def supported(x: mx.array, weights: Quantized) -> bool:
    """Tell whether the kernels of one matrix take these."""
    return known(x, weights) and weights.w.ndim == 2


def small(weights: Quantized) -> bool:
    """Tell whether the arrays have so few elements that they would not be in device memory."""
    return min(weights.w.size, weights.scales.size) < DEVICE


def packs(bits: int) -> tuple[int, int]:
    """Count the values of K that a lane of MLX's `qmv` takes at a time, and one of its `qmv_fast`."""
    pack = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    return pack, pack * (1 if bits == 2 else 2)


def lanes(weights: Quantized) -> tuple[int, int]:
    """Count (values of K that a lane takes at a time, lanes per weight row) of MLX 0.32.4's kernel for one row."""
    k, bits = weights.k, weights.bits
    if k in (64, 128) and bits in (2, 4, 8):
        return k // 4, 4  # qmv_quad
    pack, fast = packs(bits)
    return (fast if k % (32 * fast) == 0 else pack), 32  # qmv_fast, qmv


def dequantized(weights: Quantized) -> mx.array:
    """Dequantize the weights to float32, [..., N, K]."""
    scales, biases = weights.scales, weights.biases
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(weights.w, scales, biases, dtype=mx.float32, **weights.format)


def multiplied(x: mx.array, weights: Quantized) -> mx.array:
    """Multiply x [..., K] in float32, and round once to what MLX computes in: [..., N]."""
    return (x.astype(mx.float32) @ dequantized(weights).T).astype(weights.dtype(x))


def arrays(weights: Quantized, dtype: mx.Dtype, name: str = "") -> dict[str, mx.array]:
    """Name the arrays as kernels do (name_scales with a name), affine ones in `dtype`, or scales twice."""
    w, scales, biases = weights.w, weights.scales, weights.biases
    if biases is not None:
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    if small(weights):
        times = (DEVICE, *[1] * (w.ndim - 1))
        w, scales = mx.tile(w, times), mx.tile(scales, times)
        biases = None if biases is None else mx.tile(biases, times)
    names = (name, f"{name}_scales", f"{name}_biases") if name else ("w", "scales", "biases")
    return dict(zip(names, (w, scales, scales if biases is None else biases), strict=True))


def format_template(weights: Quantized, dtype: mx.Dtype) -> dict[str, object]:
    """Say what every kernel's template does of x, of `dtype`, and the weights."""
    stored, fp = (weights.scales.dtype, True) if weights.biases is None else (dtype, False)
    return {"T": dtype, "S": stored, "BITS": weights.bits, "GROUP": weights.group_size, "FP": fp}


def parts(y: mx.array, x: mx.array, weights: Quantized) -> list[mx.array]:
    """Cut a flat y, where one linear's rows lie behind another's, into each one's [..., N_p]: views, contiguous."""
    if len(weights.ends) == 1:
        return [y.reshape(*x.shape[:-1], weights.ends[0])]
    m, starts = x.size // weights.k, (0, *weights.ends[:-1])
    return [y[m * a : m * b].reshape(*x.shape[:-1], b - a) for a, b in zip(starts, weights.ends, strict=True)]


def biased(products: Sequence[mx.array], weights: Quantized) -> list[mx.array]:
    """Add to each linear's [..., N_p] its part of the bias, in an operation of its own."""
    if weights.bias is None:
        return list(products)
    return [y + b for y, b in zip(products, mx.split(weights.bias, list(weights.ends[:-1])), strict=True)]


def splits(m: int) -> bool:
    """Tell whether m rows can be split: those of which a lane keeps more sums than its registers may hold."""
    return m > SPLIT_ROWS


def tiles(m: int, split: bool = False) -> tuple[int, int, int]:
    """Count (groups of m rows of x, rows in each, rows of weights whose sums a lane holds for each): at most 24 sums.

    Seven to twelve rows are still one group, with half the rows of weights: x is then requested twice as often, but
    it is small and cached, the weights are neither. Of more a lane would hold 32 sums, or one row of weights at a
    time, for which all of x is converted again: sixteen rows are two groups of eight. With `split` groups have four
    rows, each of which requests the weights, for GPUs whose registers are too few for the sums of more.
    """
    groups, rows = row_groups(m, SPLIT_ROWS if split else WEIGHTS_ONCE)
    return groups, rows, 4 if 4 * rows <= MOST_SUMS else 2


def multiply(
    op: str,
    x: mx.array,
    weights: Quantized,
    *,
    columns: int,
    more: Mapping[str, mx.array] | None = None,
    template: Mapping[str, object] | None = None,
    shape: tuple[int, ...] | None = None,
    split: bool = False,
) -> mx.array:
    """Launch `op` over the rows of x [..., K]: y, flat [M * columns]; or of x [1, M, heads, D]: y of `shape`.

    `more`: the op's inputs behind these, by name; `template`: what it takes besides the weights' format. Each column
    is made of the same number of weight rows. `split`: as `tiles` has it.
    """
    x = (x if shape else x.reshape(-1, weights.k)).astype(weights.dtype(x))
    m, heads = x.shape[-3 if shape else 0], x.shape[2] if shape else 1
    groups, rows, results = tiles(m, split)
    values, lanes_per_row = lanes(weights)
    columns_per_group = SIMDGROUPS * (32 // lanes_per_row) * results * columns // weights.ends[-1]
    lane = {"VALUES": values, "LANES": lanes_per_row, "ROWS": rows, "RESULTS": results}
    return launch(
        op,
        {**arrays(weights, x.dtype), "x": x, **(more or {})},
        {"y": (shape or (m * columns,), x.dtype)},
        template={**format_template(weights, x.dtype), **lane, **(template or {})},
        grid=(32 * groups, SIMDGROUPS * -(-columns // columns_per_group), heads),
        group=(32, SIMDGROUPS, 1),
    )[0]
