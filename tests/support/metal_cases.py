"""Launch small kernels in the emulator, and compare with float64."""

import sys
from contextlib import contextmanager
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp import emulator

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux")


def launch(body, *inputs, out=None, dtype=mx.float32, grid=None, group=32, header="", names="abcdefgh", **more):
    """Launch a body whose inputs are a, b, c, ... and whose output is `out`; one thread per output element."""
    shape = out if out is not None else inputs[0].shape
    kernel = emulator.metal_kernel("probe", list(names[: len(inputs)]), ["out"], body, header=header)
    threads = int(np.prod(shape)) if grid is None else grid
    more.setdefault("threadgroup", (min(group, threads), 1, 1))
    (y,) = kernel(inputs=list(inputs), grid=(threads, 1, 1), output_shapes=[shape], output_dtypes=[dtype], **more)
    return y


def fault_of(body, *inputs, kind=emulator.KernelFault, **more) -> str:
    """Return the message with which the launch fails."""
    with pytest.raises(kind) as error:
        launch(body, *inputs, **more)
    return str(error.value)


def exact(x: mx.array) -> np.ndarray:
    """Return the array in float64."""
    return np.array(x.astype(mx.float32), dtype=np.float64)


def relative_error(got: mx.array, want: np.ndarray) -> float:
    return float(np.abs(exact(got) - want).max() / np.abs(want).max())


@contextmanager
def counted_launches():
    """Record (name, threadgroups) of each kernel launched inside, without computing anything."""
    found = []

    def maker(name, **_):
        def launched(*, grid, threadgroup, output_shapes, output_dtypes, **_):
            found.append((name, int(np.prod([-(-n // of) for n, of in zip(grid, threadgroup, strict=True)]))))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launched

    gpu = mx.Device(mx.gpu)
    with (
        mock.patch.object(mx.fast, "metal_kernel", maker),
        mock.patch.object(mx.metal, "is_available", return_value=True),
        mock.patch.object(mx, "default_device", return_value=gpu),
    ):
        yield found
