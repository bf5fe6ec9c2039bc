"""Open a checkpoint to convert it: its tensors by the names they will have, none of them read yet."""

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..models import find_port, port_names
from .build import check_norms, read_args, read_port
from .convert_precision import Precision, listed
from .convert_writer import Tensors
from .files import TRUNK_FILES, read_config, read_index, read_tensors
from .parameters import named
from .report import Report, make_report
from .sort_tensors import Contents, Drafting


@dataclass
class Source:
    """What `open_source` found. raw: whether the trunk's norms, and the heads', are stored zero-centred.

    trained: by the names of `tensors`, of floating-point ones: is there NaN in it, in a head's anything but zeros.
    dtype: what was asked for.
    """

    path: Path
    config: dict[str, Any]
    model: Any
    contents: Contents
    raw: tuple[bool, bool]
    trained: dict[str, tuple[mx.array, mx.array]] = field(default_factory=dict)
    dtype: str | None = None

    def prepare(self, precision: Precision) -> None:
        """Drop what repeats the target, and give the rest its precision. Warns of norms that look wrong."""
        _drop_repeated(self.model, self.contents)
        check_norms(self.model, self.contents, self.raw)
        for path, w in named(self.model).items():
            if mx.issubdtype(w.dtype, mx.floating) and not path.endswith(".biases"):
                head = path.startswith("mtp.")
                name = self._stored(path) if head else path
                if precision.dequantize:
                    name = re.sub(r"\.scales$", ".weight", name)
                self.trained[name] = mx.isnan(w).any(), w.any() if head else mx.array(True)
        declared = self.config.get("torch_dtype") or self.config.get("text_config", {}).get("dtype")
        precision.apply(self.model, declared)
        self.dtype = precision.dtype

    def tensors(self) -> tuple[Tensors, Tensors]:
        """Return the target's by mlx-lm's names, and the heads' by the hub's."""
        found = named(self.model)
        heads = {self._stored(path): w for path, w in found.items() if path.startswith("mtp.")}
        return {path: w for path, w in found.items() if not path.startswith("mtp.")}, heads

    def _stored(self, path: str) -> str:
        """Name the parameter mtp.<depth>.<path>."""
        _, depth, inside = path.split(".", 2)
        return self.model.spec.name(int(depth), inside, self.model.args.num_hidden_layers)

    def new_config(self) -> dict[str, Any]:
        """Make config.json with the type and quantization that the model has now, in place of its source's."""
        new, found = _renewed(self.config, self.dtype), listed(self.model)
        if "text_config" in new:
            new["text_config"] = _renewed(new["text_config"], self.dtype)
        return new if found is None else new | {"quantization": found}

    def facts(self, place: str) -> Report:
        """Make the report that a load of the conversion would; `place` is where its heads are."""
        shifted = any(self.raw)
        norms = "shifted by +1 (they were stored zero-centred)" if shifted else "as they were (already shifted)"
        if not self.model.mtp:
            warnings.warn(f"{self.path}: no MTP heads found ({self.contents.source})", stacklevel=3)
            place = self.contents.source
        return make_report(self.model, self.config, source=place, norms=norms, ignored=self.contents.ignored)

    def compute(self, name: str, w: mx.array) -> None:
        """Read and compute a tensor; ValueError where that fails, or it was NaN or a head's zeros when stored."""
        states = self.trained.pop(name, ())
        try:
            mx.eval(w, *states)
        except RuntimeError as e:
            raise ValueError(f"{self.path}: tensor {name} cannot be read ({e})") from e
        if states and (states[0].item() or not states[1].item()):
            state = "NaN" if states[0].item() else "only zeros"
            raise ValueError(f"{self.path}: tensor {name} holds {state}, expected trained weights")


def open_source(path: Path, *, alone: bool = False) -> Source:
    """Open a checkpoint directory, or its heads `alone`; ValueError where no port knows it, or it is damaged."""
    config = read_config(path)
    return Source(path, config, *read_port(_port(path, config), path, config, Drafting(True, None, {}, None, alone)))


def files_of_heads(path: Path) -> list[str]:
    """List the weights' files that heads need, by config.json and the index; without an index, all.

    Where heads have embeddings or LM heads, the target's are needed too: they may be the same.
    """
    config, places = read_config(path), read_index(path)
    port = _port(path, config)
    spec, layers = port.Model.SPEC, read_args(port, path, config).num_hidden_layers
    heads = {name: place for name in places if (place := spec.locate(name, layers))}
    compared = any(spec.may_repeat(inside.partition(".")[0]) for _, inside in heads.values())
    shared = {name for name in places if compared and re.search(r"(^|\.)(lm_head|embed_tokens)\.", name)}
    return sorted({places[name] for name in heads.keys() | shared}) if places else [TRUNK_FILES]


def _port(path: Path, config: dict[str, Any]) -> ModuleType:
    port = find_port(config)
    if port is None:
        ports = ", ".join(port_names())
        raise ValueError(f"{path}: model_type {config['model_type']!r} has no port that drafts; ports are {ports}")
    return port


def _renewed(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Leave out a config.json's quantization, and make it of the type that was asked for."""
    kept = {name: value for name, value in config.items() if name not in ("quantization", "quantization_config")}
    return kept | {name: dtype for name in ("torch_dtype", "dtype") if dtype and name in kept}


def _drop_repeated(model: Any, contents: Contents) -> None:
    """Drop a head's embedding and LM head where they only repeat the target's: in other bits they would be others."""
    spec, layers = type(model).SPEC, model.args.num_hidden_layers
    for module, shared in (("head", "lm_head"), ("embed_tokens", "embed_tokens")):
        own: dict[int, dict[str, str]] = {}
        for name in contents.heads:
            depth, path = spec.locate(name, layers)
            if path.startswith(f"{module}."):
                own.setdefault(depth, {})[path.removeprefix(f"{module}.")] = name
        tail = re.compile(rf"(?:.*\.)?{shared}\.(\w+)")
        target = {match[1]: name for name in contents.trunk if (match := tail.fullmatch(name))}
        if own and spec.may_repeat(module) and all(_equal(contents, part, target) for part in own.values()):
            for head in model.mtp:
                head.pop(module)


def _equal(contents: Contents, a: dict[str, str], b: dict[str, str]) -> bool:
    """Tell whether two modules' tensors, their names by kind, hold the same; read for this alone, and not kept."""
    stored = contents.heads | contents.trunk
    pairs = (read_tensors({name: stored[name] for name in (a[kind], b[kind])}).values() for kind in a if kind in b)
    return a.keys() == b.keys() and all(x.dtype == y.dtype and mx.array_equal(x, y) for x, y in pairs)
