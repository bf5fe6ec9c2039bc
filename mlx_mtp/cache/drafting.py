"""Return what a prompt cache requires of the model's drafter (`decoding/drafters/drafter.py`)."""

from typing import Any

import mlx.core as mx


def chained_caches(model: Any, caches: int) -> int:
    """Return the number of chained caches, which come first, among a drafter's `caches` caches (`Drafter.chained`).

    For MTP heads, and for a model without a drafter object, it is `caches`.
    """
    return min(caches, getattr(getattr(model, "drafter", None), "chained", caches))


def starts_of(model: Any, caches: int) -> list[int]:
    """Return the first position of each of a drafter's `caches` caches: 0, 1, 2 ... for chained ones, else 0."""
    chained = chained_caches(model, caches)
    return [depth if depth < chained else 0 for depth in range(caches)]


def reads_hidden(model: Any) -> bool:
    """Return whether the model's drafter reads the target's hidden rows (`Drafter.reads_hidden`), as MTP heads do.

    Also True for a model without a drafter object.
    """
    return getattr(getattr(model, "drafter", None), "reads_hidden", True)


def no_kept(model: Any, heads: int) -> list[mx.array]:
    """Return `PromptCache.kept` before the first row; [] without heads. heads: number of the drafter's caches.

    With chained caches one row of zeros [1, 1, H] per such cache but the last; else the drafter's `no_kept`.
    """
    if chained := chained_caches(model, heads):
        return [model.no_hidden() for _ in range(chained - 1)]
    return [*model.drafter.no_kept] if heads else []


def pending(model: Any, hidden: mx.array) -> mx.array:
    """Return what is stored of hidden rows [1, r, H] until the model's drafter reads them (`Drafter.pending`).

    For MTP heads, and for a model without a drafter object, it is the rows themselves.
    """
    drafter = getattr(model, "drafter", None)
    return drafter.pending(hidden) if drafter else hidden


def drafting_parts(model: Any) -> list[Any]:
    """Return the modules whose `NO_KV_BITS` and `head_dim` describe the drafter's keys and values.

    The drafter's networks; the drafter itself if it has neither `nets` nor `net`; without a drafter the first MTP
    head, or the model itself if it has none.
    """
    drafter = getattr(model, "drafter", None)
    if drafter is None:
        return [model.mtp[0] if model.mtp else model]
    return [*getattr(drafter, "nets", (getattr(drafter, "net", drafter),))]
