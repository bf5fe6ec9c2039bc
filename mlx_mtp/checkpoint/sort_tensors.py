"""Sort a checkpoint's tensors into the trunk's, the MTP heads', and those that text decoding does not use."""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ..layers.mtp_spec import MTPSpec
from ..layers.with_heads import TUNED, TUNED_PREFIX
from ..machine.errors import first_line
from .files import FLOATS, FP8_SCALES, Header
from .quant_methods import method_of
from .separate_heads import read_separate_heads
from .weight_files import StoredTensors, read_stored

T = TypeVar("T")
NUMBER = re.compile(r"\.(\d+)\.")  # of a layer, in a tensor's name
EXPERT = re.compile(r"\.experts\.(\d+)\.")
TOP = re.compile(r"(model\.)?[^.]*\.?")  # the part of a model that a tensor belongs to
OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)")
HEAD = re.compile(r"(^|\.)\w*(mtp|nextn|eagle|draft)\w*\.")  # of a head, in any layout
# Scales of activations, of modelopt and compressed-tensors.
OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".q_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Drafting:
    """The options of `load` that choose the source of drafts; see there.

    alone: read only the heads, not the target. joins: `draft_model` joins the MTP heads instead of replacing them.
    """

    mtp: bool
    mtp_path: str | Path | None
    mtp_overrides: dict[str, Any]
    draft_model: str | Path | None
    alone: bool = False
    joins: bool = False

    @property
    def heads(self) -> bool:
        """Whether MTP heads are to be loaded."""
        return self.mtp and (self.draft_model is None or self.joins)

    def check(self) -> None:
        """Raise ValueError for options that exclude each other."""
        for name in ("mtp_path",) if self.joins else ("draft_model", "mtp_path", "mtp_overrides"):
            if not self.mtp and (value := getattr(self, name)) not in (None, {}):
                raise ValueError(f"{name}={value}: not together with mtp=False")
        if self.draft_model is not None and self.mtp_path is not None and not self.joins:
            raise ValueError(f"draft_model={self.draft_model}: not together with mtp_path={self.mtp_path}; give one")


def without_broken_heads(read: Callable[[Drafting], T], drafting: Drafting) -> T:
    """Return read(drafting); if that raises ValueError, read without MTP heads where a block drafter can draft alone.

    It can if `draft_model` joins heads, and no `mtp_path` is given; a warning then states the error. Otherwise the
    error is raised, and so is an error of the second read.
    """
    try:
        return read(drafting)
    except ValueError as e:
        if not (drafting.joins and drafting.heads) or drafting.mtp_path is not None:
            raise
        found = read(replace(drafting, mtp=False))
        warnings.warn(f"{first_line(e)}; the block drafter drafts without MTP heads", stacklevel=5)
        return found


@dataclass(frozen=True)
class Contents:
    """A checkpoint's tensors, sorted into `trunk` and `heads`.

    depths: number of heads. source: of the heads, for the report. ignored: names, or patterns of names, of tensors
    that text decoding does not use. spec: the heads' wiring. alone: the trunk may be incomplete, and is not loaded.
    stored: the weight files; None for an external drafter. needs_heads: the checkpoint's own heads are to be loaded.
    packed: packed weights (`packed.Packed`) by module, of which `trunk` and `heads` have entries in MLX's formats.
    """

    trunk: Header
    heads: Header
    depths: int
    source: str
    ignored: tuple[str, ...]
    spec: MTPSpec
    alone: bool = False
    stored: StoredTensors | None = None
    needs_heads: bool = False
    packed: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self, config: dict) -> dict[str, Any]:
        """Return the replacements for config.json's quantization entries with which mlx-lm loads the target.

        They lack the entries of heads, and the formats that this package reads. Entries that mlx-lm reads as they
        are have no replacement. If there are scales, but no entry in config.json, one makes mlx-lm infer formats.
        """
        found: dict[str, Any] = {}
        stored = (config | config.get("text_config", {})).get("quantization_config") or {}
        if not stored or "modelopt" in stored.values() or method_of(config):
            found["quantization_config"] = {}  # mlx-lm refuses formats that this package reads
        if isinstance(listed := config.get("quantization"), dict):
            found["quantization"] = {path: value for path, value in listed.items() if not path.startswith("mtp.")}
        elif listed is None and (self.packed or any(name.endswith(".scales") for name in self.heads)):
            found["quantization"] = {"group_size": 64, "bits": 4}  # mlx-lm infers formats from the shapes
        return found


