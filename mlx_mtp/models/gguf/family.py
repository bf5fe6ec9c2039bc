"""Describe a family's GGUF files: each tensor's path in the port's model, and how to undo the converter's changes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .meta import Meta

BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")
IGNORED = ("rope_freqs.weight", "attn_rot_embd.weight", ".input_scale")  # rope.py reads the factors
ENDS = {"token_embd": "embed_tokens", "output_norm": "norm"}
HEAD = {f"nextn.{n}": n for n in ("eh_proj", "enorm", "hnorm", "embed_tokens")}
HEAD |= {"nextn.shared_head_norm": "norm", "nextn.shared_head_head": "head"}


class TensorChange(NamedTuple):
    """How the tensors that become a parameter are changed, in this order; None is no change.

    rows, columns: indices of the tensors' rows (of all tensors, one after the other) and columns, in the parameter's
    order. values: a function of the float32 array [rows, columns]. shape: the parameter's, if it is not the tensors'.
    """

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None
    shape: tuple[int, ...] | None = None


class TensorOrigin(NamedTuple):
    """The names of the tensors that a parameter is made from, in the order of their rows, and their change."""

    tensors: tuple[str, ...]
    change: TensorChange


NO_CHANGE = TensorChange()
Changes = Callable[[Meta, str, tuple[int, ...]], TensorChange]


def unchanged(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return no change, for any parameter."""
    return NO_CHANGE


@dataclass(frozen=True)
class Family:
    """How the GGUF files of a family become its port's config.json and parameters.

    config: returns config.json. block: from a tensor's name in a block to its path in a layer; a tuple if its rows
    are split over parameters. Tensors with the same path are joined by rows, in this order. changes: returns the
    change of the parameter at a path, of joined tensors of a shape. layers: prefix of layers. ends: paths of tensors
    outside blocks. head: paths of tensors that only MTP heads have. in_head: paths in a head that differ from
    `block`'s. float16: whether the family's activations fit into float16.
    """

    config: Callable[[Meta], dict[str, Any]]
    block: Mapping[str, str | tuple[str, ...]]
    changes: Changes = unchanged
    layers: str = "model.layers."
    ends: Mapping[str, str] = field(default_factory=lambda: ends("model.", "lm_head"))
    head: Mapping[str, str] = field(default_factory=lambda: HEAD)
    in_head: Mapping[str, str] = field(default_factory=dict)
    float16: bool = False

    def parameters(self, meta: Meta) -> dict[str, TensorOrigin]:
        """Return, by path in the port's model, the tensors that each parameter is made from, and their change.

        ValueError for a tensor that becomes no parameter, unless it is in IGNORED.
        """
        found: dict[str, list[str]] = {}
        for name in meta.shapes:
            if not name.endswith(IGNORED):
                for path in self._paths(meta, name):
                    found.setdefault(path, []).append(name)
        return {path: self._made(meta, path, names) for path, names in found.items()}

    def _paths(self, meta: Meta, name: str) -> list[str]:
        """Return the paths of the parameters that a tensor becomes, or is a part of; ValueError if there are none."""
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
            raise ValueError(f"{meta.file}: tensor {name} is unknown in architecture {meta.architecture}")
        places = (place,) if isinstance(place, str) else place
        return [before + p + ("" if rest in table else f".{suffix}") for p in places]

    def _of_head(self) -> dict[str, Any]:
        inside = {n: (p,) if isinstance(p, str) else p for n, p in self.block.items()}
        block = {n: tuple(f"block.{p}" for p in paths) for n, paths in inside.items()}
        return {**block, **self.in_head, **self.head}

    def _made(self, meta: Meta, path: str, names: list[str]) -> TensorOrigin:
        """Return a parameter's tensors, in the order in which they are joined, and their change.

        names: of these tensors in any order; the list is sorted in place.
        """
        order = list(self.block)
        rests = {name: BLOCK.fullmatch(name) for name in names}
        names.sort(key=lambda n: _rank(order, rests[n]))
        shapes = [meta.shapes[name] for name in names]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        match = rests[names[0]]
        place = self.block.get(match[2].rpartition(".")[0]) or self.block.get(match[2]) if match else None
        if isinstance(place, tuple) and len(shape) == 3:
            parts = [f".{p}." in f".{path}." for p in place]
            return TensorOrigin(tuple(names), part_of_rows(shape, parts.index(True), len(place)))
        return TensorOrigin(tuple(names), self.changes(meta, path, shape))


def _rank(order: list[str], match: re.Match | None) -> int:
    """Return the key by which tensors that are joined are sorted: the index of a tensor's name in `order`.

    order: the names in `Family.block`; their number for other tensors. match: of BLOCK, None outside blocks.
    """
    stem = match[2].rpartition(".")[0] if match else ""
    return order.index(stem) if stem in order else len(order)


def ends(inside: str, head: str, **others: str) -> dict[str, str]:
    """Return, by GGUF name, the paths of the embedding and last norm after the prefix `inside`, and of the LM head.

    others: further tensors, with their paths after the prefix. head: the LM head's whole path.
    """
    return {**{name: f"{inside}{path}" for name, path in (ENDS | others).items()}, "output": head}


def part_of_rows(shape: tuple[int, ...], part: int, parts: int) -> TensorChange:
    """Return the change that takes part number `part` of the `parts` equal parts of each expert's rows.

    shape: of the whole tensor, (experts, rows of all parts, columns).
    """
    experts, rows, columns = shape
    order = np.arange(experts * rows).reshape(experts, parts, -1)[:, part].reshape(-1)
    return TensorChange(rows=order, shape=(experts, rows // parts, columns))
