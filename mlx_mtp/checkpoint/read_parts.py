"""Read one rank's parts of a checkpoint's tensors; of matrices split by rows, only the rank's rows are read.

Matrices split by columns, and those that sanitizing computes (8-bit floats, MLA), are read whole, one at a time.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from ..ranks.group import Ranks
from .files import Tensor, data_begins
from .sort_tensors import EXPERT, Contents, layerless

TYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32, "U8": mx.uint8}


StoredTensor = tuple[Tensor, int]  # a tensor [(E,) rows, columns], and the offset of its data in its file


def read_parts(model: Any, contents: Contents, ranks: Ranks, parameters: dict[str, mx.array]) -> None:
    """Read this rank's parameters, one at a time, by rows where possible; the others are computed from whole tensors.

    Arrays read by rows replace the lazy ones in the model and in `parameters`. Of parameters that differ only in
    their layer, the first is read both ways; if the two differ, none of them is read by rows.
    """
    sources, by_rows = _sources(model, contents), {}
    for path, part in parameters.items():
        stored, kind = sources.get(path, []), (layerless(path), part.shape)
        if _is_rows(stored, part, ranks.size) and by_rows.get(kind, True):
            rows = _read_rows(stored, part, ranks)
            if kind not in by_rows:
                by_rows[kind] = bool(mx.array_equal(rows, part))
            if by_rows[kind]:
                parameters[path] = rows
                model.update(tree_unflatten([(path, rows)]))
        mx.eval(parameters[path])
        del part
        mx.clear_cache()


def _sources(model: Any, contents: Contents) -> dict[str, list[StoredTensor]]:
    """Return, by parameter, the unpacked tensors that become only that parameter; experts ordered by number."""
    begins = {file: data_begins(file) for file in {tensor.file for tensor in contents.trunk.values()}}
    found: dict[str, list[tuple[int, StoredTensor]]] = {}
    for name, tensor in contents.trunk.items():
        if name.rpartition(".")[0] not in contents.packed and len(paths := model.renamed(name)) == 1:
            expert = EXPERT.search(name)
            place = tensor, begins[tensor.file][tensor.stored or name]
            found.setdefault(paths[0], []).append((int(expert[1]) if expert else 0, place))
    return {path: [place for _, place in sorted(places, key=lambda p: p[0])] for path, places in found.items()}


def _is_rows(stored: list[StoredTensor], part: mx.array, ranks: int) -> bool:
    """Return whether a rank's part [(E,) rows / ranks, columns] can be rows of the stored tensors, by the shapes."""
    kinds = {(tensor.shape, tensor.dtype) for tensor, _ in stored}
    if len(kinds) != 1 or part.ndim < 2:
        return False
    (shape, kind) = kinds.pop()
    whole = (*part.shape[:-2], part.shape[-2] * ranks, part.shape[-1])
    return kind in TYPES and whole == (shape if len(stored) == 1 else (len(stored), *shape))


def _read_rows(stored: list[StoredTensor], part: mx.array, ranks: Ranks) -> mx.array:
    """Return this rank's rows of the stored tensors, in the shape and type of `part`, which is not computed.

    ValueError for a truncated file.
    """
    kind = TYPES[stored[0][0].dtype]
    size = math.prod(part.shape[-2:]) * kind.size
    read = np.empty((len(stored), math.prod(part.shape[:-2]) // len(stored), size), np.uint8)
    for (tensor, begin), matrices in zip(stored, read, strict=True):
        with tensor.file.open("rb") as f:
            for i, rows in enumerate(matrices):
                f.seek(begin + (i * ranks.size + ranks.rank) * size)
                if f.readinto(rows.data) != size:
                    raise ValueError(f"{tensor.file}: truncated or damaged")
    return mx.array(read).view(kind).reshape(part.shape).astype(part.dtype)
