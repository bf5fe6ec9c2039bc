"""Who decides what the cycles of a generation draft: a controller that knows this machine, or nobody."""

from typing import Any

from .controller import Controller, Fixed
from .cost_memory import CostMemory
from .costs import Costs
from .plain_cache import PlainCache
from .prompt_cache import PromptCache, identity

LOOKUP_DRAFTS = 7  # with the token before them the most rows that have the bits of one (kernels/README.md)


def lookup_drafts(cache: PromptCache, k: int, *, plain: bool, adaptive: bool, asked: bool | None) -> int:
    """The most drafts of prompt lookup, 0 for none; `plain`: nothing may be drafted, `asked`: None leaves it to us.

    Raises ValueError where it is asked for and nothing can be drafted.
    """
    steps_back = not any(isinstance(c, PlainCache) for c in cache.layers)
    if asked and (plain or not steps_back):
        why = "num_draft_tokens=0, which is plain decoding" if plain else "a family that has no port"
        raise ValueError(f"prompt_lookup=True: not with {why}; allowed is False")
    return LOOKUP_DRAFTS if asked or (asked is None and adaptive and k) else 0


def control_for(model: Any, k: int, max_lookup: int, *, adaptive: bool, p_min: bool) -> Controller | Fixed:
    """The control of a generation with at most k drafts of the heads, or max_lookup of the text's, in a cycle."""
    if adaptive and (k or max_lookup):
        return Controller(max_drafts=k, max_lookup=max_lookup, p_min=p_min, known=known_costs(model))
    return Fixed(k, max_lookup=max_lookup, p_min=p_min)


def known_costs(model: Any) -> Costs | None:
    """What earlier generations with this model measured, here or in another process."""
    if not hasattr(model, "_costs"):
        model._costs = _memory(model).recall()
    return model._costs


def remember(model: Any, control: Controller | Fixed) -> None:
    """Keep what a generation measured for the next ones."""
    if isinstance(control, Controller) and control.costs.measured:
        model._costs = control.costs
        _memory(model).keep(control.costs)


def _memory(model: Any) -> CostMemory:
    report = model.report() if hasattr(model, "report") else None
    return CostMemory(identity(model, heads=True), "; ".join(report.kernels if report else ()))
