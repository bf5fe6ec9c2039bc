"""Find what an adapter changed in a model, and combine the changes of several adapters."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from ..layers.adapters import AdaptedPart, Adapter

ADDED = (LoRALinear, LoRASwitchLinear, LoRAEmbedding)  # layers that add to the output of the layer inside them


def slots(node: Any, path: str = "") -> Iterator[AdaptedPart]:
    """Yield all modules and arrays in a module, a list or a dict, unchanged. path: the node's and a dot, or ""."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, (mx.array, nn.Module)):
            yield AdaptedPart(f"{path}{key}", node, key, value, value)
        if isinstance(value, (dict, list)):
            yield from slots(value, f"{path}{key}.")


def changes(before: list[AdaptedPart]) -> list[AdaptedPart]:
    """Return those of the parts, which `slots` yielded before, whose module or array is now another one."""
    return [p._replace(after=p.parent[p.key]) for p in before if p.parent[p.key] is not p.before]


def combined(adapters: Sequence[Adapter]) -> list[AdaptedPart]:
    """Return the sum of adapters: one part for each place in the model that any of them changes.

    LoRA layers of one module are put around each other, which changes these layers. ValueError if two adapters have
    DoRA or whole weights for one module.
    """
    for one, other in combinations(adapters, 2):
        if both := _replaced(one) & _replaced(other):
            why = f"both have DoRA or whole weights for {min(both)}, which cannot be added; give one of them"
            raise ValueError(f"adapter_path={one.name} and {other.name}: {why}")
    parts = [part for adapter in adapters for part in adapter.parts]
    found: dict[tuple[int, Any], AdaptedPart] = {}
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
