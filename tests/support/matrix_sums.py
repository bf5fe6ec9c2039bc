"""The arithmetic of the lane `matrix` in numpy, as kernels/units.h states it, and inputs that show another order."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from mlx_mtp import emulator
from mlx_mtp.kernels import (
    BLOCK_FORMATS,
    MatrixOrder,
    Quantized,
    _matrix,
    matrix_gemv,
    matrix_orders,
    matrix_qmm,
    quantized_blocks,
    take_order,
)

F32 = np.float32
KVALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
CODES = np.arange(256)
E4M3 = (1 - CODES // 128 * 2) * np.where(  # codes of an exponent of 0 are subnormal
    CODES % 128 < 8, CODES % 8 * 2.0**-9, (1 + CODES % 8 / 8) * 2.0 ** (CODES % 128 // 8 - 7)
).astype(F32)
E8M0 = (2.0 ** (np.minimum(CODES, 254) - 127.0)).astype(F32)
EXPONENTS = {mx.float32: 20, mx.bfloat16: 20, mx.float16: 13}


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of float32 numbers, rounded once: float64 sums are rounded to odd before."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    near = product + c
    of_c = near - product
    error = (product - (near - of_c)) + (c - of_c)  # near + error is the exact sum
    even = (near.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, np.nextafter(near, np.where(error > 0, np.inf, -np.inf)), near)
    return odd.astype(F32)


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """Return the sum of eight numbers by two, four, eight."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def codes_of(weights: Quantized) -> np.ndarray:
    """Return the values of packed codes before scaling, [N, K]."""
    bits = np.unpackbits(np.array(weights.w).view(np.uint8), axis=-1, bitorder="little")
    places = bits.reshape(len(bits), -1, weights.bits) << np.arange(weights.bits, dtype=np.uint8)
    codes = places.sum(axis=-1, dtype=np.int64)
    if weights.mode == "affine":
        return codes.astype(F32)
    if weights.mode == "q6_k":
        return (codes - 32).astype(F32)
    return (KVALUES if weights.mode.startswith("iq4") else E2M1 if weights.bits == 4 else E4M3)[codes]


def scales_of(weights: Quantized) -> np.ndarray:
    """Return the scale of each group, [N, K / group_size]."""
    if weights.mode == "affine":
        return np.array(weights.scales.astype(mx.float32))
    stored = np.array(weights.scales)
    if weights.mode not in BLOCK_FORMATS:
        return (E4M3 if weights.mode == "nvfp4" else E8M0)[stored]
    records = np.ascontiguousarray(stored.reshape(len(stored), -1, BLOCK_FORMATS[weights.mode].words))
    numbers = records[..., :1].copy().view(np.float16).astype(F32)
    factors = records[..., 1:].copy().view(np.int8).astype(F32) if records.shape[-1] > 1 else F32(1)
    return (numbers * factors).reshape(len(stored), -1)


