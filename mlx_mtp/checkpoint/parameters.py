"""Look at a model's parameters: what is in them, and which tensor each came from, or should have come from."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .sort_tensors import NUMBER, Contents, layerless, only


def named(module: nn.Module) -> dict[str, Any]:
    """Return a module's arrays by their paths, such as "mtp.0.norm.weight"."""
    return dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tell whether two modules' `named` arrays are the same, value for value."""
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]) for name in a)


def check_numbers(parameters: dict[str, Any], place: Callable[[str], tuple[Any, str]]) -> None:
    """Raise for a parameter that holds NaN, or a head's of nothing but zeros; `place` is its file and name there."""
    for name, array in parameters.items():
        if mx.issubdtype(array.dtype, mx.floating):
            state = "NaN" if mx.isnan(array).any() else "only zeros"
            if state == "NaN" or (name.startswith("mtp.") and not name.endswith(".biases") and not array.any()):
                file, raw = place(name)
                raise ValueError(f"{file}: tensor {raw} holds {state}, expected trained weights")


def origin(model: Any, contents: Contents, name: str) -> tuple[str, str]:
    """Find the file and the name in it of the tensor that became parameter `name`."""
    stored = contents.trunk | contents.heads
    for raw, tensor in stored.items():
        if name in model.renamed(raw):
            return str(tensor.file), raw
    return str(stored[name].file) if name in stored else "checkpoint", name


def expected(model: Any, contents: Contents, path: Path, names: Iterable[str]) -> list[tuple[str, str]]:
    """Tell where parameters should have been, and their names there, judging by the same tensors of other layers."""
    alike: dict[str, tuple[str, str, str]] = {}
    for part in (contents.heads, contents.trunk):
        file = only({t.file for t in part.values()}, path)
        for raw in part:
            for known in model.renamed(raw):
                alike.setdefault(layerless(known), (file, raw, known))
    return [
        _of_layer(name, *alike[layerless(name)])
        if layerless(name) in alike
        else _by_name(model, contents, path, name)
        for name in names
    ]


def _of_layer(name: str, file: str, raw: str, known: str) -> tuple[str, str]:
    """Name a parameter as another layer's tensor `raw`, with the number that `name` has where `known` has its own."""
    if not (here := NUMBER.search(name)):
        return file, raw
    there, stored = (NUMBER.search(n) for n in (known, raw))
    layer = int(stored[1]) - int(there[1]) + int(here[1])  # type: ignore[index]
    return file, NUMBER.sub(f".{layer}.", raw, count=1)


def _by_name(model: Any, contents: Contents, path: Path, name: str) -> tuple[str, str]:
    """Name a parameter that no other layer has, by the family's own names."""
    name = model.unrenamed(name).replace(".switch_mlp.", ".experts.*.")
    if not name.startswith("mtp."):
        prefix = next((n.partition("layers.")[0] for n in contents.trunk if "layers." in n), "")
        tail = name.partition("layers.")[2]
        return only({t.file for t in contents.trunk.values()}, path), f"{prefix}layers.{tail}" if tail else name
    _, depth, inside = name.split(".", 2)
    prefix = model.spec.before(next(iter(contents.heads), None), int(depth), model.args.num_hidden_layers)
    return only({t.file for t in contents.heads.values()}, path), f"{prefix}{model.spec.stored(inside)}"
