"""Pass quantized weights to kernels, and launch the kernels that share an order of sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ._blocks import BLOCK_FORMATS, PIECE, block_product, dequantized_blocks
from ._source import DTYPES, launch, row_groups

BITS = {
    **{"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)},
    **{mode: (form.bits,) for mode, form in BLOCK_FORMATS.items()},
}
GROUP_SIZES = {
    **{"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)},
    **{mode: (form.group_size,) for mode, form in BLOCK_FORMATS.items()},
}
AFFINE, CODED, BLOCKS, SUPERBLOCKS = range(4)  # as in quantized.h
BLOCK_VALUES = 16  # of K that a lane reads at once in block formats
SIMDGROUPS = 2  # per threadgroup
WEIGHTS_ONCE = 12  # maximum rows of x that share one request of the weights
MOST_SUMS = 24  # maximum sums in a lane's registers
SPLIT_ROWS = 4  # rows of x per group if rows are split; this kernel is compiled anyway
DEVICE = 8  # MLX passes arrays of fewer elements in constant memory, which the kernels cannot read


@dataclass(frozen=True)
class Quantized:
    """Weights of one or several linears with the same input x, stacked along N; of heads or experts, N is axis 1.

    w: [N, K * bits / 32] uint32. scales, biases: [N, K / group_size], but scales of block formats are the uint16
    words [N, words] of `_blocks.py`; biases is None except in affine formats. ends: the end of each linear along N.
    bias: [N] or None, added to the rounded product by `verify_qmm`, `verify_glu` and `matrix_qmm` only.
    """

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str
    ends: tuple[int, ...]
    bias: mx.array | None = None

    @property
    def format(self) -> dict[str, Any]:
        """Keyword arguments of MLX's quantization functions."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def k(self) -> int:
        return self.w.shape[-1] * 32 // self.bits

    @property
    def is_blocks(self) -> bool:
        """Whether the format is one of GGUF's, which MLX's own operations do not support."""
        return self.mode in BLOCK_FORMATS

    @property
    def kind(self) -> str:
        """Describe what a kernel of these weights is compiled for: their format, and the lanes per weight row."""
        values, lanes_per_row = lanes(self)
        bias = "" if self.bias is None else " with bias"
        return f"{self.mode} {self.bits}-bit g{self.group_size}, {lanes_per_row} lanes of {values}{bias}"

    def dtype(self, x: mx.array) -> mx.Dtype:
        """Return the type in which MLX computes x times these weights."""
        return x.dtype if self.biases is None else mx.result_type(x, self.scales, self.biases)


def check_columns(x: mx.array, weights: Quantized) -> None:
    """Raise ValueError if x [..., K] has another K than the weights; nothing else is checked."""
    if x.shape[-1] != weights.k:
        raise ValueError(f"x has {x.shape[-1]} columns; the weights have {weights.k}")


def served(mode: str, bits: int, group_size: int) -> bool:
    """Return whether kernels support this quantization format."""
    return bits in BITS.get(mode, ()) and group_size in GROUP_SIZES[mode]


def known(x: mx.array, weights: Quantized) -> bool:
    """Return whether kernels support the weights' format and the type of the product; False for an empty x."""
    return served(weights.mode, weights.bits, weights.group_size) and weights.dtype(x) in DTYPES and x.size > 0


def supported(x: mx.array, weights: Quantized) -> bool:
    """Return whether kernels for a single matrix [N, K] support x and the weights (see `known`)."""
    return known(x, weights) and weights.w.ndim == 2


def small(weights: Quantized) -> bool:
    """Return whether w or scales have so few elements that MLX passes them in constant memory."""
    return min(weights.w.size, weights.scales.size) < DEVICE


def packs(bits: int) -> tuple[int, int]:
    """Return the number of values of K that a lane reads at once in MLX's `qmv`, and in its `qmv_fast`."""
    pack = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    return pack, pack * (1 if bits == 2 else 2)


def lanes(weights: Quantized) -> tuple[int, int]:
    """Return (values of K that a lane reads at once, lanes per weight row).

    Both numbers are those of MLX 0.32.4's kernel for one row; for block formats, which MLX does not support, those of
    our kernels.
    """
    if weights.k in (64, 128) and weights.bits in (2, 4, 8) and not weights.is_blocks:
        return weights.k // 4, 4  # qmv_quad
    return lane_values(weights), 32  # qmv_fast, qmv


def lane_values(weights: Quantized) -> int:
    """Return the values of K that a lane reads at once where 32 lanes share a weight row; see `lanes`."""
    if weights.is_blocks:
        return BLOCK_VALUES
    pack, fast = packs(weights.bits)
    return fast if weights.k % (32 * fast) == 0 else pack


