"""Describe in words what drafting did, for all commands, tables, pages and logs."""

from collections.abc import Iterable, Sequence

Shares = Sequence[float | None]  # accepted of drafted, by depth; None at depths that were not drafted


def shares(drafted: Iterable[float], accepted: Iterable[float]) -> list[float | None]:
    """Return the share of drafts that were accepted at each depth, None where there were no drafts."""
    return [a / d if d else None for a, d in zip(accepted, drafted, strict=True)]


def percentages(found: Shares, *, decimals: int = 0, separator: str = " / ", missing: str = "not drafted") -> str:
    """Write shares as "92% / 80% / not drafted", or that nothing was drafted at any depth."""
    if found and all(share is None for share in found):
        return "none (nothing drafted)"
    return separator.join(missing if share is None else f"{share:.{decimals}%}" for share in found)


def paused(reason: str) -> str:
    """Write why drafting is paused, for the `paused` of a `Stats`; "" where it is not."""
    return f"drafting paused: {reason}" if reason else ""
