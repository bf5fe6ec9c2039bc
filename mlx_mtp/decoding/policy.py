"""Choose who decides what the cycles of a generation draft, and whether they are replayed."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..machine.remembered import digest
from ..tuning.controller import Controller
from ..tuning.cost_file import RememberedCosts
from ..tuning.costs import Costs
from ..tuning.plan import Fixed, Plan
from ..tuning.replay_choice import CompileChoice
from .drafters import drafter_of
from .replay import Compiled, Recorder
from .sampling import Picker

LOOKUP_DRAFTS = 15  # with the newest token 16 rows: more neither kernels nor rings take (kernels/README.md)


def lookup_drafts(cache: PromptCache, k: int, *, plain: bool, adaptive: bool, asked: bool | None) -> int:
    """Choose the most drafts of prompt lookup, 0 for none. plain: nothing may be drafted; asked: None leaves it open.

    Raises ValueError where it is asked for and nothing can be drafted.
    """
    if asked and (plain or cache.is_mlx_lm):
        why = "num_draft_tokens=0, which is plain decoding" if plain else "a family that has no port"
        raise ValueError(f"prompt_lookup=True: not with {why}; allowed is False")
    return LOOKUP_DRAFTS if asked or (asked is None and adaptive and k) else 0


class Learned:
    """The costs known of a model's cycles on this machine, of built and of replayed ones."""

    def __init__(self, kernels: tuple[str, ...], built: RememberedCosts, replayed: RememberedCosts):
        self.kernels = kernels  # the report's lines; others have other costs
        self.remembered = {False: built, True: replayed}
        self.costs: dict[bool, Costs | None] = {}
        self.together: dict[int, Costs] = {}  # of cycles of so many texts
        self.together_replayed: dict[int, Costs] = {}

    def recall(self, *, replayed: bool) -> Costs | None:
        """Recall what earlier generations measured, here or in another process."""
        if replayed not in self.costs:
            self.costs[replayed] = self.remembered[replayed].recall()
        return self.costs[replayed]


def shapes_of(model: Target) -> str:
    """Return a fingerprint of the names and shapes of a model's parameters."""
    arrays: Any = tree_flatten(model.parameters())
    return digest(f"{name} {array.shape}" for name, array in arrays)


def kernels_of(model: Target) -> tuple[str, ...]:
    """Return the report's lines of the kernels that are on; () without a report."""
    return model.runtime.report.kernels if model.runtime.report else ()


def learned(model: Target) -> Learned:
    """Return the costs known of a model with its kernels, found once: a fingerprint takes as long as some cycles."""
    runtime, lines = model.runtime, kernels_of(model)
    if runtime.learned is None or runtime.learned.kernels != lines:
        shapes, kernels = shapes_of(model), "; ".join(lines)
        built, replayed = (RememberedCosts(shapes, k) for k in (kernels, f"{kernels}; replayed cycles"))
        runtime.learned = Learned(lines, built, replayed)
    return runtime.learned


def control_for(
    model: Target, k: int, max_lookup: int, *, adaptive: bool, p_min: bool, compiled: Compiled | None = None
) -> Controller | Fixed:
    """Make the control of a generation with at most k drafts of the heads, or max_lookup of the text's, a cycle."""
    if adaptive and (k or max_lookup):
        known = learned(model).recall(replayed=_replayed(compiled))
        return Controller(max_drafts=k, max_lookup=max_lookup, p_min=p_min, known=known, source=source_of(model))
    return Fixed(k, max_lookup=max_lookup, p_min=p_min, source=source_of(model))


def source_of(model: Target) -> str:
    """Name what drafts for a model, as plans do."""
    drafter = drafter_of(model)
    return drafter.source if drafter else Plan().source


def _replayed(compiled: Compiled | None) -> bool:
    """Tell whether cycles are replayed from the first on."""
    return compiled is not None and bool(compiled.choice.verdict) and not compiled.choice.tried


def compiled_for(model: Target, cache: PromptCache, picker: Picker, asked: bool | None) -> Compiled | None:
    """Make what replays a generation's cycles; None where they run a caller's code or mlx-lm's caches, or it may not.

    asked: None means on a GPU, unless a replay trial has found building quicker on this machine with this model.
    """
    foreign = picker.sampler or picker.processors or cache.is_mlx_lm
    if foreign or asked is False or (asked is None and mx.default_device() == mx.cpu):
        return None
    ranks, runtime = model.ranks, model.runtime
    asked = asked or (True if ranks else None)  # ranks replay alike, without a trial
    if runtime.recorder is None:
        runtime.recorder = Recorder()
        runtime.recorder.verdict = learned(model).remembered[False].recall_compiled()
    recorder = runtime.recorder
    if asked is None and recorder.verdict is False:
        return None
    recorder.fit(model)
    return Compiled(recorder, CompileChoice(asked or recorder.verdict))


def remember(model: Target, control: Controller | Fixed, compiled: Compiled | None = None) -> None:
    """Keep what a generation measured for the next ones."""
    if model.ranks and model.ranks.rank:
        return  # rank 0 has decided, and keeps what it measured
    known, kept = learned(model), set()
    if isinstance(control, Controller) and control.costs.pace is not None:
        kept.add(replayed := _replayed(compiled))
        known.costs[replayed] = control.costs
    if compiled is not None and compiled.found():
        kept.add(False)  # it is the file of built cycles that says whether replaying is faster
    recorder = model.runtime.recorder
    faster = recorder.verdict if recorder else known.remembered[False].recall_compiled()
    for replayed in kept:
        known.remembered[replayed].keep(known.recall(replayed=replayed), faster)
