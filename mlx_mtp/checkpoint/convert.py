"""Convert a hub checkpoint to an MLX checkpoint with its MTP heads.

The source is loaded as for decoding, but lazily: each tensor is computed when it is written, so that memory is
needed for one tensor and its sources only.
"""

import json
import re
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.utils import get_total_parameters, save_config

from ..layers.blocks import is_blocks
from ..layers.scaled import SCALE
from ..layers.with_heads import TUNED
from ..layers.wrapped import Wrapped
from ..machine import atomic
from ..machine.errors import one_line
from ..machine.paths import expanded
from ..models import find_port, port_names
from ..models.config.normalize import normalize
from . import convert_writer as writer
from .build import check_norms, open_drafter, read_args, read_port
from .convert_precision import Precision, format_of, format_of_heads, formats, listed
from .convert_writer import Progress, Tensors
from .files import read_config, read_tensors
from .find_drafter import is_drafter
from .head_self_test import check_runs
from .load_made import check_no_heads, convert_plain
from .parameters import named, nan_codes, stored_name, trained
from .report import Report, make_report
from .separate_heads import is_split
from .smollm2 import named_checkpoint
from .sort_tensors import Contents, Drafting, layout_of
from .vision import Sight, TowerFiles, usable_tower, vision_facts, write_settings
from .weight_names import INDEX, SIDECAR_FILES, VISION_FILE, read_index

SIDECAR = "mtp.safetensors"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.py", "LICENSE*")
NOT_COPIED = re.compile(r"config\.json|.*\.safetensors\.index\.json|.*quant\w*_config\.json")


@dataclass
class ConversionSource:
    """A checkpoint or drafter that was opened for conversion, with its lazy model.

    raw: whether the trunk's norms are stored zero-centred, and whether the heads' are. trained: by output name, two
    lazy bools of the source tensor: whether it contains NaN, and (of a head) a number other than zero.
    dtype: the type that the user chose, or that float16 scales of packed weights require; else None.
    tower: the vision tower's files; None without a tower, for the reason in `blind`. apart: the tower's tensors by
    name, which are copied unchanged.
    """

    path: Path
    config: dict[str, Any]
    model: Any
    contents: Contents
    raw: tuple[bool, bool]
    trained: dict[str, tuple[mx.array, mx.array]] = field(default_factory=dict)
    dtype: str | None = None
    tower: TowerFiles | None = None
    blind: str = ""
    apart: Tensors = field(default_factory=dict)

    def prepare(self, precision: Precision) -> None:
        """Drop repeated modules of heads (`_drop_repeated`), warn of unusual norms, and apply the precision.

        It also fills `trained` and `dtype`. ValueError if the precision cannot be applied.
        """
        _drop_repeated(self.model, self.contents)
        check_norms(self.model, self.contents, self.raw)
        for path, w in named(self.model).items():
            if mx.issubdtype(w.dtype, mx.floating) and not path.endswith(".biases"):
                name, (nan, value) = stored_name(self.model, path), trained(w)
                if precision.dequantize:
                    name = re.sub(r"\.scales$", ".weight", name)
                self.trained[name] = nan, value if path.startswith("mtp.") else mx.array(True)
        for path, module in self.model.named_modules():
            for name, nan in nan_codes(path, module).items():
                self.trained[stored_name(self.model, name)] = nan, mx.array(True)
        self.apart = read_tensors(self.tower.tensors) if self.tower else {}
        self.trained |= {name: (trained(w)[0], mx.array(True)) for name, w in self.apart.items()}
        declared = self.config.get("torch_dtype") or self.config.get("dtype")
        halves = {w.dtype for path, w in named(self.model).items() if path.endswith(".scales")} & {mx.float16}
        if self.contents.packed and halves and declared == "bfloat16" and precision.dtype is None:
            declared = self.dtype = "float16"  # bfloat16 would round the scales
        precision.apply(self.model, declared)
        self.dtype = precision.dtype or self.dtype

    def tensors(self) -> tuple[Tensors, Tensors]:
        """Return (the target's tensors by mlx-lm's names, the heads' by the hub's)."""
        found = named(self.model)
        heads = {stored_name(self.model, path): w for path, w in found.items() if path.startswith("mtp.")}
        return {stored_name(self.model, path): w for path, w in found.items() if not path.startswith("mtp.")}, heads

    def new_config(self) -> dict[str, Any]:
        """Return config.json, with the vision tower's part, if any, and the model's new type and quantization."""
        forms = formats(self.model).items()
        found = listed({p if p.startswith("mtp.") else stored_name(self.model, p): form for p, form in forms})
        return _renewed(self.tower.config if self.tower else self.config, self.dtype) | (
            {} if found is None else {"quantization": found}
        )

    def facts(self, place: str) -> Report:
        """Return the report about the converted model; warn of missing heads and of formats unknown to mlx-lm.

        place: the heads' location in the conversion.
        """
        norms = "shifted by +1 (they were stored zero-centred)" if any(self.raw) else "as they were (already shifted)"
        if not self.model.mtp:
            warnings.warn(f"{self.path}: no MTP heads found ({self.contents.source})", stacklevel=3)
            place = self.contents.source
        if any(SCALE in module for module in self.model.modules()):
            kept = f"keep their scale per tensor or row, as {SCALE!r}; mlx-lm does not read it, mlx_mtp does"
            warnings.warn(f"{self.path}: NVFP4 or FP8 weights {kept}", stacklevel=3)
        if modes := sorted({module.mode for module in self.model.modules() if is_blocks(module)}):
            packed = f"weights in {', '.join(modes)} are read by mlx_mtp, not by mlx-lm"
            warnings.warn(f"{self.path}: {packed}", stacklevel=3)
        if isinstance(self.model, Wrapped) and (left := ", ".join(self.contents.ignored)):
            warnings.warn(f"{self.path}: only the language model is written, without {left}", stacklevel=3)
        facts = vision_facts(self.config, self.tower, self.blind, self.contents.ignored)
        return make_report(self.model, self.config, source=place, norms=norms, **facts)

    def compute(self, name: str, w: mx.array) -> None:
        """Evaluate the tensor with this output name, before it is written; call it once for each name.

        ValueError if that fails, the source has NaN, or a tensor of the heads has zeros only.
        """
        states = self.trained.pop(name, ())
        with one_line(f"{self.path}: tensor {name} cannot be read", (RuntimeError,)):
            mx.eval(w, *states)
        if states and (states[0].item() or not states[1].item()):
            state = "NaN" if states[0].item() else "only zeros"
            raise ValueError(f"{self.path}: tensor {name} holds {state}, expected trained weights")


def open_source(path: Path, *, alone: bool = False) -> ConversionSource:
    """Return a checkpoint or an external drafter, opened for conversion; ValueError if it is damaged or unsupported.

    alone: open only the checkpoint's heads.
    """
    if not alone and is_drafter(path) and not is_split(path):
        config, drafter, contents = open_drafter(path)
        return ConversionSource(path, config, drafter, contents, (False, False))
    config = read_config(path)
    normalize(config).warn(path / "config.json", stacklevel=4)
    model, contents, raw = read_port(_port(path, config), path, config, Drafting(True, None, {}, None, alone))
    source = ConversionSource(path, config, model, contents, raw)
    if not alone:
        check_runs(model, path)
        width = model.model.norm.weight.size
        source.tower, source.blind = usable_tower(path, config, contents.stored, Sight(), width)
    return source


def files_of_heads(path: Path) -> list[str] | None:
    """Return the files that contain the heads, by the shard index, relative to `path`; None without a usable index.

    If heads may repeat the target's embedding or LM head, the files of these are included. ValueError for a
    model_type without a port.
    """
    config, places = read_config(path), read_index(path)
    port = _port(path, config)
    spec, layers = layout_of(port, places), read_args(port, path, config).num_hidden_layers
    heads = {name: place for name in places if (place := spec.locate(name, layers))}
    compared = any(spec.may_repeat(inside.partition(".")[0]) for _, inside in heads.values())
    shared = {name for name in places if compared and re.search(r"(^|\.)(lm_head|embed_tokens)\.", name)}
    return sorted({places[name] for name in heads.keys() | shared}) if places else None


def _port(path: Path, config: dict[str, Any]) -> ModuleType:
    if port := find_port(config):
        return port
    ports = ", ".join(port_names())
    raise ValueError(f"{path}: model_type {config['model_type']!r} has no port that drafts; supported are {ports}")


def _renewed(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return a config.json without quantization, its type replaced by `dtype` unless None, also in its text_config.

    A config.json without a type gets no type.
    """
    kept = {name: value for name, value in config.items() if name not in ("quantization", "quantization_config")}
    kept |= {name: dtype for name in ("torch_dtype", "dtype") if dtype and name in kept}
    return kept | {name: _renewed(kept[name], dtype) for name in ("text_config",) if name in kept}


def _drop_repeated(model: Any, contents: Contents) -> None:
    """Drop the heads' embeddings if all equal the target's, and their LM heads likewise, as stored in the checkpoint.

    Nothing is dropped if only heads were opened, or for heads of `tune-heads --new`. It is done before the precision
    changes, which would make equal ones differ.
    """
    if not contents.trunk or model.spec.prefix == TUNED.prefix:
        return
    spec, layers = type(model).SPEC, model.args.num_hidden_layers
    for module, shared in (("head", "lm_head"), ("embed_tokens", "embed_tokens")):
        by_depth: dict[int, dict[str, str]] = {}
        for name in contents.heads if spec.may_repeat(module) else ():
            depth, path = spec.locate(name, layers)
            if path.startswith(f"{module}."):
                by_depth.setdefault(depth, {})[path.removeprefix(f"{module}.")] = name
        tail = re.compile(rf"(?:.*\.)?{shared}\.(\w+)")
        target = {match[1]: name for name in contents.trunk if (match := tail.fullmatch(name))}
        if by_depth and all(_equal(contents, part, target) for part in by_depth.values()):
            for head in model.mtp:
                head.pop(module)


def _equal(contents: Contents, a: dict[str, str], b: dict[str, str]) -> bool:
    """Return whether the tensors of two modules are equal in value and type; they are read and freed.

    a, b: the tensors' names in the checkpoint by their kind, such as "weight".
    """
    stored = contents.heads | contents.trunk
    pairs = (read_tensors({name: stored[name] for name in (a[kind], b[kind])}).values() for kind in a if kind in b)
    return a.keys() == b.keys() and all(x.dtype == y.dtype and mx.array_equal(x, y) for x, y in pairs)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: the directory or file, the bytes of its tensors, and a report about the model."""

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
    upload_repo: str | None = None,
    trust_remote_code: bool = False,
) -> Converted:
    """Write a checkpoint, its MTP heads and vision tower, or an external drafter, to the new directory `mlx_path`.

    quantize, q_group_size, q_bits, q_mode, quant_predicate (a recipe's name): as in mlx-lm, for the target.
        dtype, dequantize: as in mlx-lm, for the target and the heads. revision: branch, tag or commit on the hub.
    mtp_q_bits, mtp_q_group_size: the heads' affine format, by default 8 and 64 with `quantize`; 16 bits do not
        quantize them. Their routers, norms and the matrix that fuses a head's inputs never are. A drafter has this
        format, too, or, with q_bits and without these two, the target's.
    mtp_layout: heads in `mtp.safetensors` ("sidecar"), or in the target's files under the hub's names ("shards").
    shard_bytes: maximum bytes of the tensors in a file of the model, unless it has a single tensor.
    progress: called with the bytes written, and all bytes. upload_repo: refused, because nothing is uploaded.
    trust_remote_code: also download the tokenizer's code, which is copied but not run.
    Raises a one-line ValueError, or OSError if a file cannot be written; a failed conversion leaves no files.
    """
    if upload_repo is not None:
        instead = f"upload with `hf upload {upload_repo} {mlx_path}`"
        raise ValueError(f"upload_repo={upload_repo!r}: not taken here; {instead}")
    target = format_of(q_group_size, q_bits, q_mode) if quantize else None
    heads = format_of_heads(mtp_q_group_size, mtp_q_bits, quantize=quantize)
    precision = Precision(target, quant_predicate, *heads, dequantize, dtype)
    if mtp_layout not in ("sidecar", "shards"):
        raise ValueError(f"mtp_layout={mtp_layout!r}: allowed are sidecar, shards")
    path, new = named_checkpoint(hf_path, revision, code=trust_remote_code), expanded(mlx_path).resolve()
    if new.is_relative_to(path.resolve()):
        raise ValueError(f"mlx_path={mlx_path}: at or inside the directory to convert, {path}")
    atomic.check_new(new)
    if not is_drafter(path) and find_port(read_config(path)) is None:
        check_no_heads(path, mtp_q_bits=mtp_q_bits, mtp_q_group_size=mtp_q_group_size)
        options = {"quantize": quantize, "q_group_size": q_group_size, "q_bits": q_bits, "q_mode": q_mode}
        options |= {"quant_predicate": quant_predicate, "dtype": dtype, "dequantize": dequantize}
        return Converted(new, *convert_plain(path, new, **options))
    source = open_source(path)
    if is_head := not source.contents.trunk:  # a drafter
        form = target if q_bits is not None and mtp_q_bits is mtp_q_group_size is None else heads[0]
        precision = Precision(heads=form, heads_named=form is not None, dequantize=dequantize, dtype=dtype)
    source.prepare(precision)
    place = SIDECAR if mtp_layout == "sidecar" else "in the model's shards"
    facts = source.facts("a drafter" if is_head else place)
    total = _write_directory(source, new, _files(source, mtp_layout, shard_bytes), progress)
    return Converted(new, total, facts)


