"""All checks of a loaded model, and what they come to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..checkpoint.head_self_test import LEAST
from .compare import PLAIN, Comparison, Drift, Reference, Way, compare, compare_one_pass, drift, ways, worst
from .heads import LONGEST, Known, kept, right, shares, suspicions
from .one_pass import OnePass
from .prompts import Prompt, built_in, source
from .sampled import Fit, draw, fit, spread
from .wirings import Better, diagnose

Progress = Callable[[str, int, int], None]  # a stage, and how much of it is done
P_MIN = 0.5
TEMP, SAMPLED_PROMPTS, SAMPLED_TOKENS = 0.8, 3, 32
FIT_TEMP, FIT_TOKENS, FIT_PROMPT = 1.0, 8, 256  # the last one: most tokens of a prompt
MISSED = 0.95, 3  # a loop keeps at least this share of the right guesses, less so many
FIT_MODES = "coupled", "rejection"


@dataclass(frozen=True)
class Settings:
    """What is to be checked.

    drafts: most of a cycle. max_tokens: of a new text.
    draws: short texts whose distribution is tested, in each of FIT_MODES. seed: of all draws.
    """

    drafts: int
    max_tokens: int = 40
    draws: int = 24
    seed: int = 0
    adaptive: bool = True
    p_min: float = P_MIN
    lookup: bool = True
    compiled: bool = False
    diagnose: bool = True

    @property
    def ways(self) -> list[Way]:
        return ways(
            self.drafts, adaptive=self.adaptive, p_min=self.p_min or P_MIN, lookup=self.lookup, compiled=self.compiled
        )

    @property
    def most(self) -> Way:
        """The most drafts, always."""
        return self.ways[self.drafts - 1]


@dataclass
class Verdict:
    """What was found.

    greedy, sampled: each way's texts beside the plain ones; of the sampled ones every way has the same seeds.
    drift:     the worst of the drafted logprobs.
    fits:      tests of distributions.
    agreement: per depth, how often its guess is the target's token.
    kept:      drafts that were, while drafting one per head, and those that are right by `agreement`'s guesses.
    better:    wirings of the heads that would be right more often.
    warnings:  what looks wrong, though no text is; broken: what is wrong.
    """

    dtype: str
    greedy: list[Comparison] = field(default_factory=list)
    sampled: list[Comparison] = field(default_factory=list)
    drift: Drift | None = None
    fits: list[Fit] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    kept: tuple[int, int] = 0, 0
    better: list[Better] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> bool:
        """Whether texts with drafts are other texts, or drawn with other probabilities."""
        return any(c.diverged for c in (*self.greedy, *self.sampled)) or any(f.refused for f in self.fits)


def verify(model: Any, tokenizer: Any, settings: Settings, progress: Progress) -> Verdict:
    """Check a model; its heads are looked at where it has some."""
    stops = tuple(tokenizer.eos_token_ids)
    prompts = built_in(model, tokenizer, settings.max_tokens)
    references = []
    for prompt in prompts:
        progress("plain text", len(references), len(prompts))
        references.append(Reference(model, prompt, settings.max_tokens, stops))
    verdict = Verdict(str(references[0].one_pass.dtype).rpartition(".")[2])
    verdict.greedy = _greedy(references, settings, progress)
    if settings.drafts:
        verdict.drift = _drift(references, settings.most, progress)
        verdict.sampled = _sampled(model, prompts[:SAMPLED_PROMPTS], stops, settings, progress)
        verdict.fits = _fits(model, references, settings, progress)
    if model.mtp:
        _heads(model, tokenizer, references, settings, verdict, progress)
    conclude(model, verdict)
    return verdict


def _greedy(references: list[Reference], settings: Settings, progress: Progress) -> list[Comparison]:
    found = [Comparison("one pass")]
    for reference in references:
        compare_one_pass(reference, found[0])
    for way in settings.ways:
        found.append(Comparison(way.name))
        for i, reference in enumerate(references):
            progress(way.name, i, len(references))
            compare(reference, way, found[-1])
    return found


def _drift(references: list[Reference], way: Way, progress: Progress) -> Drift:
    found = []
    for i, reference in enumerate(references):
        progress("logits", i, len(references))
        found.append(drift(reference, way))
    return worst(found)


def _sampled(
    model: Any, prompts: list[Prompt], stops: Sequence[int], settings: Settings, progress: Progress
) -> list[Comparison]:
    """Texts with one seed for every way: drafts that share the draw's noise, and greedy ones."""
    plans = [(settings.most, "coupled"), (settings.most, "greedy")]
    plans += [(way, "coupled") for way in settings.ways if way.name == "adaptive"]
    found = [Comparison(f"{way.name}, {mode}") for way, mode in plans]
    for i, prompt in enumerate(prompts):
        progress("sampled text", i, len(prompts))
        seed = settings.seed + i
        plain = PLAIN.sampled(TEMP, seed, "coupled")
        reference = Reference(model, prompt, min(SAMPLED_TOKENS, settings.max_tokens), stops, plain)
        for (way, mode), comparison in zip(plans, found, strict=True):
            compare(reference, way.sampled(TEMP, seed, mode), comparison)
    return found


