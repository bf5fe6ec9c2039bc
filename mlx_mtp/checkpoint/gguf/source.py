"""Open a GGUF file for transcoding: its family, config.json, an empty model, and the tensors of each parameter."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from ...machine.errors import first_line, one_line
from ...models import find_port
from ...models.gguf.family import Family, TensorOrigin
from ...models.gguf.meta import Meta
from ...models.gguf.table import find_family
from ..build import MISBUILT, NO_MODEL, read_args
from ..files import checked_config, read_config
from ..parameters import named
from . import header
from .header import Entry, GGUFContents
from .requantize import dequantized

FACTORS = "rope_freqs.weight"
MAX_FACTORS = 4096
HEAD_BLOCK = re.compile(r"blk\.(\d{1,4})\.")
SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"  # --config-from must have the same


@dataclass(frozen=True)
class GGUFSource:
    """An opened GGUF file.

    entries: its tensors, and those of a separate file of heads. made: by parameter, the tensors and change that make
    it. model: the port's model, built from `config`, with lazy parameters.
    """

    contents: GGUFContents
    entries: dict[str, Entry]
    meta: Meta
    family: Family
    config: dict[str, Any]
    model: Any
    made: dict[str, TensorOrigin]


def open_source(
    file: str | Path,
    *,
    config_from: Path | None = None,
    heads_from: str | Path | None = None,
    heads_only: bool = False,
) -> GGUFSource:
    """Return an opened GGUF file, which may be split; a one-line ValueError if it cannot be transcoded.

    config_from: directory whose config.json replaces the one made from the metadata. heads_from: another GGUF file
    with the MTP heads. heads_only: use only the file's heads, for the model of `config_from`, which is then required.
    """
    contents = header.read(file)
    entries, meta = _with_heads(contents, heads_from)
    family = find_family(meta)
    with _naming(meta):
        made = family.parameters(meta)
    if heads_only:
        assert config_from is not None
        made = {path: parts for path, parts in made.items() if path.startswith("mtp.")}
        if not made:
            raise ValueError(f"{meta.file}: no MTP heads in it; expected nextn.* in blocks after the target's")
    config = _config(family, meta, config_from, compare=not heads_only)
    model = _build(config, made, config_from or Path(meta.file))
    source = GGUFSource(contents, entries, meta, family, config, model, made)
    _check_shapes(source, heads_only=heads_only)
    return source


def _config(family: Family, meta: Meta, config_from: Path | None, *, compare: bool) -> dict[str, Any]:
    """Return config.json: the family's from the metadata, or that of the directory `config_from`, if it is not None.

    compare: raise ValueError unless the sizes in that directory's config.json agree with the metadata's. Without a
    directory, ValueError for a key of the metadata that changes logits and is not read.
    """
    if config_from is None:
        with _naming(meta):
            made = family.config(meta)
        meta.refuse_unread()
        return checked_config(made, Path(meta.file))
    config = read_config(config_from)
    if compare:
        with _naming(meta):
            made = family.config(meta)
        _compare(made, config, config_from)
    return config


@contextmanager
def _naming(meta: Meta) -> Iterator[None]:
    """Return a context that converts errors from impossible metadata values to a ValueError with the file."""
    try:
        yield
    except MISBUILT as e:
        if meta.file in str(e):
            raise
        raise ValueError(f"{meta.file}: its metadata fit no model ({first_line(e)})") from e


def _with_heads(contents: GGUFContents, heads_from: str | Path | None) -> tuple[dict[str, Entry], Meta]:
    """Return the tensors and metadata of a file, joined with those of a separate file of heads (None: no such file).

    Heads of the separate file replace those of the first file. The metadata get the separate file's number of heads,
    0 if there are no tensors of heads, and the frequency factors in the tensor FACTORS, if there is one. ValueError
    if the files do not fit each other, the separate file has no heads, or there are more factors than MAX_FACTORS.
    """
    entries, values = dict(contents.tensors), dict(contents.metadata)
    if heads_from is not None:
        heads = header.read(heads_from)
        _check_same(contents, heads)
        trunk = _meta(contents.files[0], values, entries).layers
        count = _meta(heads.files[0], heads.metadata, heads.tensors).heads
        blocks = {name: e for name, e in heads.tensors.items() if _block(name) >= trunk}
        if not blocks or not count:
            raise ValueError(f"{heads.files[0]}: no MTP heads in it; expected nextn_predict_layers and blk.{trunk}.*")
        arch = values.get("general.architecture")
        values |= {f"{arch}.nextn_predict_layers": count, f"{arch}.block_count": trunk + count}
        # Values by layer are longer in the heads' file.
        values |= {k: v for k, v in heads.metadata.items() if isinstance(v, np.ndarray) and k.startswith(f"{arch}.")}
        entries = {name: e for name, e in entries.items() if _block(name) < trunk} | blocks
    if factors := entries.get(FACTORS):
        if math.prod(factors.shape) > MAX_FACTORS:
            found = f"tensor {FACTORS} has shape {factors.shape}"
            raise ValueError(f"{factors.file}: {found}; expected at most {MAX_FACTORS} numbers")
        values[FACTORS] = dequantized(factors.kind, factors.blocks()).reshape(-1)
    meta = _meta(contents.files[0], values, entries)
    if meta.heads and not any(name.startswith(f"blk.{meta.layers}.") for name in entries):
        arch = meta.architecture
        values |= {f"{arch}.block_count": meta.layers, f"{arch}.nextn_predict_layers": 0}
        meta = _meta(contents.files[0], values, entries)
    return entries, meta


def _block(name: str) -> int:
    """Return the number of a tensor's block, -1 if it is in none."""
    match = HEAD_BLOCK.match(name)
    return int(match[1]) if match else -1


