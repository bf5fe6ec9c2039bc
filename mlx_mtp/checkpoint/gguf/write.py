"""Write a plan's parameters into safetensors files, a few rows at a time."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...kernels import BLOCK_FORMATS
from ...machine.errors import naming
from .. import convert_writer as writer
from .blocks import GROUP, Groups, pack
from .plan import GGUFParameter, chunks, groups
from .requantize import dequantized


def write(
    files: dict[Path, dict[str, Any]], parameters: list[GGUFParameter], progress: writer.Progress | None
) -> None:
    """Write all parameters to their files, which are replaced; ValueError for NaN or infinity in the GGUF file.

    Scales that overflow float16 are an error, too. files: by path, the tensors to write. progress: called after each
    range of rows with the bytes written, and all bytes.
    """
    done, total = 0, writer.total_size(files)
    with ExitStack() as stack:
        places: dict[str, tuple[int, int]] = {}  # a tensor's file descriptor, and the offset of its data
        for file, tensors in files.items():
            begin = writer.allocate(file, tensors)
            handle = stack.enter_context(file.open("r+b")).fileno()
            for name, output in tensors.items():
                places[name] = handle, begin
                begin += output.nbytes
        for parameter in parameters:
            for nbytes in _write_parameter(parameter, places):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        for file in files:
            with naming(file), file.open("rb") as f:
                os.fsync(f.fileno())


def _write_parameter(parameter: GGUFParameter, places: dict[str, tuple[int, int]]) -> Any:
    """Write a parameter in ranges of rows, and yield the number of bytes of each range.

    places: by tensor name, the file descriptor and the offset of its data.
    """
    names = list(parameter.outputs())
    whole = parameter.change.values is not None
    columns = parameter.entries[0].shape[-1]
    written = [0] * len(names)
    ranges = [(0, parameter.rows)] if whole else chunks(parameter.rows, columns)
    for begin, end in ranges:
        pieces = _quantized(parameter, begin, end) if parameter.form.bits else [_floats(parameter, begin, end)]
        for i, piece in enumerate(pieces):
            handle, offset = places[names[i]]
            _put(handle, piece, offset + written[i])
            written[i] += piece.nbytes
        yield sum(piece.nbytes for piece in pieces)


def _put(handle: int, piece: np.ndarray, begin: int) -> None:
    """Write an array's bytes at an offset of a file."""
    data = np.ascontiguousarray(piece).data.cast("B")
    while data:
        done = os.pwrite(handle, data, begin)
        data, begin = data[done:], begin + done


def _rows(parameter: GGUFParameter, begin: int, end: int) -> Any:
    """Yield (tensor, its rows, their indices in the range) for each tensor with rows in a range of a parameter.

    begin, end: the range, in the parameter's order of rows. rows: uint8 [n, bytes of a row], as in the GGUF file.
    indices: int [n], 0 for the first row of the range.
    """
    order = parameter.change.rows
    wanted = np.arange(begin, end) if order is None else order[begin:end]
    start = 0
    for entry in parameter.entries:
        blocks = entry.blocks()  # mapped again for each range, so that pages of earlier ranges can be freed
        inside = np.flatnonzero((wanted >= start) & (wanted < start + len(blocks)))
        if len(inside):
            local = wanted[inside] - start
            contiguous = local[-1] - local[0] == len(local) - 1 and (np.diff(local) == 1).all()
            yield entry, blocks[local[0] : local[-1] + 1] if contiguous else blocks[local], inside
        start += len(blocks)


@np.errstate(over="ignore", invalid="ignore")
def _quantized(parameter: GGUFParameter, begin: int, end: int) -> list[np.ndarray]:
    """Return a range of rows as packed codes, scales and, of affine formats, biases.

    ValueError for NaN or infinity, or scales or biases that overflow float16.
    """
    form = parameter.form
    parts = [(groups(entry, rows, form), at) for entry, rows, at in _rows(parameter, begin, end)]
    codes, scales, biases = parts[0][0] if len(parts) == 1 else _joined(parts)
    if parameter.change.columns is not None:
        groups_at = parameter.change.columns[::GROUP] // GROUP
        codes = codes[:, parameter.change.columns]
        scales, biases = scales[:, groups_at], None if biases is None else biases[:, groups_at]
    words = pack(codes, form.bits)
    if biases is None:
        blocks = BLOCK_FORMATS.get(form.mode)
        _check_finite(parameter, [] if blocks is None else [scales[:, :: blocks.words].view(np.float16)])
        return [words, scales]
    kind = np.float16 if form.dtype == mx.float16 else np.float32
    _check_finite(parameter, [scales, biases])
    stored = [scales.astype(kind, copy=False), biases.astype(kind, copy=False)]
    _check_finite(parameter, stored, "scales beyond float16; use --gguf-exact")
    return [words, *stored]


def _check_finite(parameter: GGUFParameter, arrays: list[np.ndarray], cause: str = "NaN or infinity") -> None:
    """Raise ValueError, whose message states the cause, if an array of a parameter has NaN or infinity."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(f"{parameter.entries[0].file}: tensor {parameter.entries[0].name} holds {cause}")


def _joined(parts: list[tuple[Groups, np.ndarray]]) -> Groups:
    """Return the `Groups` of a range whose rows come from several tensors, in the range's order.

    parts: for each tensor, (the groups of its rows, the indices of these rows in the range).
    """
    order = np.argsort(np.concatenate([indices for _, indices in parts]))
    fields: Any = zip(*(found for found, _ in parts), strict=True)
    joined: Any = [None if arrays[0] is None else np.concatenate(arrays)[order] for arrays in fields]
    return Groups(*joined)


def _floats(parameter: GGUFParameter, begin: int, end: int) -> np.ndarray:
    """Return unquantized rows as the bytes of the stored type, [rows, bytes]; ValueError for NaN or infinity.

    With `change.values` the range has to be all rows.
    """
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
        raise ValueError(f"{entry.file}: tensor {entry.name} holds NaN or infinity, expected trained weights")
    stored = mx.array(made).astype(parameter.form.dtype)
    return np.array(stored.view(mx.uint8))
