"""Find what an adapter changed in a model, and combine the changes of several adapters."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from ..layers.adapters import Adapter, Part

ADDED = (LoRALinear, LoRASwitchLinear, LoRAEmbedding)  # layers that add to the output of the layer inside them


class Slot(NamedTuple):
    """A place in a model, as in `Part`, and the module or array there."""

    path: str
    parent: Any
    key: Any
    value: Any


def slots(node: Any, path: str = "") -> Iterator[Slot]:
    """Yield the places of all modules and arrays in a module, a list or a dict. path: the node's and a dot, or ""."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, (mx.array, nn.Module)):
            yield Slot(f"{path}{key}", node, key, value)
        if isinstance(value, (dict, list)):
            yield from slots(value, f"{path}{key}.")


def changes(before: list[Slot]) -> list[Part]:
    """Return the parts whose modules or arrays are no longer those of the slots, which were listed before."""
    return [Part(*slot, slot.parent[slot.key]) for slot in before if slot.parent[slot.key] is not slot.value]


def combined(adapters: Sequence[Adapter]) -> list[Part]:
    """Return the sum of adapters: one part for each place in the model that any of them changes.

    LoRA layers of one module are put around each other, which changes these layers. ValueError if two adapters have
    DoRA or whole weights for one module.
    """
    for one, other in combinations(adapters, 2):
        if both := _replaced(one) & _replaced(other):
            why = f"both have DoRA or whole weights for {min(both)}, which cannot be added; give one of them"
            raise ValueError(f"adapter_path={one.name} and {other.name}: {why}")
    parts = [part for adapter in adapters for part in adapter.parts]
    found: dict[tuple[int, Any], Part] = {}
    for part in sorted(parts, key=lambda part: isinstance(part.after, ADDED)):  # what replaces a layer is inside
        place = id(part.parent), part.key
        if place in found:
            part.after["embedding" if "embedding" in part.after else "linear"] = found[place].after
        found[place] = part
    return list(found.values())


def _replaced(adapter: Adapter) -> set[str]:
    """Return the paths of the modules whose output an adapter does not only add to."""
    paths = (
        part.path.rpartition(".")[0] if isinstance(part.after, mx.array) else part.path for part in adapter.parts
    )
    return {path for path, part in zip(paths, adapter.parts, strict=True) if not isinstance(part.after, ADDED)}
