"""Open a GGUF file for transcoding: its family, config.json, an empty model, and what each parameter is made from."""

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
from ...models.gguf.family import Family, Made
from ...models.gguf.meta import Meta
from ...models.gguf.table import find_family
from ..build import MISBUILT, NO_MODEL, read_args
from ..files import checked_config, read_config
from ..parameters import named
from . import header
from .header import Contents, Entry
from .requantize import dequantized

FACTORS = "rope_freqs.weight"
MAX_FACTORS = 4096
HEAD_BLOCK = re.compile(r"blk\.(\d{1,4})\.")
SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"  # that --config-from has to agree in


@dataclass(frozen=True)
class Source:
    """A GGUF file that was opened.

    entries: its tensors and those of its heads' file. made: by parameter what it is made from. model: built from
    `config`, no parameter computed. names: of parameters in an MLX checkpoint.
    """

    contents: Contents
    entries: dict[str, Entry]
    meta: Meta
    family: Family
    config: dict[str, Any]
    model: Any
    made: dict[str, Made]

    @property
    def path(self) -> Path:
        """The first file."""
        return self.contents.files[0]

    def stored_name(self, path: str) -> str:
        """Name a parameter as a conversion stores it: a head's by the hub's name."""
        if not path.startswith("mtp."):
            return path
        _, depth, inside = path.split(".", 2)
        return self.model.spec.name(int(depth), inside, self.model.args.num_hidden_layers)


def open_source(
    file: str | Path,
    *,
    config_from: Path | None = None,
    heads_from: str | Path | None = None,
    heads_only: bool = False,
) -> Source:
    """Open a file, or the first of its splits; ValueError, in one line, where it cannot be transcoded.

    config_from: directory whose config.json is used in place of what the metadata say. heads_from: another GGUF file
    with MTP heads. heads_only: the file's heads are wanted, for the model of `config_from`.
    """
    contents = header.read(file)
    entries, meta = _with_heads(contents, heads_from)
    family = find_family(meta)
    with _naming(meta):
        made = family.parameters(meta)
    if heads_only:
        assert config_from is not None
        made = {path: what for path, what in made.items() if path.startswith("mtp.")}
        if not made:
            raise ValueError(f"{meta.file}: no MTP heads in it (blocks behind the target's, nextn.*)")
    config = _config(family, meta, config_from, compare=not heads_only)
    model = _build(config, made, config_from or Path(meta.file))
    source = Source(contents, entries, meta, family, config, model, made)
    _check_shapes(source, heads_only=heads_only)
    return source


def _config(family: Family, meta: Meta, config_from: Path | None, *, compare: bool) -> dict[str, Any]:
    """Make config.json of the metadata, or read that of a directory."""
    if config_from is None:
        with _naming(meta):
            own = family.config(meta)
        meta.refuse_unread()
        return checked_config(own, Path(meta.file))
    config = read_config(config_from)
    if compare:
        with _naming(meta):
            own = family.config(meta)
        _compare(own, config, config_from)
    return config


@contextmanager
def _naming(meta: Meta) -> Iterator[None]:
    """Name the file in an error that metadata of impossible values lead to."""
    try:
        yield
    except MISBUILT as e:
        if meta.file in str(e):
            raise
        raise ValueError(f"{meta.file}: its metadata fit no model ({first_line(e)})") from e


