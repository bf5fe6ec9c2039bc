"""Make kernels of the `.metal` files, and say where they can run."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ._shorten import shorten

DTYPES = (mx.float32, mx.float16, mx.bfloat16)  # that kernels are written for
INSTALLED, CHECKOUT = Path(__file__).parent / "metal", Path(__file__).parents[2] / "kernels"
DIRECTORY = INSTALLED if INSTALLED.is_dir() else CHECKOUT


def kernel(
    op: str, inputs: Sequence[str], outputs: Sequence[str], headers: Sequence[str] = (), strided: bool = False
) -> Callable[..., Any]:
    """Make the kernel whose body is `<op>.metal`, behind the headers `<name>.h`; once for the same arguments.

    `strided`: it takes views as they lie, which would be copied otherwise, and reads their strides.
    """
    return _made(mx.fast.metal_kernel, DIRECTORY, op, tuple(inputs), tuple(outputs), tuple(headers), strided)


@functools.cache
def _made(
    maker: Callable[..., Any],
    directory: Path,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    headers: tuple[str, ...],
    strided: bool,
) -> Callable[..., Any]:
    # The maker is part of the key: the emulator takes the place of mx.fast.metal_kernel for a while.
    header = "".join((directory / f"{name}.h").read_text() for name in headers)
    source = (directory / f"{op}.metal").read_text()
    header, source = shorten(header, source)
    names = {"input_names": list(inputs), "output_names": list(outputs)}
    return maker(name=op, **names, source=source, header=header, ensure_row_contiguous=not strided)


@functools.cache
def constants(dtype: mx.Dtype, *values: float) -> mx.array:
    """Make an array [len(values)] of the values, once: a launch of every layer of every step reads it."""
    return mx.array(values, dtype)


def on_metal() -> bool:
    """Tell whether kernels can run: there is Metal, and the default device is the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
