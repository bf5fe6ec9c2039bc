"""Name a parameter as its checkpoint does: where it came from, or where it should have been."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .sort_tensors import NUMBER, Contents, layerless, only


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
