"""Answer for a prompt cache what the drafter whose caches it holds needs (`decoding/drafters/drafter.py`)."""

from typing import Any

import mlx.core as mx


def is_chained(model: Any) -> bool:
    """Return whether the model's drafter has heads that read each other's outputs (`Drafter.chained`)."""
    return getattr(getattr(model, "drafter", None), "chained", True)


def reads_hidden(model: Any) -> bool:
    """Return whether the model's drafter reads hidden rows (`Drafter.reads_hidden`)."""
    return getattr(getattr(model, "drafter", None), "reads_hidden", True)


def no_kept(model: Any, heads: int) -> list[mx.array]:
    """Return `kept` of a cache with so many caches of a drafter, before the first row."""
    if is_chained(model):
        return [model.no_hidden() for _ in range(heads - 1)]
    return [*model.drafter.no_kept] if heads else []


def pending(model: Any, hidden: mx.array) -> mx.array:
    """Return what of hidden rows waits for the model's drafter (`Drafter.pending`)."""
    drafter = getattr(model, "drafter", None)
    return drafter.pending(hidden) if drafter else hidden
