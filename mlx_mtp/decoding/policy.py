"""Create a generation's control of draft lengths and its replay of recorded cycles, and store measured costs."""

import mlx.core as mx

from ..cache.arrays import StateCache, rereads
from ..cache.convolution import ConvolutionCache
from ..cache.prompt_cache import PromptCache
from ..cache.ring import MAX_ROWS
from ..grammar import Matcher
from ..layers.experts import expert_counts
from ..layers.made import Made
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.cost_file import RememberedCosts, shapes_of
from ..tuning.costs import Costs, Growth, dense, mixture
from ..tuning.lane import LANE_LINE
from ..tuning.plan import Fixed
from ..tuning.replay_choice import CompileChoice
from .drafters import GRAMMAR_DRAFTS, drafter_of, drafters_of, names_of
from .replay import Compiled, Recorder
from .sampling import Picker

LOOKUP_DRAFTS = MAX_ROWS - 1  # maximum: a verify has the newest token as well


def lookup_drafts(cache: PromptCache, k: int, *, plain: bool, adaptive: bool, asked: bool | None) -> int:
    """Return the maximum drafts of prompt lookup per cycle, 0 for none. k: the drafter's maximum.

    asked: prompt_lookup; None means with adaptive drafting and k above 0. Raises ValueError for True with plain
    decoding, or with mlx-lm's caches.
    """
    if asked and (plain or cache.is_mlx_lm):
        why = "num_draft_tokens=0, which is plain decoding" if plain else "a family that has no port"
        raise ValueError(f"prompt_lookup=True: not with {why}; allowed are False and None")
    return LOOKUP_DRAFTS if asked or (asked is None and adaptive and k) else 0


def forced_drafts(cache: PromptCache, *, plain: bool, asked: int | None) -> int:
    """Return the maximum drafts of a grammar per cycle, 0 for none. asked: grammar_drafts.

    None means GRAMMAR_DRAFTS, but 0 with plain decoding or mlx-lm's caches. Raises ValueError unless `asked` is None
    or an int from 0 to GRAMMAR_DRAFTS; mlx-lm's caches allow only 0.
    """
    most = 0 if cache.is_mlx_lm else GRAMMAR_DRAFTS
    if asked is None:
        return 0 if plain else most
    if type(asked) is not int or not 0 <= asked <= most:
        raise ValueError(f"grammar_drafts={asked}: allowed is 0 to {most}, or None")
    return asked


def tree_rows(cache: PromptCache, picker: Picker, k: int, *, grammar: bool, adaptive: bool, asked: int | None) -> int:
    """Return the maximum rows of a sequence's trees, 0 for none. k: the drafter's maximum. asked: the option `tree`.

    None means MAX_ROWS with adaptive drafting. There are none with a grammar or a caller's processors, whose rows
    must be those of one path, nor if no drafter has trees or the model cannot verify them.
    """
    if not k or grammar or picker.callers or cache.is_mlx_lm:
        return 0
    rows = asked if asked is not None else MAX_ROWS if adaptive else 0
    return rows if rows and tree_sources(cache.model) and not tree_reason(cache.model) else 0


def tree_reason(model: Target) -> str | None:
    """Return why a model cannot verify trees of drafts; None if it can."""
    kinds = {getattr(kind, "func", kind) for kind in model.windows()}
    if isinstance(model, Made) and model.form.no_trees:
        return model.form.no_trees
    if StateCache in kinds:
        return "it reads rows again after a rejected draft"
    return "its convolutions are mlx-lm's" if ConvolutionCache in kinds else None


def tree_sources(model: Target) -> frozenset[str]:
    """Return the names in plans of a model's drafters that can draft trees; prompt lookup is among the drafters."""
    drafters = drafters_of(model, LOOKUP_DRAFTS).items()
    return frozenset(source for source, drafter in drafters if drafter.trees)


class Learned:
    """The measured costs of a model's cycles on this machine, of built (key False) and of replayed cycles (True).

    kernels: `kernels_of`, a lane and the kernels that are on, because other kernels have other costs.
    growth: how the cost of a cycle grows with its drafts.
    together, together_replayed: the costs of built and replayed cycles of several sequences, by their number.
    """

    def __init__(self, kernels: tuple[str, ...], built: RememberedCosts, replayed: RememberedCosts, growth: Growth):
        self.kernels, self.growth = kernels, growth
        self.remembered = {False: built, True: replayed}
        self.costs: dict[bool, Costs | None] = {}
        self.together: dict[int, Costs] = {}
        self.together_replayed: dict[int, Costs] = {}

    def recall(self, *, replayed: bool) -> Costs | None:
        """Return the costs of replayed, or of built, cycles that earlier generations measured; None without any.

        These generations ran in this or another process.
        """
        if replayed not in self.costs:
            self.costs[replayed] = self.remembered[replayed].recall()
        return self.costs[replayed]