def _check_same(contents: GGUFContents, heads: GGUFContents) -> None:
    """Raise ValueError if a file of heads is for another architecture or hidden size than the target's file."""
    ours, theirs = contents.metadata, heads.metadata
    arch = ours.get("general.architecture")
    for key in ("general.architecture", f"{arch}.embedding_length"):
        if ours.get(key) != theirs.get(key):
            raise ValueError(f"{heads.files[0]}: {key} is {theirs.get(key)!r}; the target's is {ours.get(key)!r}")


def _meta(file: Path, values: dict[str, Any], entries: dict[str, Entry]) -> Meta:
    return Meta(str(file), values, {name: entry.shape for name, entry in entries.items()})


def _compare(made: dict[str, Any], config: dict[str, Any], place: Path) -> None:
    """Raise ValueError if a config.json, in `place`, has other SIZES than `made`, the one from the GGUF metadata.

    A size that config.json lacks is not compared, and config.json's vocabulary may be larger.
    """
    ours, theirs = made | made.get("text_config", {}), config | config.get("text_config", {})
    for name in SIZES:
        # Released embeddings may be padded, and the number of attention heads may be a list.
        padded = name == "vocab_size" and isinstance(theirs.get(name), int) and theirs[name] >= ours[name]
        if theirs.get(name) not in (None, ours[name]) and not padded:
            raise ValueError(f"{place}/config.json: {name} is {theirs[name]}; the GGUF file has {ours[name]}")


def _build(config: dict[str, Any], made: dict[str, TensorOrigin], place: Path) -> Any:
    """Return the family port's model, without weights, with the number of heads that `made` has.

    place: the path that messages name. ValueError if there is no port, or the model cannot be built from `config`.
    """
    port: ModuleType | None = find_port(config)
    if port is None:
        raise ValueError(f"{place}: model_type {config['model_type']!r} has no port, so it cannot be transcoded")
    heads = [path.split(".", 2) for path in made if path.startswith("mtp.")]
    args = read_args(port, place, config)
    with one_line(f"{place}: {NO_MODEL}", (*MISBUILT, MemoryError, RuntimeError, OverflowError)):
        spec = port.Model.SPEC.resolve([inside for _, _, inside in heads])
        model = port.Model(args, max((int(depth) + 1 for _, depth, _ in heads), default=0), spec)
    mx.eval(mx.random.state)  # type: ignore[arg-type] - each module lengthens the graph that it is computed from
    if config.get("tie_word_embeddings") and not any(path.endswith("lm_head.weight") for path in made):
        model.language.pop("lm_head", None)
    return model


def _check_shapes(source: GGUFSource, *, heads_only: bool) -> None:
    """Raise ValueError unless tensors and parameters (heads' only if `heads_only`) match in name and shape."""
    parameters = named(source.model).items()
    expected = {path: array.shape for path, array in parameters if path.startswith("mtp.") or not heads_only}
    file = source.meta.file
    for path, made in source.made.items():
        name, shape = made.tensors[0], shape_of(source, made)
        if path not in expected:
            raise ValueError(f"{file}: tensor {name} becomes {path}, which the model does not have")
        if shape != expected[path]:
            raise ValueError(f"{file}: tensor {name} has shape {shape}; expected {expected[path]} ({path})")
    if missing := sorted(expected.keys() - source.made.keys()):
        raise ValueError(f"{file}: no tensor in it becomes parameter {missing[0]} of the model")


def shape_of(source: GGUFSource, made: TensorOrigin) -> tuple[int, ...]:
    """Return the shape of a parameter from the shapes of its tensors, joined by rows, and the change."""
    shapes = [source.entries[name].shape for name in made.tensors]
    return made.change.shape or (sum(shape[0] for shape in shapes), *shapes[0][1:])
