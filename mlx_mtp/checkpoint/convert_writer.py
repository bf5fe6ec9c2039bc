"""Write safetensors files of arrays that are computed one by one, each let go of before the next.

Shapes and types are known before anything is computed, so a file's header, its size and how many files there will be
are, too.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..machine.errors import naming

SHARD_BYTES = 5 << 30  # mlx-lm's limit
DTYPES = {
    **{mx.bool_: "BOOL", mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.float64: "F64"},
    **{mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64"},
    **{mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64"},
}
Tensors = dict[str, mx.array]


def shards(tensors: Tensors, limit: int = SHARD_BYTES) -> dict[str, Tensors]:
    """Deal the tensors out to mlx-lm's file names, in their order, at most `limit` bytes to a file of several."""
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


def header(tensors: Mapping[str, mx.array], metadata: dict[str, str]) -> bytes:
    """Make what a safetensors file begins with: the length of a JSON object, and the object, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, w in tensors.items():
        start, end = end, end + w.nbytes
        entries[name] = {"dtype": DTYPES[w.dtype], "shape": w.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_size(tensors: Mapping[str, mx.array], metadata: dict[str, str]) -> int:
    """Count the bytes of the file that `write` makes of them."""
    return len(header(tensors, metadata)) + sum(w.nbytes for w in tensors.values())


def write(file: Path, tensors: Tensors, metadata: dict[str, str], compute: Callable[[str, mx.array], None]) -> None:
    """Write a file and empty `tensors`; `compute` is called with each one's name and itself before it is written."""
    with naming(file), file.open("wb") as f:
        f.write(header(tensors, metadata))
        for name in list(tensors):
            w = tensors.pop(name)
            compute(name, w)
            f.write(memoryview(mx.contiguous(w).reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
            del w
            mx.clear_cache()
        f.flush()
        os.fsync(f.fileno())
