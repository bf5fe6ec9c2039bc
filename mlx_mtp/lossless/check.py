"""Check a loaded model: compare drafted with plain output, test its draws and its heads, and list the faults."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..cache.ring import MAX_ROWS
from ..checkpoint.head_self_test import MIN_AGREEMENT
from ..decoding.drafters import drafter_of
from ..decoding.drafters.block import Block
from ..decoding.drafters.heads_and_block import HeadsAndBlock
from ..decoding.drafters.small_model import SmallModel
from ..decoding.policy import fixed_nodes, tree_reason
from ..layers.target import Target
from ..pictures.rows import Picture
from .block import TRIED, block_alternatives, first_positions, right_block
from .compare import PLAIN, TREES, Comparison, Drift, Reference, Way, by_share, compare, compare_one_pass, drift, ways
from .heads import LONGEST, USUAL, Known, Rights, kept, right, shares, suspicions
from .prompts import NamedPrompt, built_in, pictured, source
from .rounding_judge import OnePass
from .sampled import Fit, draw, fit, spread
from .seeing import MISSES, PAIRS, seen
from .small_model import right_small
from .wirings import Better, alternatives, diagnose

Progress = Callable[[str, int, int], None]  # receives a stage, the items done and their number
P_MIN = 0.5
TEMP, SAMPLED_PROMPTS, SAMPLED_TOKENS = 0.8, 3, 32
FIT_TEMP, FIT_TOKENS, FIT_PROMPT = 1.0, 8, 256  # the last: maximum prompt tokens
MISSED = 0.95, 3  # the loop must accept at least this share of the correct predictions, minus this number


def with_progress(items: Sequence[Any], stage: str, progress: Progress) -> Iterator[Any]:
    """Yield the items; before each, call `progress(stage, number of items done, number of items)`.

    It is not called after the last item.
    """
    for i, item in enumerate(items):
        progress(stage, i, len(items))
        yield item


@dataclass(frozen=True)
class CheckSettings:
    """What to check. drafts: the drafter's maximum per cycle; with 0 only lookups draft.

    max_tokens: per output; shorter for sampled ones. draws: number of outputs whose distribution is tested. seed: the
    first one. adaptive, compiled (both only with drafts), lookup: also check drafting with these options. trees: of
    draft trees up to this number of rows, if the model has them. p_min: the
    `draft_p_min` that is checked, P_MIN for 0. diagnose: try other wirings of the heads or block drafter.
    """

    drafts: int
    max_tokens: int = 40
    draws: int = 24
    seed: int = 0
    adaptive: bool = True
    trees: int = MAX_ROWS
    p_min: float = P_MIN
    lookup: bool = True
    compiled: bool = False
    diagnose: bool = True

    @property
    def ways(self) -> list[Way]:
        kinds = {"adaptive": self.adaptive, "lookup": self.lookup, "compiled": self.compiled}
        return ways(self.drafts, p_min=self.p_min or P_MIN, trees=self.trees, **kinds)

    @property
    def most(self) -> Way:
        """The way of drafting that always drafts the maximum; only with `drafts` above 0."""
        return self.ways[self.drafts - 1]


@dataclass
class Verdict:
    """The result of a check.

    greedy: the one pass, then each way, compared with plain decoding. sampled: the same of ways that sample, with
        the plain output's seed.
    drift:     of the changes of a logprob by drafting, the greatest relative to its tolerance; None if not measured.
    fits:      tests of distributions.
    agreement: per depth, from the first, the share of positions whose prediction is the target's token; empty without
        a drafter; those of a block have blocks of the maximum.
    kept:      accepted drafts with one draft per head, or a block's maximum, and the number that `agreement`'s
        predictions would accept.
    seen:      per kind of opposite pictures, the number of pairs that the model sees and of all pairs; empty if that
        was not tested.
    better:    wirings of the heads or block drafter that predict more tokens correctly, best first.
    warnings:  suspicious findings that change no output; broken: faults.
    """

    dtype: str
    greedy: list[Comparison] = field(default_factory=list)
    sampled: list[Comparison] = field(default_factory=list)
    drift: Drift | None = None
    fits: list[Fit] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    kept: tuple[int, int] = 0, 0
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    better: list[Better] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> bool:
        """Whether a comparison, also of the one pass, found more than near-ties, or a test of draws is refused."""
        return any(c.diverged for c in (*self.greedy, *self.sampled)) or any(f.refused for f in self.fits)

    @property
    def pairs_seen(self) -> int:
        """Number of opposite pairs of pictures that the model sees."""
        return sum(right for right, _ in self.seen.values())

    @property
    def pairs(self) -> int:
        """Number of opposite pairs of pictures that were tested."""
        return sum(count for _, count in self.seen.values())


def verify(
    model: Target, tokenizer: Any, settings: CheckSettings, progress: Progress, pictures: Sequence[Picture] = ()
) -> Verdict:
    """Return the verdict on a model: drafted compared with plain output, tested draws, and its drafter.

    With `drafts` = 0 only lookups draft, and logprobs, sampled output and another drafter are not tested. Faults are
    listed in the verdict, not raised. progress: receives a stage, the items done and their number. pictures: also
    compare output after prompts of `pictured`; draws' distributions and the drafter are tested on text alone. If the
    model has a vision tower, it is also tested whether the model sees, with drawn pictures.
    """
    stops, shown = tuple(tokenizer.eos_token_ids), pictured(model, tokenizer, pictures)
    if tree_reason(model) or not fixed_nodes(model, settings.trees):
        settings = replace(settings, trees=0)
    prompts = shown + built_in(model, tokenizer, settings.max_tokens)
    texts = with_progress(prompts, "plain text", progress)
    references = [Reference(model, prompt, settings.max_tokens, stops) for prompt in texts]
    verdict = Verdict(str(references[0].one_pass.dtype).rpartition(".")[2])
    if model.vision is not None:
        _look(model, tokenizer, verdict, progress)
    verdict.greedy = _greedy(references, settings, progress)
    if settings.drafts:
        drifts = [drift(r, settings.most) for r in with_progress(references, "logits", progress)]
        verdict.drift = max(drifts, key=by_share)
        verdict.sampled = _sampled(model, prompts[: len(shown) + SAMPLED_PROMPTS], stops, settings, progress)
    references = references[len(shown) :]
    if settings.drafts:
        verdict.fits = _fits(model, references, settings, progress)
    references.sort(key=lambda r: len(r.one_pass.tokens))
    drafter, drafts = drafter_of(model), settings.drafts
    if model.mtp and not isinstance(drafter, HeadsAndBlock):
        texts = _known([*(r.one_pass for r in references), OnePass(model, source(tokenizer))])
        own = examine(model, texts, settings, verdict, progress)
        verdict.kept = _kept(references, own, verdict.greedy[: drafts + 1], len(model.mtp))
    elif isinstance(drafter, (Block, HeadsAndBlock)) and drafts:
        texts = _known([*(r.one_pass for r in references), OnePass(model, source(tokenizer))])
        masks = getattr(tokenizer, "added_tokens_decoder", ())
        own = examine_block(model, texts, settings, verdict, progress, masks=masks)
        verdict.kept = _kept(references, own, verdict.greedy[: drafts + 1], drafts)
    elif isinstance(drafter, SmallModel) and drafts:
        texts = with_progress(_known([r.one_pass for r in references]), "small model", progress)
        own = [right_small(drafter, text) for text in texts]
        verdict.agreement, verdict.kept = shares(own), _kept(references, own, verdict.greedy[:3], 1)
    conclude(model, verdict)
    return verdict


def _look(model: Target, tokenizer: Any, verdict: Verdict, progress: Progress) -> None:
    """Set `verdict.seen`; if a prompt with a picture cannot be read, add the reason to the warnings instead."""
    try:
        verdict.seen = seen(model, tokenizer, with_progress(PAIRS, "opposite pictures", progress))
    except ValueError as e:
        verdict.warnings.append(f"it was not tested whether the model sees: {e}")


def _greedy(references: list[Reference], settings: CheckSettings, progress: Progress) -> list[Comparison]:
    found = [Comparison("one pass")]
    for reference in with_progress(references, found[0].way, progress):
        compare_one_pass(reference, found[0])
    for way in settings.ways:
        found.append(Comparison(way.name))
        for reference in with_progress(references, way.name, progress):
            compare(reference, way, found[-1])
    return found


def _sampled(
    model: Target, prompts: list[NamedPrompt], stops: Sequence[int], settings: CheckSettings, progress: Progress
) -> list[Comparison]:
    """Return comparisons of sampled output with plain output of the same seeds, one for each way of sampling.

    In order: drafts drawn with the target's noise ("coupled"), greedy drafts, and, if they are checked, adaptive
    coupled drafts and the largest coupled trees.
    """
    plans = [(settings.most, "coupled"), (settings.most, "greedy")]
    plans += [
        (way, "coupled") for way in settings.ways if way.name == "adaptive" or way.options.get("tree") == TREES[-1]
    ]
    found = [Comparison(f"{way.name}, {mode}") for way, mode in plans]
    length = min(SAMPLED_TOKENS, settings.max_tokens)
    for seed, prompt in enumerate(with_progress(prompts, "sampled text", progress), settings.seed):
        reference = Reference(model, prompt, length, stops, PLAIN.sampled(TEMP, seed, "coupled"))
        for (way, mode), comparison in zip(plans, found, strict=True):
            compare(reference, way.sampled(TEMP, seed, mode), comparison)
    return found


def _fits(model: Target, references: list[Reference], settings: CheckSettings, progress: Progress) -> list[Fit]:
    """Return one test, in a list, of draws after the prompt whose distributions show most about the temperature.

    Only prompts of at most FIT_PROMPT tokens count. The draws use the drafter with the target's noise.
    """
    short = [r for r in references if len(r.prompt.tokens) <= FIT_PROMPT]
    prompt = max(short, key=_spread).prompt.tokens
    first, options = settings.seed + 1000, settings.most.options | {"temp": FIT_TEMP, "draft_sampling": "coupled"}
    seeds = with_progress(range(first, first + settings.draws), "distribution", progress)
    texts = draw(model, prompt, options, seeds=seeds, length=FIT_TOKENS)
    return [fit(model, prompt, with_progress(texts, "probabilities", progress), temp=FIT_TEMP, mode="coupled")]


def _spread(reference: Reference) -> float:
    places = range(len(reference.prompt.tokens), len(reference.one_pass.tokens))
    return sum(spread(reference.one_pass.logits(place), FIT_TEMP) for place in places[:FIT_TOKENS])


def examine(
    model: Target, texts: list[Known], settings: CheckSettings, verdict: Verdict, progress: Progress
) -> Rights:
    """Return `right` of each text, per text and depth: whether the heads' predictions are right, without drafting.

    A recycled head has a second depth if `drafts` is 2 or more. Shares, suspicions and (with `diagnose`) better
    wirings are added to `verdict`.
    """
    depths = max(len(model.mtp), min(settings.drafts, 2))
    own = [right(model, text, depths) for text in with_progress(texts, "heads", progress)]
    verdict.agreement = shares(own)
    verdict.warnings += suspicions(model, own)
    if settings.diagnose:
        verdict.better = diagnose(model, texts, own, alternatives(model), partial(progress, "other wirings"))
    return own


def examine_block(
    model: Target,
    texts: list[Known],
    settings: CheckSettings,
    verdict: Verdict,
    progress: Progress,
    masks: Iterable[int],
) -> Rights:
    """Return `right_block` of each text, and add to `verdict` as `examine` does; blocks have `drafts` drafts.

    masks: tokens that may be the mask token. Later drafts of a block are right less often by nature.
    """
    own = [right_block(model, text, settings.drafts) for text in with_progress(texts, "drafter", progress)]
    verdict.agreement = shares(own)
    if (share := verdict.agreement[0]) < USUAL:
        verdict.warnings.append(f"the first draft is right in {share:.0%} of cases; released drafters are in 60-97%")
    if settings.diagnose:
        starts = [first_positions(text, settings.drafts) for text in texts]
        known = [[rows[: TRIED + settings.drafts - 1 - j] for j, rows in enumerate(rights)] for rights in own]
        wirings = block_alternatives(model, masks)
        verdict.better = diagnose(model, starts, known, wirings, partial(progress, "other wirings"))
    return own


def _known(passes: list[OnePass]) -> list[Known]:
    return [Known.of(p.tokens, p.hidden, p.predicted) for p in passes]


def _kept(references: list[Reference], own: Rights, fixed: list[Comparison], modules: int) -> tuple[int, int]:
    """Return (accepted drafts, the number that the predictions in `own` would accept), over the same outputs.

    The outputs are drafted with as many drafts per cycle as `modules`, the number of heads, or the most in `fixed` if
    that is less; those that differ from the plain output or end beyond LONGEST tokens do not count. own: results of
    `right` by text, in the order of `references`. fixed: comparisons by number of drafts; the first is not used.
    """
    k = min(len(fixed) - 1, modules)
    were = should = 0
    differing = {difference.prompt for difference in fixed[k].differences}
    for reference, right_ones in zip(references, own, strict=False):
        start, new = len(reference.prompt.tokens), len(reference.text)
        if k and reference.prompt.name not in differing and start + new <= LONGEST:
            were += fixed[k].kept[reference.prompt.name]
            should += kept(right_ones, start, new, k)
    return were, should


def conclude(model: Target, verdict: Verdict) -> None:
    """Add the faults (`broken`) and warnings that follow from a verdict's measurements to the verdict."""
    report, broken, agreement = model.report, verdict.broken, verdict.agreement
    heads = 0 if report.drafter else report.heads
    named = ("the heads are", "they read") if heads else ("the drafter is", "it reads")
    for name, found in (("greedy", verdict.greedy), ("sampled", verdict.sampled)):
        if ways := [c.way for c in found if c.diverged]:
            broken.append(f"{name} text differs from the plain one: {', '.join(ways)}")
    if (d := verdict.drift) and d.share > 1:
        text = f"logprobs of drafted text differ by {d.change:.2g} ({d.prompt}, token {d.position}), {d.share:.1f}x "
        if verdict.dtype == "float32":
            broken.append(text + "what rounding explains")
        else:
            verdict.warnings.append(text + "what rounding explains without experts; check with --float32")
    broken += [f"{f.mode} sampling: p = {f.p:.1g} for the target's probabilities" for f in verdict.fits if f.refused]
    if report.declared and not (report.heads or report.drafter):
        broken.append(f"config.json declares {report.declared} MTP heads, none were loaded ({report.source})")
    for depth, share in enumerate(agreement[: max(1, heads)], 1):
        if share < MIN_AGREEMENT:
            head = "the first head" if depth == 1 else f"depth {depth}"
            broken.append(f"{head if heads else 'the drafter'} predicts the target's token in {share:.1%} of cases")
    if (count := verdict.pairs) - verdict.pairs_seen > MISSES:
        expected = f"expected at least {count - MISSES}"
        why = "pictures are wired or converted wrongly, or the model is too weak for the questions"
        broken.append(f"sees {verdict.pairs_seen} of {count} opposite pairs of pictures, {expected}: {why}")
    were, right_ones = verdict.kept
    if were < MISSED[0] * right_ones - MISSED[1]:
        expected = f"{right_ones} that are right when {named[1]} the whole text"
        broken.append(f"{were} drafts were accepted of {expected}")
    for better in verdict.better[:1]:
        before, after = (" / ".join(f"{s:.0%}" for s in some) for some in (better.before, better.after))
        found = f"wired or converted wrongly: right {before}, with {better.wiring} {after}"
        if better.after[0] < USUAL:  # trained on other text than this, a head can draft it better by chance
            verdict.warnings.append(f"{named[0]} perhaps {found}; both shares are too low to decide")
        else:
            broken.append(f"{named[0]} {found}")
