"""Launch the kernels of the `.metal` files, and choose their row counts."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ._first_launch import KernelRefused, Launch, Refusal, is_noted, keep, listeners, note
from ._text import kernel_text
from .contraction import SPELLINGS, kernel_spelling

DTYPES = (mx.float32, mx.float16, mx.bfloat16)  # supported by kernels
COMPILED_ROWS = (1, 2, 4, 6, 8, 12, 16)  # compiled row counts
BLOCK, MOST_BLOCKS = 128, 2  # values of a head that a simdgroup processes at once; maximum number of such blocks
RESERVED = 16384  # bytes that MLX reserves in addition to a launch's source (write_signature in metal_kernel.cpp)
Names = tuple[str, ...]
Maybe = mx.array | None
INSTALLED, CHECKOUT = Path(__file__).parent / "metal", Path(__file__).parents[2] / "kernels"
DIRECTORY = INSTALLED if INSTALLED.is_dir() else CHECKOUT


class Launched(threading.local):
    """A thread's count of the bytes of its launches. held: see `source_bytes`."""

    held = 0


_launched = Launched()


def source_bytes() -> int:
    """Return the estimated bytes that MLX has allocated for the sources of all launches of this thread.

    The number only grows: freed sources count, too.
    """
    return _launched.held


def launch(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
    *,
    template: Mapping[str, object],
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
    before: str = "",
) -> list[mx.array]:
    """Launch the kernel `<op>.metal`, with the headers that it includes; return a list of its `outputs`.

    inputs: arrays and numbers by their names in the body. outputs: shape and dtype of each, by name. template:
    dtypes, ints and bools. grid: all threads, in groups of `group`. before: functions that the text calls.
    Views are copied, unless the body reads strides.
    The outputs are lazy: KernelRefused is raised if the kernel cannot be read, constructed or called, but not if a
    later evaluation cannot compile or run it (see `run_new`). The emulator's kernels, however, run in this call.
    """
    shapes, dtypes = zip(*outputs.values(), strict=True)
    given, ran = list(inputs.values()), (*template.values(), *group)
    try:
        made, size, all_ran = _made(
            mx.fast.metal_kernel, DIRECTORY, op, tuple(inputs), tuple(outputs), kernel_spelling(op), before
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
    maker: Callable[..., Any], directory: Path, op: str, inputs: Names, outputs: Names, spelling: str, before: str
) -> tuple[Callable[..., Any], int, set[tuple[object, ...]]]:
    # The maker is part of the cache's key, because the emulator temporarily replaces mx.fast.metal_kernel.
    header, source = kernel_text(directory, op)
    if "CONTRACTION" in header:
        header = f"#define CONTRACTION {SPELLINGS.index(spelling)}\n{header}"
    header = before + header
    more = {"source": source, "header": header, "ensure_row_contiguous": "_strides" not in source}
    size = len(header) + len(source) + RESERVED
    return maker(name=op, input_names=inputs, output_names=outputs, **more), size, set()


@functools.cache
def inverse(temp: float) -> float:
    """Return 1 / temp, at least the least normal float32: 0 would make a NaN of a removed token's logit."""
    return max(1.0 / temp, 2.0**-126)


def constants(dtype: mx.Dtype, *values: float) -> mx.array:
    """Return an array [len(values)] of the values, created once; launches of every layer and step read it.

    Sizes, layouts and options must be passed this way: a kernel's first launch then has their values (`keep`).
    """
    return keep(mx.array(values, dtype))


def check_tape(tape: Any, accepted: Maybe) -> None:
    """Raise ValueError if only one of a tape (rows of the last verify) and its number of accepted rows is given."""
    if (tape is None) != (accepted is None):
        given = "tape" if accepted is None else "accepted"
        raise ValueError(f"only {given} is given; tape and accepted go together")


def floats(*arrays: mx.array) -> bool:
    """Return whether kernels support the types of all arrays."""
    return all(array.dtype in DTYPES for array in arrays)


def padded(m: int) -> int:
    """Round m up to a compiled row count (above 16 it is unchanged); the kernel repeats the last row to fill it."""
    return next((rows for rows in COMPILED_ROWS if rows >= m), m)


def row_groups(m: int, most: int = 5) -> tuple[int, int]:
    """Return (groups, compiled rows of each): the fewest groups of at most `most` rows for m >= 1 rows.

    `most` is limited by a thread's registers. A single group may have more rows than m (see `padded`). The last of
    several starts at m - rows, so it may share rows with the one before; it stores only the others.
    """
    assert m >= 1, f"{m} rows"
    groups = -(-m // most)
    return groups, min(padded(-(-m // groups)), most)


def on_metal() -> bool:
    """Return whether kernels can run: Metal is available, and the GPU is the default device."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu
