"""A checkpoint as the hub has it -> an MLX checkpoint that still has its MTP heads.

The ports load the source lazily: names, stacked experts, 8-bit floats and norms come out of the code that loads a
model, as arrays that are not computed yet. Each is computed when it is written, so that the memory in use is that of
one tensor and what it is made of.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters, save_config

from . import quantization, tensor_file, unfinished
from .checkpoint import CONVERTED, read_config, read_tensors, resolve
from .contents import Contents, Drafting
from .load import check_norms, read_port
from .models import find_port, port_names
from .quantization import HEAD_BITS, UNQUANTIZED, Format, make_format
from .report import Report, make_report
from .spec import MTPSpec

SIDECAR = "mtp.safetensors"
INDEX = "model.safetensors.index.json"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.py", "LICENSE*")
NOT_COPIED = re.compile(r"config\.json|.*\.safetensors\.index\.json|.*quant\w*_config\.json")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What was written: directory or file, bytes of its tensors, and the facts that a load of it would report."""

    path: Path
    nbytes: int
    report: Report


@dataclass
class Wanted:
    """What is to become of the parameters. heads_named: somebody asked for the heads' bits, which must then be had."""

    target: Format | None
    heads: Format | None
    heads_named: bool
    recipe: str | None
    dequantize: bool
    dtype: str | None


@dataclass
class Source:
    """A checkpoint that was opened, none of its tensors read."""

    path: Path
    config: dict[str, Any]
    model: Any
    contents: Contents
    raw: tuple[bool, bool]
    trained: dict[str, list[mx.array]] = field(default_factory=dict)  # by the heads' names: is there NaN, anything else


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
    max_shard_bytes: int = tensor_file.SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write a checkpoint for MLX, heads included, to the new directory `mlx_path`.

    quantize, q_group_size, q_bits, q_mode, quant_predicate (a recipe's name), dtype, dequantize, revision: as
        mlx-lm's, for the target.
    mtp_q_bits, mtp_q_group_size: the heads' own, affine: 8 and 64 with `quantize`, else none; 16 bits leave them as
        they are. The matrix that fuses a head's inputs, norms and routers are never quantized.
    mtp_layout: the heads in `mtp.safetensors`, or among the target's shards by the hub's names.
    progress: called with bytes written, and to write.
    Raises ValueError, in one line, and leaves nothing behind.
    """
    wanted = _wanted(
        quantize, (q_group_size, q_bits, q_mode), quant_predicate, (mtp_q_group_size, mtp_q_bits), dequantize, dtype
    )
    if mtp_layout not in ("sidecar", "shards"):
        raise ValueError(f"mtp_layout={mtp_layout!r}: allowed are sidecar, shards")
    path = resolve(hf_path, revision)
    new = Path(mlx_path).expanduser().resolve()
    if new.is_relative_to(path.resolve()):
        raise ValueError(f"mlx_path={mlx_path}: in the directory that is to be converted, {path}")
    unfinished.check_new(new)
    source = _open(path)
    _prepare(source, wanted)
    facts, parameters = _facts(source, mtp_layout == "sidecar"), get_total_parameters(source.model)
    trunk, heads = _tensors(source)
    if mtp_layout == "sidecar":
        files = ({SIDECAR: heads} if heads else {}) | tensor_file.shards(trunk, max_shard_bytes)
    else:
        _check_shared(source, trunk, heads)
        files = tensor_file.shards(trunk | heads, max_shard_bytes)
    config = _config(source)
    del trunk, heads, source.model
    copied = [file for pattern in COPIED for file in path.glob(pattern) if not NOT_COPIED.fullmatch(file.name)]
    index = _index(files, parameters)
    total = index["metadata"]["total_size"]
    sizes = [tensor_file.file_size(tensors, CONVERTED) for tensors in files.values()]
    unfinished.check_free(new, sum(sizes) + sum(file.stat().st_size for file in copied))
    with unfinished.directory(new) as folder:
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        save_config(config, folder / "config.json")
        (folder / INDEX).write_text(json.dumps(index, indent=4))
        _write(source, {folder / name: tensors for name, tensors in files.items()}, total, progress)
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

    Beside any conversion of the same model they are found by `load`; elsewhere they are its `mtp_path`.
    mtp_q_bits: None leaves them as they are. The rest is as `convert` has it. Raises ValueError.
    """
    wanted = _wanted(False, (None, None, "affine"), None, (mtp_q_group_size, mtp_q_bits), False, dtype)
    new = Path(mtp_path).expanduser().resolve()
    new = new / SIDECAR if new.is_dir() else new
    if new.suffix != ".safetensors":
        raise ValueError(f"mtp_path={mtp_path}: allowed are a directory that exists and a file *.safetensors")
    if new.exists():
        raise ValueError(f"{new}: already there; name a new file, or delete it")
    source = _open(resolve(hf_path, revision))
    if not source.model.mtp:
        raise ValueError(f"{source.path}: no MTP heads in it")
    _prepare(source, wanted)
    facts = _facts(source, True)
    _, heads = _tensors(source)
    del _, source.model
    total = sum(w.nbytes for w in heads.values())
    unfinished.check_free(new, tensor_file.file_size(heads, CONVERTED))
    with unfinished.file(new) as work:
        _write(source, {work: heads}, total, progress)
    return Converted(new, total, facts)


def _wanted(
    quantize: bool,
    target: tuple[int | None, int | None, str],
    recipe: str | None,
    heads: tuple[int | None, int | None],
    dequantize: bool,
    dtype: str | None,
) -> Wanted:
    """The arguments, checked before anything is downloaded or read."""
    if quantize and dequantize:
        raise ValueError("quantize, dequantize: only one of them")
    if dtype not in (None, *quantization.DTYPES):
        raise ValueError(f"dtype={dtype!r}: allowed are {', '.join(quantization.DTYPES)}")
    if recipe not in (None, *quantization.RECIPES):
        raise ValueError(f"quant_predicate={recipe!r}: allowed are {', '.join(quantization.RECIPES)}")
    if recipe is not None and target[2] != "affine":
        raise ValueError(f"quant_predicate={recipe!r}: only with q_mode='affine', not {target[2]!r}")
    size, bits = heads
    if bits == UNQUANTIZED and size is not None:
        raise ValueError(f"mtp_q_group_size={size}: not with mtp_q_bits={UNQUANTIZED}, which quantizes nothing")
    wanted = bits != UNQUANTIZED and (quantize or bits is not None or size is not None)
    if wanted and dequantize:
        raise ValueError("mtp_q_bits, mtp_q_group_size: not together with dequantize")
    return Wanted(
        make_format(*target) if quantize else None,
        make_format(size, bits or HEAD_BITS, prefix="mtp_") if wanted else None,
        wanted and heads != (None, None),
        recipe,
        dequantize,
        dtype,
    )


def _open(path: Path) -> Source:
    config = read_config(path)
    port = find_port(config)
    if port is None:
        ports = ", ".join(port_names())
        raise ValueError(
            f"{path}: model_type {config['model_type']!r} has no heads that are known, mlx_lm.convert does as well; "
            f"ports are {ports}"
        )
    return Source(path, config, *read_port(port, path, config, Drafting(True, None, {}, None)))


def _prepare(source: Source, wanted: Wanted) -> None:
    """Drop what repeats the target, then type and quantization; all of it is computed later."""
    model, config = source.model, source.config
    _drop_repeated(source)
    check_norms(model, source.contents, source.raw)
    dtype = wanted.dtype or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    if dtype in quantization.DTYPES:
        quantization.cast(model, dtype)
    source.trained = {
        f"mtp.{path}": [mx.isnan(w).any(), w.any()]
        for path, w in tree_flatten([head.parameters() for head in model.mtp])
        if mx.issubdtype(w.dtype, mx.floating) and not path.endswith(".biases")
    }
    if wanted.dequantize:
        quantization.dequantize(model)
    before = sorted({str(form) for form in quantization.formats(model).values()})
    if wanted.target and not quantization.quantize_target(model, wanted.target, wanted.recipe):
        raise ValueError(f"{source.path}: nothing left to quantize, it is {', '.join(before) or 'too small'}")
    if wanted.heads and not quantization.quantize_heads(model, wanted.heads) and wanted.heads_named:
        raise ValueError(f"{source.path}: the heads have nothing left to quantize, they are {', '.join(before)}")


def _drop_repeated(source: Source) -> None:
    """Drop a head's embedding and LM head where they only repeat the target's: in other bits they would be others."""
    spec: MTPSpec = type(source.model).SPEC
    layers = source.model.args.num_hidden_layers
    for module, shared, kind in (("head", "lm_head", spec.head), ("embed_tokens", "embed_tokens", spec.embedding)):
        own: dict[int, dict[str, str]] = {}
        for name in source.contents.heads:
            depth, path = spec.locate(name, layers)  # type: ignore[misc]
            if path.startswith(f"{module}."):
                own.setdefault(depth, {})[path.removeprefix(f"{module}.")] = name
        tail = re.compile(rf"(?:.*\.)?{shared}\.(\w+)")
        target = {match[1]: name for name in source.contents.trunk if (match := tail.fullmatch(name))}
        if kind == "shared_or_own" and own and all(_equal(source.contents, own[depth], target) for depth in own):
            for head in source.model.mtp:
                head.pop(module)


def _equal(contents: Contents, a: dict[str, str], b: dict[str, str]) -> bool:
    """Whether two modules' tensors, their names by kind, hold the same; read for this alone, and not kept."""
    if a.keys() != b.keys():
        return False
    for kind in a:
        (x,) = read_tensors({a[kind]: contents.heads[a[kind]]}).values()
        (y,) = read_tensors({b[kind]: contents.trunk[b[kind]]}).values()
        if x.shape != y.shape or not mx.array_equal(x, y).item():
            return False
    return True


def _tensors(source: Source) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """The target's parameters as mlx-lm names them, the heads' as the hub does; neither computed."""
    spec, layers = source.model.spec, source.model.args.num_hidden_layers
    trunk, heads, trained = {}, {}, {}
    parameters: Any = tree_flatten(source.model.parameters())
    for path, w in parameters:
        if not path.startswith("mtp."):
            trunk[path] = w
            continue
        _, depth, inside = path.split(".", 2)
        name = spec.name(int(depth), inside, layers)
        heads[name] = w
        if path in source.trained:
            trained[name] = source.trained[path]
    source.trained = trained
    return trunk, heads


def _check_shared(source: Source, trunk: dict[str, mx.array], heads: dict[str, mx.array]) -> None:
    """Raise ValueError where mlx-lm would not know what to do with heads that it finds among its shards."""
    left = source.model.BASE.sanitize(source.model, trunk | heads).keys() - trunk.keys()
    if left:
        raise ValueError(
            f"mtp_layout='shards': mlx-lm cannot load this model with its heads in the shards; allowed is 'sidecar' "
            f"(it would stumble over {min(left)})"
        )


def _config(source: Source) -> dict[str, Any]:
    """config.json with the quantization that the model has now, in place of what its source had."""
    config = dict(source.config)
    if "text_config" in config:
        config["text_config"] = {k: v for k, v in config["text_config"].items() if not k.startswith("quantization")}
    found = quantization.listed(source.model)
    kept = {k: v for k, v in config.items() if not k.startswith("quantization")}
    return kept if found is None else kept | {"quantization": found}


def _facts(source: Source, apart: bool) -> Report:
    norms = "shifted by +1 (they were stored zero-centred)" if any(source.raw) else "as they were (already shifted)"
    place = SIDECAR if apart else "in the model's shards"
    if not source.model.mtp:
        warnings.warn(f"{source.path}: no MTP heads found ({source.contents.source})", stacklevel=3)
        place = source.contents.source
    return make_report(source.model, source.config, source=place, norms=norms, ignored=source.contents.ignored)


def _index(files: dict[str, dict[str, mx.array]], parameters: int) -> dict[str, Any]:
    """What model.safetensors.index.json says: sizes, and the file of every tensor."""
    total = sum(w.nbytes for tensors in files.values() for w in tensors.values())
    places = sorted((name, file) for file, tensors in files.items() for name in tensors)
    return {"metadata": {"total_size": total, "total_parameters": parameters}, "weight_map": dict(places)}


def _write(
    source: Source, files: dict[Path, dict[str, mx.array]], total: int, progress: Progress | None
) -> None:
    """Compute and write all tensors, file by file; ValueError where a head's was never trained."""
    done = 0

    def check(name: str, w: mx.array) -> None:
        nonlocal done
        states = source.trained.pop(name, [])
        mx.eval(w, *states)
        if states and (states[0].item() or not states[1].item()):
            state = "NaN" if states[0].item() else "only zeros"
            raise ValueError(f"{source.path}: tensor {name} holds {state}, expected trained weights")
        done += w.nbytes
        if progress is not None:
            progress(done, total)

    for file, tensors in files.items():
        tensor_file.write(file, tensors, CONVERTED, check)
