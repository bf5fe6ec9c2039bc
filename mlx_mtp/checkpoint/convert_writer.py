"""Write safetensors files array by array: each is computed, written and freed before the next.

Headers, sizes and the number of files depend only on shapes and types, which need no computation.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..machine.errors import naming
from ..machine.paths import expanded
from .files import CONVERTED

SHARD_BYTES = 5 << 30  # mlx-lm's limit
DTYPES = {
    **{mx.bool_: "BOOL", mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.float64: "F64"},
    **{mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64"},
    **{mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64"},
}
Tensors = dict[str, mx.array]
Progress = Callable[[int, int], None]  # receives the bytes written, and all bytes to write


def new_file(option: str, path: str | Path, name: str) -> Path:
    """Return the absolute path of a new safetensors file: `path` or, if that is a directory, `name` in it.

    ValueError, with the option's name, for another kind of file, and for one that is there already.
    """
    new = expanded(path).resolve()
    new = new / name if new.is_dir() else new
    if new.suffix != ".safetensors":
        raise ValueError(f"{option}={path}: allowed are an existing directory, or a new file *.safetensors")
    if new.exists():
        raise ValueError(f"{option}={new}: already there; name a new file, or delete it")
    return new


def shards(tensors: Tensors, limit: int = SHARD_BYTES) -> dict[str, Tensors]:
    """Return tensors, in the given order, by mlx-lm's file names; a file has at most `limit` bytes, or one tensor.

    A single file is named "model.safetensors"; without tensors there are no files.
    """
    parts: list[Tensors] = []
    size = limit + 1
    for name, w in tensors.items():
        if size + w.nbytes > limit:
            parts, size = [*parts, {}], 0
        parts[-1][name] = w
        size += w.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}


def header(tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a safetensors file: a JSON object's length, and the object, in multiples of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, w in tensors.items():
        start, end = end, end + w.nbytes
        entries[name] = {"dtype": DTYPES[w.dtype], "shape": w.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def total_size(files: Mapping[Any, Mapping[str, Any]]) -> int:
    """Return the bytes of all tensors of several files."""
    return sum(w.nbytes for tensors in files.values() for w in tensors.values())


def file_size(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of the file, with its header, that `write` or `allocate` makes with the usual metadata."""
    return len(header(tensors, CONVERTED)) + sum(w.nbytes for w in tensors.values())


def allocate(file: Path, tensors: Mapping[str, Any]) -> int:
    """Create a safetensors file of full size that holds only the header; return the offset at which its data begin.

    The data are a hole, which `gguf.write` fills.
    """
    start = header(tensors, CONVERTED)
    with naming(file), file.open("wb") as f:
        f.write(start)
        f.truncate(file_size(tensors))
    return len(start)


def index(files: Mapping[str, Mapping[str, Any]], **metadata: int) -> str:
    """Return the JSON text of a shard index for the tensors of these files.

    metadata: further entries of its "metadata", which states the total size.
    """
    places = {name: file for file, tensors in files.items() for name in tensors}
    entries = {"metadata": {"total_size": total_size(files)} | metadata, "weight_map": dict(sorted(places.items()))}
    return json.dumps(entries, indent=4)


def write(
    files: dict[Path, Tensors],
    compute: Callable[[str, mx.array], None],
    progress: Progress | None = None,
    metadata: Mapping[str, str] = CONVERTED,
) -> int:
    """Write files, replacing existing ones, one after the other, and return the bytes of all tensors.

    Each tensor is removed from `files` and passed with its name to `compute`, which has to evaluate it; then
    `progress` is called with the bytes up to and including this tensor, and it is written. metadata: texts by name,
    stored in the header of each file.
    """
    done, total = 0, total_size(files)
    for file, tensors in files.items():
        with naming(file), file.open("wb") as f:
            f.write(header(tensors, metadata))
            for name in list(tensors):
                w = tensors.pop(name)
                compute(name, w)
                done += w.nbytes
                if progress is not None:
                    progress(done, total)
                f.write(memoryview(mx.contiguous(w).reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
                del w
                mx.clear_cache()
            f.flush()
            os.fsync(f.fileno())
    return total
