"""Requantize GGUF types that do not fit MLX's groups of 32, and measure the error."""

from typing import NamedTuple

import numpy as np

from .blocks import GROUP, Groups, six_bits

Q6_K, HALVES = 210, 16  # bytes of a block, and groups of 16 in it


class Loss(NamedTuple):
    """The error of weights: root mean square relative to the weights', and maximum relative to the largest weight."""

    rms: float
    worst: float


def dequantized(kind: str, rows: np.ndarray) -> np.ndarray:
    """Return the weights of rows of blocks in float32, [rows, columns], with the gguf package.

    kind: name of a type in that package. ValueError for one that it cannot dequantize; ImportError without it.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind == "F64":
        return np.ascontiguousarray(rows).view("<f8").astype(np.float32)
    try:
        with np.errstate(all="ignore"):
            return dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind]).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError):
        raise ValueError(f"tensors of type {kind} are not supported") from None


def requantized(kind: str, rows: np.ndarray, bits: int) -> Groups:
    """Return rows of GGUF blocks, uint8 [rows, bytes], as `Groups` with codes of `bits` bits.

    Scales and biases follow from the minimum and maximum of each group of 32. Of Q6_K at 8 bits, the half of each
    group that has the larger scale stays exact instead. ValueError for a GGUF type that cannot be dequantized.
    """
    if kind == "Q6_K" and bits == 8:
        return _six_bits(rows)
    values = dequantized(kind, rows)
    groups = values.reshape(len(values), -1, GROUP)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = (high - low) / np.float32(2**bits - 1)
    steps = np.where(scales > 0, scales, 1)
    codes = np.rint((groups - low[..., None]) / steps[..., None]).clip(0, 2**bits - 1).astype(np.uint8)
    return Groups(codes.reshape(values.shape), scales, low)


def _six_bits(rows: np.ndarray) -> Groups:
    """Return rows of Q6_K blocks, uint8 [rows, bytes], as `Groups` with codes of 8 bits.

    The half of each group of 32 that has the larger scale stays exact.
    """
    n, b = len(rows), np.ascontiguousarray(rows).reshape(-1, Q6_K)
    codes = six_bits(b).reshape(-1, HALVES // 2, 2, 16).astype(np.float32) - 32
    d = np.ascontiguousarray(b[:, 208:]).view(np.float16).astype(np.float32)
    scales = (d * b[:, 192:208].view(np.int8)).reshape(-1, HALVES // 2, 2)
    larger = np.take_along_axis(scales, np.abs(scales).argmax(axis=-1)[..., None], -1)
    ratio = 4 * scales / np.where(larger == 0, 1, larger)
    steps = np.rint(codes * ratio[..., None]).clip(-128, 127) + 128
    step = larger[..., 0] / 4
    return Groups(steps.astype(np.uint8).reshape(n, -1), step.reshape(n, -1), (-128 * step).reshape(n, -1))


def loss(made: np.ndarray, true: np.ndarray) -> Loss:
    """Return the error of stored weights (`made`) compared with the file's (`true`), both of one shape."""
    error = made.astype(np.float64) - true
    size = np.sqrt(np.mean(np.square(true, dtype=np.float64))) or 1.0
    return Loss(float(np.sqrt(np.mean(error * error)) / size), float(np.abs(error).max() / (np.abs(true).max() or 1)))
