"""Convert a checkpoint of the hub to an MLX checkpoint that still has its MTP heads.

The ports load the source lazily: names, stacked experts, 8-bit floats and norms come out of the code that loads a
model, as arrays that are not computed yet. Each is computed when it is written, so that the memory in use is that of
one tensor and of what it is made from.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.utils import get_total_parameters, save_config

from ..machine import atomic
from . import convert_writer as writer
from .convert_precision import Precision, format_of, format_of_heads
from .convert_source import Source, files_of_heads, open_source
from .convert_writer import Tensors
from .files import CONVERTED, INDEX, SIDECAR_FILES, resolve
from .report import Report

SIDECAR = "mtp.safetensors"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.py", "LICENSE*")
NOT_COPIED = re.compile(r"config\.json|.*\.safetensors\.index\.json|.*quant\w*_config\.json")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What was written: directory or file, bytes of its tensors, and what a load of it would report."""

    path: Path
    nbytes: int
    report: Report


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_model",
    *,
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    quant_predicate: str | None = None,
    mtp_q_bits: int | None = None,
    mtp_q_group_size: int | None = None,
    mtp_layout: Literal["sidecar", "shards"] = "sidecar",
    dtype: str | None = None,
    dequantize: bool = False,
    revision: str | None = None,
    shard_bytes: int = writer.SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write a checkpoint for MLX, heads included, to the new directory `mlx_path`.

    quantize, q_group_size, q_bits, q_mode, quant_predicate (a recipe's name), dtype, dequantize, revision: as
        mlx-lm's, for the target.
    mtp_q_bits, mtp_q_group_size: the heads' own, affine: 8 and 64 with `quantize`, else none; 16 bits leave them as
        they are. The matrix that fuses a head's inputs, norms and routers are never quantized.
    mtp_layout: the heads in `mtp.safetensors`, or in the target's files by the hub's names.
    shard_bytes: most bytes of a file of several. progress: called with bytes written, and to write.
    Raises ValueError, in one line, and leaves nothing behind.
    """
    target = format_of(q_group_size, q_bits, q_mode) if quantize else None
    heads = format_of_heads(mtp_q_group_size, mtp_q_bits, quantize=quantize)
    precision = Precision(target, quant_predicate, *heads, dequantize, dtype)
    if mtp_layout not in ("sidecar", "shards"):
        raise ValueError(f"mtp_layout={mtp_layout!r}: allowed are sidecar, shards")
    path, new = resolve(hf_path, revision), Path(mlx_path).expanduser().resolve()
    if new.is_relative_to(path.resolve()):
        raise ValueError(f"mlx_path={mlx_path}: in the directory that is to be converted, {path}")
    atomic.check_new(new)
    source = open_source(path)
    source.prepare(precision)
    facts = source.facts(SIDECAR if mtp_layout == "sidecar" else "in the model's shards")
    files = _files(source, mtp_layout, shard_bytes)
    places = sorted((name, file) for file, tensors in files.items() for name in tensors)
    metadata = {"total_size": _size(files), "total_parameters": get_total_parameters(source.model)}
    index = json.dumps({"metadata": metadata, "weight_map": dict(places)}, indent=4)
    config = source.new_config()
    others = {file for pattern in COPIED for file in path.glob(pattern) if not NOT_COPIED.fullmatch(file.name)}
    copied = [file for file in others if file.is_file()]
    size = len(index) + len(json.dumps(config)) + sum(file.stat().st_size for file in copied)
    size += sum(writer.file_size(tensors, CONVERTED) for tensors in files.values())
    source.model = None  # so that its tensors can be let go of one by one
    atomic.check_free(new, size)
    with atomic.directory(new) as folder:
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        save_config(config, folder / "config.json")
        (folder / INDEX).write_text(index)
        total = _write(source, {folder / name: tensors for name, tensors in files.items()}, progress)
    return Converted(new, total, facts)


def extract_heads(
    hf_path: str | Path,
    mtp_path: str | Path,
    *,
    mtp_q_bits: int | None = None,
    mtp_q_group_size: int | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write a checkpoint's heads alone to the new file `mtp_path`, or as `mtp.safetensors` to that directory.

    Beside any conversion of the same model `load` finds them there; elsewhere they are its `mtp_path`. Of a hub
    repository only the files that hold them are downloaded, and a directory need not have the others.
    mtp_q_bits: None leaves them as they are. The rest is as `convert` has it. Raises ValueError.
    """
    precision = Precision(None, None, *format_of_heads(mtp_q_group_size, mtp_q_bits), dtype=dtype)
    new = Path(mtp_path).expanduser().resolve()
    new = new / SIDECAR if new.is_dir() else new
    if new.suffix != ".safetensors":
        raise ValueError(f"mtp_path={mtp_path}: allowed are a directory that is there, or a new file *.safetensors")
    if new.exists():
        raise ValueError(f"mtp_path={new}: already there; name a new file, or delete it")
    path = resolve(hf_path, revision, files=("*.json", *SIDECAR_FILES))
    path = resolve(hf_path, revision, files=("*.json", *SIDECAR_FILES, *files_of_heads(path)))
    source = open_source(path, alone=True)
    if not source.model.mtp:
        raise ValueError(f"{source.path}: no MTP heads found ({source.contents.source})")
    source.prepare(precision)
    facts, heads = source.facts(new.name), source.tensors()[1]
    source.model = None  # so that its tensors can be let go of one by one
    atomic.check_free(new, writer.file_size(heads, CONVERTED))
    with atomic.file(new) as work:
        total = _write(source, {work: heads}, progress)
    return Converted(new, total, facts)


def _files(source: Source, layout: str, shard_bytes: int) -> dict[str, Tensors]:
    """Decide what goes into which file; ValueError where mlx-lm would stumble over heads among its own tensors."""
    trunk, heads = source.tensors()
    if layout == "sidecar":
        return ({SIDECAR: heads} if heads else {}) | writer.shards(trunk, shard_bytes)
    read = source.model.BASE.sanitize(source.model, trunk | heads)
    for name in sorted(read):
        if read[name] is not trunk.get(name):
            harm = "change" if name in trunk else "not load"
            raise ValueError(f"mtp_layout={layout!r}: mlx-lm would {harm} {name} in shards with heads; use 'sidecar'")
    return writer.shards(heads | trunk, shard_bytes)


def _size(files: Mapping[Any, Tensors]) -> int:
    """Count the bytes of all tensors."""
    return sum(w.nbytes for tensors in files.values() for w in tensors.values())


def _write(source: Source, files: dict[Path, Tensors], progress: Progress | None) -> int:
    """Compute and write all tensors, file by file; returns how many bytes they are."""
    done, total = 0, _size(files)

    def compute(name: str, w: mx.array) -> None:
        nonlocal done
        source.compute(name, w)
        done += w.nbytes
        if progress is not None:
            progress(done, total)

    for file, tensors in files.items():
        writer.write(file, tensors, CONVERTED, compute)
    return total
