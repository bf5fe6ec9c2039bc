"""Describe a family's GGUF files: where each tensor goes, and what its values and metadata become."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .meta import Meta

BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")
IGNORED = ("rope_freqs.weight", "attn_rot_embd.weight", ".input_scale")  # rope.py reads the factors
ENDS = {"token_embd": "embed_tokens", "output_norm": "norm"}
HEAD = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "norm",
    "nextn.shared_head_head": "head",
}


class Change(NamedTuple):
    """What is done to the rows of tensors that become a parameter.

    rows: indices into the tensors' rows, one below another. columns: indices of columns. values: a function of
    the float32 array [rows, columns]. shape: the parameter's, where it is not the tensor's.
    """

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None
    shape: tuple[int, ...] | None = None


class Made(NamedTuple):
    """The tensors that a parameter is made from, in the order of their rows, and how."""

    tensors: tuple[str, ...]
    change: Change


NO_CHANGE = Change()
Changes = Callable[[Meta, str, tuple[int, ...]], Change]


def unchanged(meta: Meta, path: str, shape: tuple[int, ...]) -> Change:
    """Leave a parameter as it is."""
    return NO_CHANGE


@dataclass(frozen=True)
class Family:
    """What converters do with a family.

    config: config.json's content, in the words of the family's port. block: by name in a block its path in a layer;
    a tuple where rows become several parameters, one path of several tensors that are joined in this order.
    changes: of the parameter at a path in a layer, whose tensors' rows are of this shape. ends: of the others.
    head: of what heads alone have. in_head: by name in a block, where `block` does not hold for a head.
    float16: whether the activations fit.
    """

    config: Callable[[Meta], dict[str, Any]]
    block: Mapping[str, str | tuple[str, ...]]
    changes: Changes = unchanged
    layers: str = "model.layers."
    ends: Mapping[str, str] = field(default_factory=lambda: ends("model.", "lm_head"))
    head: Mapping[str, str] = field(default_factory=lambda: HEAD)
    in_head: Mapping[str, str] = field(default_factory=dict)
    float16: bool = False

    def parameters(self, meta: Meta) -> dict[str, Made]:
        """List by path what each parameter is made from; ValueError for a tensor that has no place."""
        found: dict[str, list[str]] = {}
        for name in meta.shapes:
            if not name.endswith(IGNORED):
                for path in self._paths(meta, name):
                    found.setdefault(path, []).append(name)
        return {path: self._made(meta, path, names) for path, names in found.items()}

    def _paths(self, meta: Meta, name: str) -> list[str]:
        """Name the parameters that a tensor becomes, or a part of one."""
        match = BLOCK.fullmatch(name)
        before, table, rest = "", self.ends, name
        if match:
            layer, rest = int(match[1]), match[2]
            before, table = f"{self.layers}{layer}.", self.block
            if layer >= meta.layers:
                before, table = f"mtp.{layer - meta.layers}.", self._of_head()
        stem, _, suffix = rest.rpartition(".")
        place = table.get(rest) or table.get(stem)
        if place is None:
            raise ValueError(f"{meta.file}: tensor {name} has no place in architecture {meta.architecture}")
        places = (place,) if isinstance(place, str) else place
        return [before + p + ("" if rest in table else f".{suffix}") for p in places]

    def _of_head(self) -> dict[str, Any]:
        inside = {n: (p,) if isinstance(p, str) else p for n, p in self.block.items()}
        block = {n: tuple(f"block.{p}" for p in paths) for n, paths in inside.items()}
        return {**block, **self.in_head, **self.head}

    def _made(self, meta: Meta, path: str, names: list[str]) -> Made:
        """Order a parameter's tensors and find its change."""
        order = list(self.block)
        rests = {name: BLOCK.fullmatch(name) for name in names}
        names.sort(key=lambda n: _rank(order, rests[n]))
        shapes = [meta.shapes[name] for name in names]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        match = rests[names[0]]
        place = self.block.get(match[2].rpartition(".")[0]) or self.block.get(match[2]) if match else None
        if isinstance(place, tuple) and len(shape) == 3:
            parts = [f".{p}." in f".{path}." for p in place]
            return Made(tuple(names), part_of_rows(shape, parts.index(True), len(place)))
        return Made(tuple(names), self.changes(meta, path, shape))


def _rank(order: list[str], match: re.Match | None) -> int:
    """Place a tensor among those that are joined, by its family's table."""
    stem = match[2].rpartition(".")[0] if match else ""
    return order.index(stem) if stem in order else len(order)


def ends(inside: str, head: str, **others: str) -> dict[str, str]:
    """Return the paths of the embedding, the last norm and the LM head inside these modules."""
    return {**{name: f"{inside}{path}" for name, path in (ENDS | others).items()}, "output": head}


def part_of_rows(shape: tuple[int, ...], part: int, parts: int) -> Change:
    """Take one of the parts that the rows of each expert [experts, parts * rows, columns] are."""
    experts, rows, columns = shape
    order = np.arange(experts * rows).reshape(experts, parts, -1)[:, part].reshape(-1)
    return Change(rows=order, shape=(experts, rows // parts, columns))
