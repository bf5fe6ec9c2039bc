"""Launch the kernels of the `.metal` files, and say where they can run and how rows are shared out."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ._first_launch import KernelRefused, Launch, Refusal, is_noted, listeners, note
from ._text import kernel_text
from .contraction import SPELLINGS, kernel_spelling

DTYPES = (mx.float32, mx.float16, mx.bfloat16)  # that kernels are written for
COMPILED_ROWS = (1, 2, 4, 6, 8, 12, 16)  # numbers of rows with kernels of their own; each is a fraction of a second's
# compile, those of more than 8 for several sequences only
BLOCK, MOST_BLOCKS = 128, 2  # values of a head that a simdgroup takes at once, and how often
RESERVED = 16384  # bytes that MLX takes room for beside a launch's source (write_signature in its metal_kernel.cpp)
Names = tuple[str, ...]
Maybe = mx.array | None
INSTALLED, CHECKOUT = Path(__file__).parent / "metal", Path(__file__).parents[2] / "kernels"
DIRECTORY = INSTALLED if INSTALLED.is_dir() else CHECKOUT


class Launched(threading.local):
    """A thread's launches. held: bytes that MLX takes for their sources, of all that were ever made."""

    held = 0


_launched = Launched()


def source_bytes() -> int:
    """Count the bytes that MLX has taken for the sources of this thread's launches, let go of or not."""
    return _launched.held


def launch(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
    *,
    template: Mapping[str, object],
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
) -> list[mx.array]:
    """Launch the kernel whose body is `<op>.metal`, behind the headers that it includes: its outputs, in their order.

    inputs: arrays and numbers by the names that the body has for them. outputs: shape and dtype of each, by name.
    template: dtypes, ints and bools. grid: all threads, in groups of `group`. Views are copied first, unless the body
    reads strides. Raises KernelRefused where MLX does not take it.
    """
    shapes, dtypes = zip(*outputs.values(), strict=True)
    given, ran = list(inputs.values()), (*template.values(), *group)
    try:
        made, size, all_ran = _made(
            mx.fast.metal_kernel, DIRECTORY, op, tuple(inputs), tuple(outputs), kernel_spelling(op)
        )
        _launched.held += size
        arrays = made(
            inputs=given,
            template=list(template.items()),
            grid=grid,
            threadgroup=group,
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
    except Exception as e:
        raise KernelRefused.of(Refusal((op, ran), e)) from e
    if (ran not in all_ran and not is_noted((op, ran), all_ran)) or listeners:
        sizes = {"grid": grid, "threadgroup": group, "output_shapes": shapes, "output_dtypes": dtypes}
        how = {"template": list(template.items()), **sizes}
        note(Launch((op, ran), mx.fast.metal_kernel, made, given, how, all_ran))
    return arrays


@functools.cache
def _made(
    maker: Callable[..., Any], directory: Path, op: str, inputs: Names, outputs: Names, spelling: str
) -> tuple[Callable[..., Any], int, set[tuple[object, ...]]]:
    # The maker is part of the key: the emulator takes the place of mx.fast.metal_kernel for a while.
    header, source = kernel_text(directory, op)
    if "CONTRACTION" in header:
        header = f"#define CONTRACTION {SPELLINGS.index(spelling)}\n{header}"
    more = {"source": source, "header": header, "ensure_row_contiguous": "_strides" not in source}
    size = len(header) + len(source) + RESERVED
    return maker(name=op, input_names=inputs, output_names=outputs, **more), size, set()


@functools.cache
def constants(dtype: mx.Dtype, *values: float) -> mx.array:
    """Make an array [len(values)] of the values, once: a launch of every layer of every step reads it."""
    return mx.array(values, dtype)


def floats(*arrays: mx.array) -> bool:
    """Tell whether all are of types that kernels are written for."""
    return all(array.dtype in DTYPES for array in arrays)


def padded(m: int) -> int:
    """Find for how many rows the kernel is compiled that serves m of them: the last row then stands for more."""
    return next((rows for rows in COMPILED_ROWS if rows >= m), m)


def row_groups(m: int, most: int = 5) -> tuple[int, int]:
    """Count (groups, rows that each is compiled for): the fewest groups of at most `most` rows that hold m >= 1 rows.

    A thread keeps sums of that many rows in registers, 5 where each has four rows of unquantized weights.
    The last group begins at m - rows, so it may share rows with the one before; only its own are its to store.
    """
    assert m >= 1, f"{m} rows"
    groups = -(-m // most)
    return groups, min(padded(-(-m // groups)), most)


def on_metal() -> bool:
    """Tell whether kernels can run: there is Metal, and the default device is the GPU."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu
