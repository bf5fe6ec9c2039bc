"""List the jobs of `doctor --compile-only`: one for each text of the released models' kernels."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..emulator.texts import LaunchText, RecordedLaunch, recorded
from ..kernels import on_metal
from ..kernels._source import DIRECTORY, DTYPES
from .compile_child import by_mlx
from .kernel_launches import BLOCKS, FORMATS, RELEASED, groups

OPS = tuple(sorted(path.stem for path in DIRECTORY.glob("*.metal")))
SMALL = 64  # maximum elements of an array whose values are kept
CompileJob = dict[str, Any]


def type_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name in `mx`, such as "float16"."""
    return str(dtype).removeprefix("mlx.core.")


TYPES = tuple(type_name(dtype) for dtype in DTYPES)


def launches(ops: Sequence[str] = (), sample: int | None = None, every_format: bool = False) -> list[RecordedLaunch]:
    """Return, ordered by kernel, one launch per different kernel text: the one with the most threads per group.

    ops: only these kernels, by default OPS. sample: at most this number of texts per kernel, evenly spaced.
    every_format: all formats that the kernels support, not only those of RELEASED and BLOCKS.
    """
    by_kernel = [each for each in _different(every_format) if each.text.kernel in (ops or OPS)]
    parts = [list(part) for _, part in itertools.groupby(by_kernel, key=lambda each: each.text.kernel)]
    found = []
    for part in parts:
        count = min(sample or len(part), len(part))
        found += [part[i * (len(part) - 1) // max(1, count - 1)] for i in range(count)]
    return found


@functools.cache
def _different(every_format: bool) -> list[RecordedLaunch]:
    """Return, ordered by kernel, one launch per different kernel text: the one with the most threads per group.

    every_format: as in `launches`.
    """
    with recorded() as launched:
        for make in groups(FORMATS if every_format else [*RELEASED, *BLOCKS]).values():
            for launch in make():
                launch()
    different: dict[LaunchText, RecordedLaunch] = {}
    for each in launched:
        if each.threads >= different.get(each.text, each).threads:
            different[each.text] = each
    return sorted(different.values(), key=lambda each: each.text.kernel)


def job_of(launch: RecordedLaunch) -> CompileJob:
    """Return a launch ready for JSON: name, text, arguments of `metal_kernel` and of its call.

    Arrays become shapes and dtypes; small arrays keep their values, which may be sizes.
    """
    call = dict(launch.call)
    call["inputs"] = [_input(x) if isinstance(x, mx.array) else x for x in call["inputs"]]
    call["template"] = [(key, type_name(v) if isinstance(v, mx.Dtype) else v) for key, v in call["template"]]
    call["output_dtypes"] = [type_name(dtype) for dtype in call["output_dtypes"]]
    return {"name": launch.text.kernel, "text": launch.text.text, "kernel": launch.kernel, "call": call}


def _input(x: mx.array) -> CompileJob:
    values = {"values": x.flatten().tolist()} if x.size <= SMALL else {}
    return {"shape": x.shape, "dtype": type_name(x.dtype), **values}


def types_of(job: CompileJob) -> list[str]:
    """Return the names of the floating-point types that a job's arrays and template use, in the order of TYPES."""
    call = job["call"]
    named = {given["dtype"] for given in call["inputs"] if isinstance(given, dict)} | {*call["output_dtypes"]}
    named |= {value for _, value in call["template"] if isinstance(value, str)}
    return [each for each in TYPES if each in named]


def probe(dtype: str) -> CompileJob:
    """Return a job with a minimal kernel that computes in a type; MLX refuses it if the GPU lacks the type."""
    names = {"name": "probe", "input_names": ["x"], "output_names": ["y"]}
    kernel = {**names, "source": "uint i = thread_position_in_grid.x; y[i] = T(float(x[i]) + 1);"}
    sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [dtype]}
    call = {"inputs": [{"shape": (8,), "dtype": dtype}], "template": [("T", dtype)], **sizes}
    return {"name": "probe", "text": "", "kernel": kernel, "call": call}


def lacking() -> dict[str, str]:
    """Return the types that the GPU does not support, by name, with the reason; {} without a Metal GPU."""
    found = {dtype: by_mlx(probe(dtype))["refused"] for dtype in (TYPES[1:] if on_metal() else ())}
    return {dtype: reason(message) for dtype, message in found.items() if message}


def reason(message: str) -> str:
    """Return the first error of a compiler's message, else its first line."""
    all_lines = message.strip().splitlines() or [""]
    return next((line.strip() for line in all_lines if "error:" in line), all_lines[0])
