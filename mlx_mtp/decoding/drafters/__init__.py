"""Find what drafts for a model: a kind is a file beside these."""

from ...layers.target import Target
from .drafter import Drafter
from .heads import Heads
from .lookup import Lookup

KINDS = (Heads.of,)  # asked in this order about a model that was given no drafter


def drafter_of(model: Target) -> Drafter | None:
    """Return what drafts for a model: `model.drafter` where it is set, else the first of KINDS; None for nothing."""
    return getattr(model, "drafter", None) or next((d for kind in KINDS if (d := kind(model))), None)


def drafters_of(model: Target, max_lookup: int) -> dict[str, Drafter]:
    """Return by name who may draft for a model: its own drafter, and with `max_lookup` drafts the text's past."""
    own, lookup = drafter_of(model), Lookup(max_lookup) if max_lookup else None
    return {drafter.source: drafter for drafter in (own, lookup) if drafter}