def kernels_of(model: Target) -> tuple[str, ...]:
    """Return the lane, and the report's lines of the kernels that are on, if there is a report."""
    lines = model.runtime.report.kernels if model.runtime.report else ()
    return model.runtime.lane_key, *(line for line in lines if not line.startswith(LANE_LINE))


def learned(model: Target) -> Learned:
    """Return the measured costs of a model's cycles with the kernels that are on now.

    After a change of kernels they are replaced by those that earlier generations stored for the new kernels, if any.
    """
    runtime, lines = model.runtime, kernels_of(model)
    if runtime.learned is None or runtime.learned.kernels != lines:
        shapes, kernels = shapes_of(model), "; ".join(lines)
        built, replayed = (RememberedCosts(shapes, k) for k in (kernels, f"{kernels}; replayed cycles"))
        counts = expert_counts(model.modules())
        growth = mixture(*counts) if counts and counts[0] > counts[1] else dense
        runtime.learned = Learned(lines, built, replayed, growth)
    return runtime.learned


def control_for(
    model: Target,
    k: int,
    max_lookup: int,
    *,
    adaptive: bool,
    p_min: bool,
    tree: int = 0,
    compiled: Compiled | None = None,
    matcher: Matcher | None = None,
) -> Controller | Fixed:
    """Return a generation's control: at most k drafts, or max_lookup of prompt lookup, and `runtime.rows`, per cycle.

    The control adapts the number to measured costs, which begin with those stored for built or replayed cycles. It is
    Fixed without `adaptive`, or if both maxima and that of the matcher's drafts are 0. p_min: whether draft_p_min is
    above 0. tree: maximum rows of trees, 0 for none. compiled: as of `compiled_for`.
    """
    k, max_lookup, nodes = (min(each, model.runtime.most_drafts()) for each in (k, max_lookup, max(0, tree - 1)))
    if adaptive and (k or max_lookup or (matcher and matcher.most)):
        costs = learned(model)
        known, others = costs.recall(replayed=_replayed(compiled)), others_of(model, k)
        how = {"names": names_of(model), "others": others, "growth": costs.growth, "masked": matcher is not None}
        how |= {"rereads": rereads(model), "trees": trees_of(model, nodes)}
        return Controller(max_drafts=k, max_lookup=max_lookup, p_min=p_min, known=known, **how)
    return Fixed(k, max_lookup=max_lookup, p_min=p_min, names=names_of(model), nodes=fixed_nodes(model, nodes))


def trees_of(model: Target, nodes: int) -> dict[str, int]:
    """Return the names of a model's drafters in plans, each with the maximum drafts of its trees, `nodes`.

    Without names of drafters that have no trees; {} for nodes = 0.
    """
    return dict.fromkeys(tree_sources(model), nodes) if nodes else {}


def fixed_nodes(model: Target, nodes: int) -> int:
    """Return the drafts of a tree in each cycle without adaptive drafting; 0 if the model's drafter has no trees."""
    drafter = drafter_of(model) if nodes else None
    return nodes if drafter and drafter.trees else 0


def others_of(model: Target, k: int) -> dict[str, int]:
    """Return the other names of a model's drafter in plans, each with its maximum of adaptive drafts, at most k.

    {} for a drafter with one name, or without a drafter.
    """
    drafter = drafter_of(model)
    return {name: min(k, most) for name, most in drafter.others.items()} if drafter else {}


def _replayed(compiled: Compiled | None) -> bool:
    """Return whether a generation's cycles are replayed from its first cycle on."""
    return compiled is not None and bool(compiled.choice.verdict) and not compiled.choice.tried


def compiled_for(model: Target, cache: PromptCache, picker: Picker, asked: bool | None) -> Compiled | None:
    """Return a generation's `Compiled`, its replay of recorded cycles; None if every cycle is to be built.

    Cycles that run a caller's code or mlx-lm's caches are always built. asked: the option `compile_cycles`; None
    means on a GPU, unless a replay trial found that building is faster with this model on this machine.
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
    """Store the costs and the replay verdict that a generation measured, for later ones; only on rank 0 if split.

    A Fixed control, or one without a measured plain step, has no costs to store; a verdict exists after a trial.
    """
    if model.ranks and model.ranks.rank:
        return  # rank 0 stores what it measured
    known, kept = learned(model), set()
    if isinstance(control, Controller) and control.costs.pace is not None:
        kept.add(replayed := _replayed(compiled))
        known.costs[replayed] = control.costs
    if compiled is not None and compiled.decided():
        kept.add(False)  # the file of built cycles also stores whether replaying is faster
    recorder = model.runtime.recorder
    faster = recorder.verdict if recorder else known.remembered[False].recall_compiled()
    for replayed in kept:
        known.remembered[replayed].keep(known.recall(replayed=replayed), faster)
