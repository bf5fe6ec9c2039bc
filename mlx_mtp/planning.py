"""Who decides what the cycles of a generation draft, a controller that knows this machine or nobody, and whether they
are compiled.
"""

from typing import Any

import mlx.core as mx

from .compile_choice import CompileChoice
from .compiled import Compiled, Recorder
from .controller import Controller, Fixed
from .cost_memory import CostMemory
from .costs import Costs
from .plain_cache import PlainCache
from .prompt_cache import PromptCache, identity
from .sampling import Picker

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


def compiled_for(model: Any, cache: PromptCache, picker: Picker, asked: bool | None) -> Compiled | None:
    """What replays a generation's cycles; None where it may not, or they run a caller's code or mlx-lm's own caches.

    asked: None leaves it to a trial on a GPU, and to what one has found on this machine with this model.
    """
    foreign = picker.sampler or picker.processors or any(isinstance(c, PlainCache) for c in cache.layers)
    if foreign or asked is False or (asked is None and mx.default_device() == mx.cpu):
        return None
    if not hasattr(model, "_recorder"):
        model._recorder = Recorder()
        model._recorder.verdict = _memory(model).recall_compiled()
    recorder = model._recorder
    if asked is None and recorder.verdict is False:
        return None
    recorder.fit(model)
    return Compiled(recorder, CompileChoice(asked or recorder.verdict))


def remember(model: Any, control: Controller | Fixed, compiled: Compiled | None = None) -> None:
    """Keep what a generation measured for the next ones."""
    found = compiled is not None and compiled.found()
    if isinstance(control, Controller) and any(control.costs.seen):
        control.costs.confirm()
        model._costs, found = control.costs, True
    if found:
        recorder = getattr(model, "_recorder", None)
        _memory(model).keep(known_costs(model), recorder.verdict if recorder else _memory(model).recall_compiled())


def _memory(model: Any) -> CostMemory:
    """Made once for a model: to name its parameters takes as long as some cycles."""
    if not hasattr(model, "_cost_memory"):
        report = model.report() if hasattr(model, "report") else None
        model._cost_memory = CostMemory(identity(model, heads=True), "; ".join(report.kernels if report else ()))
    return model._cost_memory
