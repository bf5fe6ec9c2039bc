"""Where the `.metal` files are, and the kernels made of them."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

INSTALLED, CHECKOUT = Path(__file__).parent / "metal", Path(__file__).parents[2] / "kernels"
DIRECTORY = INSTALLED if INSTALLED.is_dir() else CHECKOUT


def kernel(op: str, inputs: Sequence[str], outputs: Sequence[str], headers: Sequence[str] = ()) -> Callable[..., Any]:
    """The kernel whose body is `<op>.metal`, behind the headers `<name>.h`; made once."""
    return _made(mx.fast.metal_kernel, DIRECTORY, op, tuple(inputs), tuple(outputs), tuple(headers))


@functools.cache
def _made(
    maker: Callable[..., Any],
    directory: Path,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    headers: tuple[str, ...],
) -> Callable[..., Any]:
    # The maker is part of the key: the emulator takes the place of mx.fast.metal_kernel for a while.
    header = "".join((directory / f"{name}.h").read_text() for name in headers)
    source = (directory / f"{op}.metal").read_text()
    return maker(name=op, input_names=list(inputs), output_names=list(outputs), source=source, header=header)


def on_metal() -> bool:
    """Whether kernels can run: there is Metal, and the default device is the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
