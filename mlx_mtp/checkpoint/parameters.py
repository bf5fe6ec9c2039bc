"""Look at a model's parameters: their names, whether two modules have the same, what no training leaves in them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


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
