"""Describe draft acceptance and pauses in words, for commands, tables, pages and logs."""

from collections.abc import Iterable, Sequence
from typing import Any

Shares = Sequence[float | None]  # accepted of drafted, by depth; None at depths that were not drafted


def shares(drafted: Iterable[float], accepted: Iterable[float]) -> list[float | None]:
    """Return the accepted share of drafts at each depth; None for depths without drafts."""
    return [a / d if d else None for a, d in zip(accepted, drafted, strict=True)]


def percentages(found: Shares, *, decimals: int = 0, separator: str = " / ", missing: str = "not drafted") -> str:
    """Return shares as "92% / 80% / not drafted"; if all are None "none (nothing drafted)", "" for no shares.

    missing: the text for None.
    """
    if found and all(share is None for share in found):
        return "none (nothing drafted)"
    return separator.join(missing if share is None else f"{share:.{decimals}%}" for share in found)


def kept_of_trees(counts: Any) -> str:
    """Return the numbers of a `Stats` about draft trees in words; there must be a tree."""
    tokens = 1 + counts.tree_accepted / counts.trees
    return f"{counts.tree_accepted} of {counts.tree_drafted} drafts of trees, {tokens:.2f} tokens per tree"


def paused(reason: str) -> str:
    """Return the line that states why drafting is paused, given a `Stats.paused`; "" if it is not."""
    return f"drafting paused: {reason}" if reason else ""