def _write_directory(
    source: ConversionSource, new: Path, files: dict[str, Tensors], progress: Progress | None
) -> int:
    """Write weight files, index, config.json and copies of the source's files of COPIED to the new directory `new`.

    Returns the bytes of all tensors. `source.model` and the tensors in `files` are removed to free memory. ValueError
    if the disk has too little space, or a tensor is damaged.
    """
    index, config = writer.index(files, total_parameters=get_total_parameters(source.model)), source.new_config()
    others = {file for pattern in COPIED for file in source.path.glob(pattern) if not NOT_COPIED.fullmatch(file.name)}
    copied = [file for file in others if file.is_file()]
    size = len(index) + len(json.dumps(config)) + sum(file.stat().st_size for file in copied)
    size += sum(writer.file_size(tensors) for tensors in files.values())
    source.model = None  # each tensor is freed after it is written
    atomic.check_free(new, size)
    with atomic.directory(new) as folder:
        if source.tower:
            write_settings(source.tower, folder)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        save_config(config, folder / "config.json", keep_vision_config=source.tower is not None)
        (folder / INDEX).write_text(index)
        return writer.write({folder / name: part for name, part in files.items()}, source.compute, progress)


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
    """Write only a checkpoint's MTP heads, to the new file `mtp_path` or as `mtp.safetensors` into that directory.

    `load` finds mtp.safetensors in the directory of a conversion; give another place to it as `mtp_path`. If there is
    a shard index, only those of the model's files that `files_of_heads` returns are downloaded or needed. mtp_q_bits,
    mtp_q_group_size: if both are None, the heads are not quantized, but get 8 bits if mtp_path is a directory whose
    config.json states a quantization. Other parameters and errors are those of `convert`.
    """
    folder = expanded(mtp_path).resolve()
    quantized = folder.is_dir() and is_quantized(folder)
    precision = Precision(None, None, *format_of_heads(mtp_q_group_size, mtp_q_bits, quantize=quantized), dtype=dtype)
    new = writer.new_file("mtp_path", mtp_path, SIDECAR)
    small = ("*.json", *SIDECAR_FILES)
    files = files_of_heads(named_checkpoint(hf_path, revision, files=small))
    path = named_checkpoint(hf_path, revision, files=None if files is None else (*small, *files))
    source = open_source(path, alone=True)
    if not source.model.mtp:
        raise ValueError(f"{source.path}: no MTP heads found; give a checkpoint with heads")
    source.prepare(precision)
    facts, heads = source.facts(new.name), source.tensors()[1]
    source.model = None  # each tensor is freed after it is written
    atomic.check_free(new, writer.file_size(heads))
    with atomic.file(new) as work:
        total = writer.write({work: heads}, source.compute, progress)
    return Converted(new, total, facts)


def is_quantized(path: Path) -> bool:
    """Return whether config.json in a directory states a quantization; False if it cannot be read."""
    with suppress(ValueError):
        config = read_config(path)
        return any(config.get(name) for name in ("quantization", "quantization_config"))
    return False


def _files(source: ConversionSource, layout: str, shard_bytes: int) -> dict[str, Tensors]:
    """Return each new file's tensors, by file name; a source without a target has its heads in the model's files.

    layout: as `mtp_layout`. ValueError for "shards" if mlx-lm would misread the target's or heads' tensors there.
    """
    trunk, heads = source.tensors()
    if not trunk:
        return writer.shards(heads, shard_bytes)
    apart = {VISION_FILE: source.apart} if source.apart else {}
    if layout == "sidecar":
        return apart | ({SIDECAR: heads} if heads else {}) | writer.shards(trunk, shard_bytes)
    read = source.model.BASE.sanitize(source.model, trunk | heads)
    for name in sorted(read):
        if read[name] is not trunk.get(name):
            harm = "change" if name in trunk else "not load"
            raise ValueError(f"mtp_layout={layout!r}: mlx-lm would {harm} {name} in files with heads; use 'sidecar'")
    return apart | writer.shards(heads | trunk, shard_bytes)