def dequantized(weights: Quantized) -> mx.array:
    """Return the weights in float32, [..., N, K]."""
    scales, biases = weights.scales, weights.biases
    if weights.is_blocks:
        return dequantized_blocks(weights.w, scales, weights.mode)
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(weights.w, scales, biases, dtype=mx.float32, **weights.format)


def stock_product(x: mx.array, weights: Quantized) -> mx.array:
    """Return x [..., K] times the weights [N, K], as [..., N], by MLX's quantized product; no bias is added.

    MLX has none for block formats: these weights are dequantized in pieces, multiplied in float32, and the result is
    cast to x's type.
    """
    if weights.is_blocks:
        return block_product(x, weights.w, weights.scales, weights.mode)
    w, scales, biases = weights.w, weights.scales, weights.biases
    return mx.quantized_matmul(x, w, scales=scales, biases=biases, transpose=True, **weights.format)


def multiplied(x: mx.array, weights: Quantized | mx.array) -> mx.array:
    """Return x [..., K] times the weights [N, K], computed in float32, rounded once to the type of the product.

    At most PIECE weights, but at least one row of them, are in float32 at a time.
    """
    if isinstance(weights, Quantized) and weights.is_blocks:
        return block_product(x, weights.w, weights.scales, weights.mode)
    packed = weights.w if isinstance(weights, Quantized) else weights
    dtype = weights.dtype(x) if isinstance(weights, Quantized) else mx.result_type(x, weights)
    wide, size, found = x.astype(mx.float32), max(PIECE // x.shape[-1], 1), list[mx.array]()
    for begin in range(0, packed.shape[0], size):
        rows = slice(begin, begin + size)
        piece = mx.depends(packed[rows], found[-1]) if found else packed[rows]  # after the one before was used
        if isinstance(weights, Quantized):
            biases = None if weights.biases is None else weights.biases[rows]
            piece = dequantized(replace(weights, w=piece, scales=weights.scales[rows], biases=biases))
        found.append((wide @ piece.astype(mx.float32).T).astype(dtype))
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)


def arrays(weights: Quantized, dtype: mx.Dtype, name: str = "") -> dict[str, mx.array]:
    """Return the arrays by their names in kernels: w, scales, biases; or NAME, NAME_scales, NAME_biases.

    Affine scales and biases are converted to `dtype`. Formats without biases pass the scales twice. If w or scales
    are `small`, all are repeated eight times along the first axis, so that MLX passes them in device memory.
    """
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
    """Return the template arguments that kernels of quantized weights share, for x of type `dtype` and these."""
    stored, kind = (weights.scales.dtype, CODED) if weights.biases is None else (dtype, AFFINE)
    if weights.is_blocks:
        kind = BLOCKS if BLOCK_FORMATS[weights.mode].words == 1 else SUPERBLOCKS
    return {"T": dtype, "S": stored, "BITS": weights.bits, "GROUP": weights.group_size, "KIND": kind}


def parts(y: mx.array, x: mx.array, weights: Quantized) -> list[mx.array]:
    """Split a flat y, which holds one linear's product after the other, into views [..., N_p], one per linear."""
    if len(weights.ends) == 1:
        return [y.reshape(*x.shape[:-1], weights.ends[0])]
    m, starts = x.size // weights.k, (0, *weights.ends[:-1])
    return [y[m * a : m * b].reshape(*x.shape[:-1], b - a) for a, b in zip(starts, weights.ends, strict=True)]


def biased(products: Sequence[mx.array], weights: Quantized) -> list[mx.array]:
    """Return each linear's product [..., N_p] plus its part of the bias; the products themselves without a bias."""
    if weights.bias is None:
        return list(products)
    return [y + b for y, b in zip(products, mx.split(weights.bias, list(weights.ends[:-1])), strict=True)]


def splits(m: int) -> bool:
    """Return whether m rows can be split into groups of SPLIT_ROWS (4): whether there are more than that."""
    return m > SPLIT_ROWS


def tiles(m: int, split: bool = False) -> tuple[int, int, int]:
    """Return (groups of x's m rows, compiled rows per group, weight rows per lane).

    The fewest groups of at most twelve rows or, with `split` (for GPUs with few registers), of four; each requests
    the weights. A lane has a sum per row and weight row, at most MOST_SUMS: with more than six rows it has two weight
    rows instead of four, so that x, which is small and cached, is requested twice as often.
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
    """Launch kernel `op`; return y: flat [M * columns] for x [..., K], or of `shape` for x [1, M, heads, D].

    columns: values of y per row (and head).
    `more`, `template`: further inputs and template arguments of the op, by name. `split`: as in `tiles`.
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
