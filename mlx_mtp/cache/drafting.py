"""Return what a prompt cache requires of the model's drafter (`decoding/drafters/drafter.py`)."""

from typing import Any

import mlx.core as mx


def is_chained(model: Any) -> bool:
    """Return whether the model's drafter has heads that read each other's outputs (`Drafter.chained`).

    MTP heads, and a model without a drafter object, count as chained.
    """
    return getattr(getattr(model, "drafter", None), "chained", True)


def reads_hidden(model: Any) -> bool:
    """Return whether the model's drafter reads the target's hidden rows (`Drafter.reads_hidden`), as MTP heads do.

    Also True for a model without a drafter object.
    """
    return getattr(getattr(model, "drafter", None), "reads_hidden", True)


def no_kept(model: Any, heads: int) -> list[mx.array]:
    """Return `PromptCache.kept` before the first row; [] without heads. heads: number of the drafter's caches.

    Chained: one row of zeros [1, 1, H] per cache but the last; else the drafter's `no_kept`.
    """
    if is_chained(model):
        return [model.no_hidden() for _ in range(heads - 1)]
    return [*model.drafter.no_kept] if heads else []


def pending(model: Any, hidden: mx.array) -> mx.array:
    """Return what is stored of hidden rows [1, r, H] until the model's drafter reads them (`Drafter.pending`).

    That of MTP heads is the rows themselves.
    """
    drafter = getattr(model, "drafter", None)
    return drafter.pending(hidden) if drafter else hidden


def drafting_part(model: Any) -> Any:
    """Return the module whose `NO_KV_BITS` and `head_dim` describe the drafter's keys and values.

    The drafter's network; the drafter itself if it has no `net`; without a drafter the first MTP head, or the model
    itself if it has none.
    """
    drafter = getattr(model, "drafter", None)
    return getattr(drafter, "net", drafter) or (model.mtp[0] if model.mtp else model)
