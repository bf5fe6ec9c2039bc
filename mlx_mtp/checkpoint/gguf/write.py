"""Write a plan's parameters into safetensors files, a few rows at a time."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...machine.errors import naming
from .. import convert_writer as writer
from ..files import CONVERTED
from .blocks import GROUP, Groups, pack
from .plan import Parameter, chunks, groups
from .requantize import dequantized

Progress = Callable[[int, int], None]


class Output(NamedTuple):
    """A tensor to write; it has what `convert_writer` reads of an array."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    nbytes: int


class Place(NamedTuple):
    """An open file, and where a tensor's data begins in it."""

    handle: int
    begin: int


def outputs(parameters: list[Parameter]) -> dict[str, Any]:
    """List the tensors that are to be written, by their names."""
    found = {}
    for parameter in parameters:
        for name, (shape, dtype) in parameter.outputs().items():
            found[name] = Output(shape, dtype, int(np.prod(shape, dtype=np.int64)) * dtype.size)
    return found


def write(files: dict[Path, dict[str, Any]], parameters: list[Parameter], progress: Progress | None) -> int:
    """Write all parameters; returns how many bytes of tensors that are. ValueError for NaN in the file."""
    total = sum(output.nbytes for tensors in files.values() for output in tensors.values())
    done = 0
    with ExitStack() as stack:
        places = {}
        for file, tensors in files.items():
            places |= _begin(stack, file, tensors)
        for parameter in parameters:
            for nbytes in _write_parameter(parameter, places):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        for file in files:
            with naming(file), file.open("rb") as f:
                os.fsync(f.fileno())
    return total


def _begin(stack: ExitStack, file: Path, tensors: dict[str, Any]) -> dict[str, Place]:
    """Write a file's header and make it as long as it will be; returns where its tensors begin."""
    head = writer.header(tensors, CONVERTED)
    with naming(file):
        handle = stack.enter_context(file.open("wb"))
        handle.write(head)
        handle.truncate(len(head) + sum(output.nbytes for output in tensors.values()))
        handle.flush()
    places, end = {}, len(head)
    for name, output in tensors.items():
        places[name] = Place(handle.fileno(), end)
        end += output.nbytes
    return places


def _write_parameter(parameter: Parameter, places: dict[str, Place]) -> Any:
    """Write a parameter in pieces, and yield the bytes of each."""
    names = list(parameter.outputs())
    whole = parameter.change.values is not None
    columns = parameter.entries[0].shape[-1]
    written = [0] * len(names)
    ranges = [(0, parameter.rows)] if whole else chunks(parameter.rows, columns)
    for begin, end in ranges:
        pieces = _quantized(parameter, begin, end) if parameter.form.bits else [_floats(parameter, begin, end)]
        for i, piece in enumerate(pieces):
            place = places[names[i]]
            _put(place.handle, piece, place.begin + written[i])
            written[i] += piece.nbytes
        yield sum(piece.nbytes for piece in pieces)


def _put(handle: int, piece: np.ndarray, begin: int) -> None:
    """Write all of an array's bytes at a place in a file."""
    data = np.ascontiguousarray(piece).data.cast("B")
    while data:
        done = os.pwrite(handle, data, begin)
        data, begin = data[done:], begin + done


def _rows(parameter: Parameter, begin: int, end: int) -> Any:
    """Yield for each of a parameter's tensors: itself, its rows' blocks, and where they stand in the range."""
    order = parameter.change.rows
    wanted = np.arange(begin, end) if order is None else order[begin:end]
    start = 0
    for entry in parameter.entries:
        blocks = entry.blocks()  # mapped anew for each range, so that pages that were read can be freed
        inside = np.flatnonzero((wanted >= start) & (wanted < start + len(blocks)))
        if len(inside):
            local = wanted[inside] - start
            contiguous = local[-1] - local[0] == len(local) - 1 and (np.diff(local) == 1).all()
            yield entry, blocks[local[0] : local[-1] + 1] if contiguous else blocks[local], inside
        start += len(blocks)


def _quantized(parameter: Parameter, begin: int, end: int) -> list[np.ndarray]:
    """Make the words, scales and biases of a range of rows."""
    form = parameter.form
    parts = [(groups(entry, rows, form.bits), at) for entry, rows, at in _rows(parameter, begin, end)]
    codes, scales, biases = parts[0][0] if len(parts) == 1 else _joined(parts, end - begin)
    if parameter.change.columns is not None:
        groups_at = parameter.change.columns[::GROUP] // GROUP
        codes = codes[:, parameter.change.columns]
        scales, biases = scales[:, groups_at], None if biases is None else biases[:, groups_at]
    words = pack(codes, form.bits)
    if biases is None:
        return [words, scales]
    kind = np.float16 if form.dtype == mx.float16 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        stored = [scales.astype(kind, copy=False), biases.astype(kind, copy=False)]
    if not all(np.isfinite(array).all() for array in stored):
        cause = "NaN" if not np.isfinite(scales).all() else "scales beyond float16; use --gguf-exact"
        raise ValueError(f"{parameter.entries[0].file}: tensor {parameter.entries[0].name} holds {cause}")
    return [words, *stored]


def _joined(parts: list[tuple[Groups, np.ndarray]], rows: int) -> Groups:
    """Put the rows of several tensors where they stand."""
    arrays = []
    for i in range(3):
        first = parts[0][0][i]
        if first is None:
            return Groups(arrays[0], arrays[1], None)
        joined = np.empty((rows, first.shape[1]), first.dtype)
        for found, at in parts:
            joined[at] = found[i]
        arrays.append(joined)
    return Groups(*arrays)


def _floats(parameter: Parameter, begin: int, end: int) -> np.ndarray:
    """Compute the values of a range of rows, in the type that they are stored in."""
    change = parameter.change
    made = np.empty((end - begin, parameter.entries[0].shape[-1]), np.float32)
    for entry, rows, at in _rows(parameter, begin, end):
        made[at] = dequantized(entry.kind, rows)
    if change.columns is not None:
        made = made[:, change.columns]
    if change.values is not None:
        made = change.values(made)
    if not np.isfinite(made).all():
        entry = parameter.entries[0]
        raise ValueError(f"{entry.file}: tensor {entry.name} holds NaN, expected trained weights")
    stored = mx.array(made).astype(parameter.form.dtype)
    return np.array(stored.view(mx.uint8))