def _with_heads(contents: Contents, heads_from: str | Path | None) -> tuple[dict[str, Entry], Meta]:
    """Join the tensors of a file and of its heads' file, and make the metadata say how many heads there are."""
    entries, values = dict(contents.tensors), dict(contents.metadata)
    if heads_from is not None:
        beside = header.read(heads_from)
        _check_same(contents, beside)
        trunk = _meta(contents.files[0], values, entries).layers
        count = _meta(beside.files[0], beside.metadata, beside.tensors).heads
        blocks = {
            name: e for name, e in beside.tensors.items() if (m := HEAD_BLOCK.match(name)) and int(m[1]) >= trunk
        }
        if not blocks or not count:
            raise ValueError(f"{beside.files[0]}: no MTP heads in it, expected blocks from {trunk} on")
        arch = values.get("general.architecture")
        values |= {f"{arch}.nextn_predict_layers": count, f"{arch}.block_count": trunk + count}
        longer = {k: v for k, v in beside.metadata.items() if isinstance(v, np.ndarray) and k.startswith(f"{arch}.")}
        values |= longer
        own = {name: e for name, e in entries.items() if not (m := HEAD_BLOCK.match(name)) or int(m[1]) < trunk}
        entries = own | blocks
    if factors := entries.get(FACTORS):
        if math.prod(factors.shape) > MAX_FACTORS:
            raise ValueError(f"{factors.file}: tensor {FACTORS} has shape {factors.shape}; expected few numbers")
        values[FACTORS] = dequantized(factors.kind, factors.blocks()).reshape(-1)
    meta = _meta(contents.files[0], values, entries)
    if meta.heads and not any(name.startswith(f"blk.{meta.layers}.") for name in entries):
        values[f"{meta.architecture}.nextn_predict_layers"] = 0
        values[f"{meta.architecture}.block_count"] = meta.layers
        meta = _meta(contents.files[0], values, entries)
    return entries, meta


def _check_same(contents: Contents, beside: Contents) -> None:
    """Raise for heads of another family or size."""
    ours, theirs = contents.metadata, beside.metadata
    arch = ours.get("general.architecture")
    for key in ("general.architecture", f"{arch}.embedding_length"):
        if ours.get(key) != theirs.get(key):
            raise ValueError(f"{beside.files[0]}: {key} is {theirs.get(key)!r}; the target's is {ours.get(key)!r}")


def _meta(file: Path, values: dict[str, Any], entries: dict[str, Entry]) -> Meta:
    return Meta(str(file), values, {name: entry.shape for name, entry in entries.items()})


def _compare(own: dict[str, Any], config: dict[str, Any], place: Path) -> None:
    """Raise where a config.json is of another model than the file's metadata."""
    ours, theirs = own | own.get("text_config", {}), config | config.get("text_config", {})
    for name in SIZES:
        # Released embeddings may be padded, and the number of attention heads may be a list.
        padded = name == "vocab_size" and isinstance(theirs.get(name), int) and theirs[name] >= ours[name]
        if theirs.get(name) not in (None, ours[name]) and not padded:
            raise ValueError(f"{place}/config.json: {name} is {theirs[name]}; the GGUF file has {ours[name]}")


def _build(config: dict[str, Any], made: dict[str, Made], place: Path) -> Any:
    """Build an empty model of the family's port, with the heads that the file has."""
    port: ModuleType | None = find_port(config)
    if port is None:
        raise ValueError(f"{place}: model_type {config['model_type']!r} has no port")
    heads = [path.split(".", 2) for path in made if path.startswith("mtp.")]
    args = read_args(port, place, config)
    with one_line(f"{place}: {NO_MODEL}", (*MISBUILT, MemoryError, RuntimeError, OverflowError)):
        spec = port.Model.SPEC.resolve([inside for _, _, inside in heads])
        model = port.Model(args, max((int(depth) + 1 for _, depth, _ in heads), default=0), spec)
    mx.eval(mx.random.state)  # type: ignore[arg-type] - each module lengthens the graph that it is computed from
    if config.get("tie_word_embeddings") and not any(path.endswith("lm_head.weight") for path in made):
        model.language.pop("lm_head", None)
    return model


def _check_shapes(source: Source, *, heads_only: bool) -> None:
    """Raise for a parameter without a tensor, a tensor that the model has no place for, and other shapes."""
    wanted = named(source.model).items()
    expected = {path: array.shape for path, array in wanted if path.startswith("mtp.") or not heads_only}
    file = source.meta.file
    for path, what in source.made.items():
        if path not in expected:
            raise ValueError(f"{file}: tensor {what.tensors[0]} is not part of the model that its metadata describe")
        if (shape := shape_of(source, what)) != expected[path]:
            raise ValueError(
                f"{file}: tensor {what.tensors[0]} has shape {shape}; expected {expected[path]} ({path})"
            )
    if missing := sorted(expected.keys() - source.made.keys()):
        raise ValueError(f"{file}: no tensor for {missing[0]}, which its metadata expect")


def shape_of(source: Source, what: Made) -> tuple[int, ...]:
    """Return the shape of a parameter once it is made."""
    shapes = [source.entries[name].shape for name in what.tensors]
    joined = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
    return what.change.shape or joined
