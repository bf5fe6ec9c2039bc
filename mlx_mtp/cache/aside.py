"""Set the first caches of a drafter aside while the others draft; they later read the rows of many cycles at once.

Rows wait in the backlog as in a pause, from which the whole drafter reads them: rows that the other caches have
already are overwritten by equal ones.
"""

from typing import Any

from .absorb import MOST_UNREAD


def set_aside(cache: Any, count: int, base: int) -> None:
    """Take the drafter's first `count` caches, which have read all positions before `base`, out of the step.

    `kept` is put aside with them, and `primed` becomes `base`. Nothing happens if caches are aside already, or for a
    count of 0.
    """
    if count and not cache.aside:
        first, cache.heads = cache.heads[:count], cache.heads[count:]
        cache.aside, cache.kept, cache.primed = (first, cache.kept), [], base


def reunite(cache: Any) -> None:
    """Put the caches that are aside back before the drafter's others, and restore their `kept`.

    All of the drafter's caches then have to read the backlog. Nothing happens if no caches are aside.
    """
    if cache.aside:
        first, cache.kept = cache.aside
        cache.heads, cache.aside = [*first, *cache.heads], None


def end_aside(cache: Any, base: int, spare: int) -> None:
    """Pause the drafter if caches are aside and the plan needs them, or more than MOST_UNREAD rows wait for them.

    base: argument of `PromptCache.pause_heads`. spare: number of first caches that the plan does not need; 0, which
    always pauses, also for a plan without drafts.
    """
    if cache.aside and (not spare or cache.pending_rows > MOST_UNREAD):
        cache.pause_heads(base)