def product(x: mx.array, weights: Quantized | mx.array) -> np.ndarray:
    """Return x [M, K] times the transposed weights [N, K], float32 [M, N], in the order "forward"."""
    values = np.array(x.astype(mx.float32))
    plain = isinstance(weights, mx.array)
    group = 64 if isinstance(weights, mx.array) else weights.group_size
    added = None if isinstance(weights, mx.array) else weights.biases
    codes = (
        np.array(weights.astype(x.dtype).astype(mx.float32)) if isinstance(weights, mx.array) else codes_of(weights)
    )
    scales = np.ones((1, 1), F32) if isinstance(weights, mx.array) else scales_of(weights)
    biases = None if added is None else np.array(added.astype(mx.float32))
    k = values.shape[1]
    values, codes = (np.pad(a, ((0, 0), (0, -k % 64))) for a in (values, codes))
    unit = min(group, 64)
    run = 2 if unit < 32 else 4
    slices = [np.zeros((len(values), len(codes)), F32) for _ in range(8)]
    for block in range(0, k, 64):
        term = np.zeros_like(slices[0])
        for at in range(block, min(block + 64, k), unit):
            sums = unit_sums(values[:, at : at + unit], codes[:, at : at + unit], run)
            if plain:
                term = sums[0]
                continue
            if biases is not None:
                term = fma(biases[None, :, at // group], sums[1][:, None], term)
            term = fma(scales[None, :, at // group], sums[0], term)
        slices[block // 256 % 8] += term
    return tree(slices)


def unit_sums(values: np.ndarray, codes: np.ndarray, run: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a unit's products [M, N], and its sum of x [M]."""
    chain = np.zeros((len(values), len(codes)), F32)
    columns = [np.zeros(len(values), F32) for _ in range(8)]
    for part in range(0, values.shape[1], 8 * run):
        for step in range(run):
            for column in range(8):
                at = part + column * run + step
                chain = fma(values[:, None, at], codes[None, :, at], chain)
                columns[column] = columns[column] + values[:, at]
    return chain, tree(columns)


def sensitive(mode: str, bits: int, group: int, n: int, k: int, m: int, dtype: mx.Dtype, ends: tuple[int, ...] = ()):
    """Return x [m, K] and weights [N, K] whose sums differ between orders; mode "plain" is unquantized.

    Half of the values of x cancel in pairs under equal codes, with magnitudes of 2^-20 to 2^20; a sum of them and of
    the others, near 1, shows in 16 bits, too, in which order they were added.
    """
    rng = np.random.default_rng([n, k, m, bits, group])
    x, w = rng.normal(size=(m, k)), rng.normal(size=(n, k))
    size = EXPONENTS[dtype]
    for at in range(0, k, span := min(group, 64)):
        places = rng.permutation(np.arange(at, min(at + span, k)))
        first, second = np.split(places[: len(places) // 4 * 2], 2)
        x[:, first] *= 2.0 ** rng.integers(-size, size + 1, first.shape)
        x[:, second], w[:, second] = -x[:, first], w[:, first]
    x, w = mx.array(x.astype(F32)).astype(dtype), mx.array(w.astype(F32))
    return x, w.astype(dtype) if mode == "plain" else quantized(w, mode, bits, group, dtype, ends or (n,))


def quantized(w: mx.array, mode: str, bits: int, group: int, dtype: mx.Dtype, ends: tuple[int, ...]) -> Quantized:
    if mode in BLOCK_FORMATS:
        return Quantized(*quantized_blocks(w, mode), None, group, bits, mode, ends)
    packed, scales, *biases = mx.quantize(w.astype(dtype), group, bits, mode=mode)
    return Quantized(packed, scales, biases[0] if biases else None, group, bits, mode, ends)


@functools.cache
def probed(order: str, fused: bool) -> MatrixOrder:
    """Return what the probe reads on a Mac with this matrix unit."""
    options = emulator.Options(matrix_order=order, matrix_fused=fused, optimize=0, traffic=False)
    with emulator.emulated(options):
        return matrix_orders()["float32"]


@contextmanager
def machine(unit: str = "forward", fused: bool = True, **options) -> Iterator[list[emulator.Traffic]]:
    """Run kernels as on a Mac with this matrix unit, whose order the twin takes; yield the launches' traffic."""
    before, how = _matrix._taken[0], {"traffic": False, **options}
    take_order(probed(unit, fused))
    try:
        with emulator.emulated(emulator.Options(matrix_order=unit, matrix_fused=fused, **how)) as launches:
            yield launches
    finally:
        take_order(before)


def multiplied(x: mx.array, weights: Quantized | mx.array) -> mx.array:
    """Return our product [M, N] of x with weights, of several stacked ones side by side."""
    if isinstance(weights, mx.array):
        return matrix_gemv(x, weights)
    return mx.concatenate(matrix_qmm(x, weights), axis=-1)