def sort_tensors(port: ModuleType, path: Path, layers: int, drafting: Drafting) -> Contents:
    """Return a checkpoint's tensors, sorted by the headers of its files.

    ValueError for missing or needed unreadable files, a tensor that fits no head, two for one place of a head, or a
    gap in the depths or in a head's experts. layers: the number of the target's layers. drafting: decides whether
    heads are loaded, and from where; without heads, their tensors are dropped.
    """
    stored = read_stored(path, whole=not drafting.alone)
    own = drafting.heads and drafting.mtp_path is None
    given = read_separate_heads(port, layers, drafting.mtp_path) if drafting.heads and not own else {}  # type: ignore[arg-type]
    spec = layout_of(port, stored.trunk | stored.sidecars if own else given)
    separate, moved = _own_sidecars(stored, spec, layers, needed=own)
    separate = separate if own else given
    trunk, heads, ignored = {}, {}, set()
    for name, tensor in (stored.trunk | moved).items():
        affix = ignored_by(port, name)
        if affix is not None:
            ignored.add(f"{affix}*" if name.startswith(affix) else f"*{affix}")
        elif of_other_layout(port, spec, name, layers):
            ignored.add(name)
        elif name in separate or spec.locate(name, layers):
            heads[name] = tensor
        else:
            trunk[name] = tensor
    if drafting.heads:
        check_experts(path, heads)
    for name, tensor in (heads | separate).items():
        if spec.locate(name, layers) is None:
            raise ValueError(f"{tensor.file}: tensor {name} belongs to no MTP head; heads are {spec.place(layers)}")
    source = "in the model's shards"
    if separate:
        source = ", ".join(relative(file, path) for file in sorted({t.file for t in separate.values()}))
        kept = {} if drafting.mtp_path is not None else _missing_in(separate, heads, spec, layers)
        ignored |= {f"{name} of the shards" for name in heads.keys() - kept.keys()}
        heads, source = kept | separate, f"{source} and the model's shards" if kept else source
    if not drafting.heads:
        trunk, unknown = _without_heads(trunk, heads, layers)
        unused, none = tuple(sorted(ignored | unknown)), spec.resolve([])
        return Contents(trunk, {}, 0, "not loaded, mtp=False", unused, none, stored=stored)
    places: dict[str, Any] = {name: spec.locate(name, layers) for name in heads}
    seen: dict[Any, str] = {}
    for name, place in places.items():
        if (first := seen.setdefault(place, name)) != name:  # a prefix can have two spellings
            both = f"tensors {first} and {name} stand for the same tensor of a head; expected one of the two"
            raise ValueError(f"{heads[name].file}: {both}")
    depths = {depth for depth, _ in places.values()}
    if missing := set(range(len(depths))) - depths:
        name = next(n for n, (depth, _) in places.items() if depth == max(depths))
        but = f"but of depth {max(depths)}, such as {name}; all depths are needed"
        raise ValueError(f"{heads[name].file}: no tensors of MTP depth {min(missing)}, {but}")
    vocabs = (heads[name].shape[0] for name, (_, inside) in places.items() if inside == "d2t")
    overrides = {} if drafting.draft_model else drafting.mtp_overrides
    spec = replace(spec, draft_vocab=next(vocabs, 0)).override(overrides).resolve([p for _, p in places.values()])
    if spec.head == "shared":  # mtp_overrides may replace a head's own LM head
        places = {name: place for name, place in places.items() if not place[1].startswith("head.")}
    if spec.topology == "recycle":  # only the first head is recycled
        places = {name: place for name, place in places.items() if not place[0]}
    depths, used = {depth for depth, _ in places.values()}, {name: heads[name] for name in places}
    unused, found = tuple(sorted(ignored | (heads.keys() - used.keys()))), source if depths else "no head tensors"
    return Contents(trunk, used, len(depths), found, unused, spec, drafting.alone, stored, own)


def layout_of(port: ModuleType, names: Collection[str]) -> MTPSpec:
    """Return the layout of heads: TUNED if `names` has tensors of `tune-heads --new`, else the family's own.

    names: the stored names of tensors.
    """
    return TUNED if any(name.startswith(TUNED_PREFIX) for name in names) else port.Model.SPEC


def of_other_layout(port: ModuleType, spec: MTPSpec, name: str, layers: int) -> bool:
    """Return whether a tensor belongs to heads that are not loaded, because they have another layout than `spec`.

    spec: the result of `layout_of`. layers: the number of the target's layers.
    """
    if spec.prefix == TUNED.prefix:
        return port.Model.SPEC.locate(name, layers) is not None
    return name.startswith(TUNED_PREFIX)


def _own_sidecars(stored: StoredTensors, spec: MTPSpec, layers: int, *, needed: bool) -> tuple[Header, Header]:
    """Return the tensors of a checkpoint's sidecars: (those of heads and unlisted ones, others that the index lists).

    Copies of the trunk's tensors are dropped. needed: raise ValueError for a sidecar that cannot be read.
    """
    for error in stored.unread_sidecars.values() if needed else ():
        raise ValueError(error)
    heads, moved = {}, {}
    for name, tensor in stored.sidecars.items():
        if spec.locate(name, layers):
            heads[name] = tensor
        elif name not in stored.trunk:
            (moved if name in stored.listed else heads)[name] = tensor
    return heads, moved


