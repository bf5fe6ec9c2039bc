"""Find the drafters of a model; each kind is a file in this directory."""

from ...layers.target import Target
from ...tuning.plan import NAMES, Role
from .drafter import Drafter
from .forced import Forced
from .heads import Heads
from .lookup import Lookup

GRAMMAR_DRAFTS = 15  # maximum: rings take 16 rows
KINDS = (Heads.of,)  # tried in this order for a model without a drafter of its own


def drafter_of(model: Target) -> Drafter | None:
    """Return a model's drafter: `model.drafter` if set, else its MTP heads as `Heads`, else None."""
    return getattr(model, "drafter", None) or next((d for kind in KINDS if (d := kind(model))), None)


def names_of(model: Target) -> dict[Role, str]:
    """Return the names in plans of the model's drafter, or of `NAMES` without one, of `Lookup` and of `Forced`.

    ValueError for a drafter of the model with another role than MODEL.
    """
    own = drafter_of(model)
    if own is not None and own.role is not Role.MODEL:
        raise ValueError(f"drafter {own.source!r}: its role is {own.role.name}; allowed is MODEL")
    return {**NAMES, **{drafter.role: drafter.source for drafter in (own, Lookup, Forced) if drafter}}


def drafters_of(model: Target, max_lookup: int) -> dict[str, Drafter]:
    """Return drafters by their names in plans: the model's, if any, under each of its names; then prompt lookup.

    Prompt lookup only if `max_lookup` is not 0. The last one is always `Forced`, for a grammar's drafts.
    """
    own, lookup = drafter_of(model), Lookup(max_lookup) if max_lookup else None
    every = [drafter for drafter in (own, lookup, Forced(GRAMMAR_DRAFTS)) if drafter]
    return {source: drafter for drafter in every for source in (drafter.source, *drafter.others)}
