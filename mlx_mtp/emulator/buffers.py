"""Convert arrays to the buffers of a launch, and its outputs back to arrays."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

INPUT, OUTPUT, THREADGROUP = range(3)


@dataclass
class KernelBuffer:
    """One buffer of a launch: its bytes and, after the launch, counts of the kernel's accesses."""

    name: str
    data: np.ndarray  # uint8, copied before the launch; outputs are copied back
    itemsize: int
    kind: int
    initialised: bool = True
    origin: int = 0  # byte of `data` at which the kernel's pointer starts
    touched: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))  # flags per byte: 1 read, 2 written
    counts: dict[str, int] = field(default_factory=dict)


def _bytes(x: mx.array) -> np.ndarray:
    return np.array(x.reshape(-1).view(mx.uint8))


def input_buffers(name: str, x: mx.array, contiguous: bool) -> dict[str, KernelBuffer]:
    """Return buffers with copies of x's bytes and, unless it is a scalar, its shape, strides (in elements) and ndim.

    Keys: `name`, and `name`_shape, _strides and _ndim.
    With `contiguous`, x is copied row by row if needed; otherwise a view includes all bytes between its ends.
    """
    a = np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    if x.size == 0 or contiguous or a.flags.c_contiguous:
        strides = [int(np.prod(x.shape[i + 1 :])) for i in range(x.ndim)]
        data = KernelBuffer(name, _bytes(x), x.itemsize, INPUT)
    else:
        strides = [s // x.itemsize for s in a.strides]
        reach = [(n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)]
        first, last = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        start = a.__array_interface__["data"][0] + first
        window = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first + x.itemsize)).from_address(start))
        data = KernelBuffer(name, window.copy(), x.itemsize, INPUT, origin=-first)
    buffers = {name: data}
    if x.ndim > 0:
        about = {"shape": mx.array(x.shape), "strides": mx.array(strides, mx.int64), "ndim": mx.array([x.ndim])}
        for what, values in about.items():
            buffers[f"{name}_{what}"] = KernelBuffer(f"{name}_{what}", _bytes(values), values.itemsize, INPUT)
    return buffers


def output_buffer(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> KernelBuffer:
    """Return an output's buffer, filled with `init_value`, or with 0xff bytes that count as unwritten."""
    if init_value is None:
        size = int(np.prod(shape)) * dtype.size
        return KernelBuffer(name, np.full(size, 0xFF, np.uint8), dtype.size, OUTPUT, initialised=False)
    return KernelBuffer(name, _bytes(mx.full(tuple(shape), init_value, dtype=dtype)), dtype.size, OUTPUT)


def output_array(buffer: KernelBuffer, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return the output that a kernel has written to its buffer, as an array of `shape` and `dtype`."""
    return mx.array(buffer.data).view(dtype).reshape(tuple(shape))