def _without_heads(trunk: Header, heads: Header, layers: int) -> tuple[Header, set[str]]:
    """Return (the trunk without tensors of heads, the names of other dropped tensors).

    Heads' tensors have a head's name, or are in a layer after the trunk's `layers`. A later layer with exactly the
    tensors of a trunk layer stays: config.json has the wrong number of layers, and a later check reports it.
    """
    inside: dict[int, set[str]] = {}
    for name in trunk | heads:
        if match := OF_LAYER.search(name):
            inside.setdefault(int(match[1]), set()).add(match[2])
    like = [tails for number, tails in inside.items() if number < layers]
    kept, unknown = {}, set()
    for name, tensor in (trunk | heads).items():
        match = OF_LAYER.search(name)
        later = match is not None and int(match[1]) >= layers
        if HEAD.search(name) or (match and later and inside[int(match[1])] not in like):
            unknown |= {name} - heads.keys()
        elif name in trunk or later:
            kept[name] = tensor
    return kept, unknown


def ignored_by(port: ModuleType, name: str) -> str | None:
    """Return the prefix or suffix that marks a tensor as unused in text decoding; None for a tensor that is used."""
    if port.Model.OWN and not port.Model.OWN.match(name):
        return TOP.match(name)[0]  # type: ignore[index]
    affixes = (*port.Model.IGNORED, *OF_ACTIVATIONS)
    return next((a for a in affixes if name.startswith(a) or name.endswith(a)), None)


def _missing_in(sidecar: Header, shards: Header, spec: MTPSpec, layers: int) -> Header:
    """Return head tensors in the shards whose module is not in the sidecar; a depth's experts are one module."""
    places: dict[str, Any] = {name: spec.locate(name, layers) for name in (*shards, *sidecar)}
    modules = {
        name: (depth, re.sub(r"\.(experts|switch_mlp)\..*", ".experts.", path).rpartition(".")[0])
        for name, (depth, path) in places.items()
    }
    found = {modules[name] for name in sidecar}
    return {name: tensor for name, tensor in shards.items() if modules[name] not in found}


def check_types(header: Header) -> None:
    """Raise ValueError for a tensor whose stored type does not fit its kind, or for scales without their weight.

    MLX would compute with misread bytes.
    """
    for name, tensor in header.items():
        module, _, kind = name.rpartition(".")
        allowed, wording = FLOATS, "floating-point numbers"
        if kind == "weight" and f"{module}.scales" in header:
            allowed, wording = ("U32",), "U32, because it has scales"
        elif kind.endswith("_scale"):
            allowed, wording = (*FLOATS, "F8_E4M3"), "floating-point numbers, or F8_E4M3"
        elif kind == "scales":
            allowed, wording = (*FLOATS, "U8", "U16"), "floating-point numbers, U8 or U16"
        elif any(name + suffix in header for suffix in FP8_SCALES):
            allowed, wording = (*FLOATS, "F8_E4M3", "U8"), "F8_E4M3, because it has a scale"
        elif kind == "d2t":
            allowed, wording = ("I32", "I64"), "integers"
        if tensor.dtype not in allowed:
            raise ValueError(f"{tensor.file}: tensor {name} has type {tensor.dtype}; expected {wording}")
        if kind == "scales" and f"{module}.weight" not in header:
            raise ValueError(f"{tensor.file}: tensor {module}.weight is missing; its scales are there")


def check_experts(path: Path, header: Header) -> None:
    """Raise ValueError for the first gap in the numbers of a layer's experts, with the missing tensor's name."""
    for name, before, count in missing_experts(header):
        file = only({t.file for other, t in header.items() if other.startswith(before)}, path)
        raise ValueError(f"{file}: tensor {name} is missing; each expert from 0 to {count - 1} needs one")


def missing_experts(header: Header) -> Iterator[tuple[str, str, int]]:
    """Yield (tensor name, its part before the number, number of experts) for each gap in numbered experts.

    A layer's number of experts is the largest number in any layer with the same name but for the layer's number, plus
    one, so that a damaged name causes many gaps.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in header:
        if match := re.fullmatch(r"(.+\.experts\.)(\d{1,9})(\..+)", name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    counts: dict[str, int] = {}  # a head may have more experts than the trunk
    for (before, _), found in numbers.items():
        counts[layerless(before)] = max(counts.get(layerless(before), 0), max(found) + 1)
    for (before, after), found in numbers.items():
        count = counts[layerless(before)]
        yield from ((f"{before}{i}{after}", before, count) for i in range(count) if i not in found)


def layerless(name: str) -> str:
    """Return a tensor's name with ".#." instead of its first number between dots, the layer's."""
    return NUMBER.sub(".#.", name, count=1)


def only(files: set[Path], path: Path) -> str:
    """Return the only one of `files`, else the directory `path` that contains them, for messages."""
    return str(next(iter(files)) if len(files) == 1 else path)


def relative(file: Path, path: Path) -> str:
    """Return a file's path relative to a directory, or whole if it is outside."""
    return str(file.relative_to(path)) if file.is_relative_to(path) else str(file)