def _fits(model: Any, references: list[Reference], settings: Settings, progress: Progress) -> list[Fit]:
    """Of draws behind the prompt whose draws tell most."""
    short = [r for r in references if len(r.prompt.tokens) <= FIT_PROMPT]
    prompt = max(short, key=_spread).prompt.tokens
    seeds = range(settings.seed + 1000, settings.seed + 1000 + settings.draws)
    found = []
    for mode in FIT_MODES:
        options = settings.most.options | {"temp": FIT_TEMP, "draft_sampling": mode}

        def drawn(done: int) -> None:
            progress("distribution", done, settings.draws)

        texts = draw(model, prompt, options, seeds=seeds, length=FIT_TOKENS, progress=drawn)
        found.append(fit(model, prompt, texts, temp=FIT_TEMP, mode=mode))
    return found


def _spread(reference: Reference) -> float:
    start = len(reference.prompt.tokens)
    places = range(start, start + min(FIT_TOKENS, len(reference.text)))
    return sum(spread(reference.one_pass.logits(place), FIT_TEMP) for place in places)


def _heads(
    model: Any,
    tokenizer: Any,
    references: list[Reference],
    settings: Settings,
    verdict: Verdict,
    progress: Progress,
) -> None:
    references = sorted(references, key=lambda r: len(r.one_pass.tokens))
    passes = [*(r.one_pass for r in references), OnePass(model, source(tokenizer))]
    texts = [Known.of(p.tokens, p.hidden, p.said) for p in passes]
    own = examine(model, texts, settings, verdict, progress)
    verdict.kept = _kept(references, own, verdict.greedy[: settings.drafts + 1], len(model.mtp))


def examine(
    model: Any, texts: list[Known], settings: Settings, verdict: Verdict, progress: Progress
) -> list[list[mx.array]]:
    """Look at the heads alone; returns where they are `right`, by text and depth."""
    own = []
    for i, text in enumerate(texts):
        progress("heads", i, len(texts))
        own.append(right(model, text, max(len(model.mtp), min(settings.drafts, 2))))
    verdict.agreement = shares(own)
    verdict.warnings += suspicions(model, own)
    if settings.diagnose:
        verdict.better = diagnose(model, texts, own, lambda done, total: progress("other wirings", done, total))
    return own


def _kept(
    references: list[Reference], own: list[list[mx.array]], fixed: list[Comparison], modules: int
) -> tuple[int, int]:
    """How many drafts were kept of texts that are the plain ones, and how many of them the heads have right there."""
    k = min(len(fixed) - 1, modules)
    found = [0, 0]
    differing = {difference.prompt for difference in fixed[k].differences}
    for reference, right_ones in zip(references, own, strict=False):
        start, new = len(reference.prompt.tokens), len(reference.text)
        if k and reference.prompt.name not in differing and start + new <= LONGEST:
            found[0] += fixed[k].kept[reference.prompt.name]
            found[1] += kept(right_ones, start, new, k)
    return found[0], found[1]


def conclude(model: Any, verdict: Verdict) -> None:
    """Say what is wrong, and what may be."""
    for name, found in (("greedy", verdict.greedy), ("sampled", verdict.sampled)):
        if ways := [c.way for c in found if c.diverged]:
            verdict.broken.append(f"{name} text differs from the plain one: {', '.join(ways)}")
    if (d := verdict.drift) and not d.share <= 1:
        text = f"logprobs of drafted text differ by {d.change:.2g} ({d.prompt}, token {d.position}), {d.share:.1f}x "
        if verdict.dtype == "float32":
            verdict.broken.append(text + "what rounding explains")
        else:
            verdict.warnings.append(text + "what rounding explains without experts; --float32 tells")
    verdict.broken += [
        f"{f.mode} sampling: p = {f.p:.1g} for the target's probabilities" for f in verdict.fits if f.refused
    ]
    facts = model.report
    if facts.declared and not facts.heads:
        verdict.broken.append(f"config.json declares {facts.declared} MTP heads, none were loaded ({facts.source})")
    if verdict.agreement and verdict.agreement[0] < LEAST:
        verdict.broken.append(f"the first head's guess is the target's token in {verdict.agreement[0]:.1%} of cases")
    verdict.broken += [
        f"depth {depth}'s guess is the target's token in {share:.1%} of cases"
        for depth, share in enumerate(verdict.agreement[: facts.heads], 1)
        if depth > 1 and share < LEAST
    ]
    if verdict.kept[0] < MISSED[0] * verdict.kept[1] - MISSED[1]:
        verdict.broken.append(
            "{} drafts were kept of {} that the heads have right where they read the whole text".format(*verdict.kept)
        )
    for better in verdict.better[:1]:
        before, after = (" / ".join(f"{s:.0%}" for s in some) for some in (better.before, better.after))
        verdict.broken.append(
            f"the heads are wired or converted wrongly: right {before}, with {better.wiring} {after}"
        )
