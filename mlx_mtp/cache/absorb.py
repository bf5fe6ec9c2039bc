"""Let a drafter read pending rows while it does not draft, where it can (`Drafter.absorbs`)."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .drafting import reads_hidden
from .layer_cache import CacheKind

AT_FIRST = 24  # rows that heads with windows read before they draft; more take time for hardly better drafts
MOST_UNREAD = 64  # maximum pending rows of an absorbing drafter, which reads them in one product


def is_absorbing(model: Any) -> bool:
    """Return whether the model's drafter reads pending rows while it does not draft."""
    return getattr(getattr(model, "drafter", None), "absorbs", False)


def reach_of(model: Any, windows: Sequence[CacheKind]) -> int | None:
    """Return the number of last rows that heads read after a pause: the sum of their windows, at most AT_FIRST.

    0 without heads. None if it is not limited: if a head has no window, or the drafter absorbs rows or reads tokens
    only.
    """
    return None if is_absorbing(model) or not reads_hidden(model) else window_reach(windows)


def window_reach(windows: Sequence[CacheKind]) -> int | None:
    """Return the sum of windows, at most AT_FIRST; None if one of them is not a window of positions."""
    if not all(isinstance(window, int) for window in windows):
        return None
    return min(AT_FIRST, sum(window for window in windows if isinstance(window, int)))


def most_unread(cache: Any) -> int | None:
    """Return the maximum number of pending rows that a prompt cache needs; None if it needs all rows of a pause.

    The cache stores a few rows more before an absorbing drafter reads them, or before the oldest are dropped.
    """
    return MOST_UNREAD if is_absorbing(cache.model) else cache.reach


def absorb(cache: Any, tokens: Any) -> bool:
    """Let an absorbing drafter read the pending rows of a prompt cache but the newest, if more than MOST_UNREAD.

    Returns whether it did: never while the drafter follows the target, nor for other drafters. No later rollback may
    be to the position of one of these rows or an earlier one, nor to an older mark. tokens: of the sequence, at least
    up to that of the newest row.
    """
    pending = sum(rows.shape[1] for rows in cache.backlog)
    if pending <= MOST_UNREAD or cache.live or not is_absorbing(cache.model):
        return False
    end = cache.primed + pending - 1
    cache.model.drafter.read(cache.model, cache, tokens, cache.primed, end, step=end)
    return True


def push_read(cache: Any, hidden: mx.array, tokens: Any) -> None:
    """Append hidden rows to a prompt cache's backlog, then call `absorb`; the rows must not be rolled back later.

    tokens: as in `absorb`.
    """
    cache.push(hidden)
    absorb(cache, tokens)
