"""Compare drafted with plain output, and judge every difference.

The reference is plain decoding, `num_draft_tokens=0`. After a near-tie the drafting run restarts from the plain
output up to that point, so that a near-tie does not hide a later real divergence. After a real divergence it stops.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..decoding.sampling import key_at, random_key
from ..decoding.stats import Stats
from ..generate import generate_step
from ..layers.target import Target
from .prompts import NamedPrompt
from .rounding_judge import Judgement, OnePass

STEP = 256  # tokens of a prefill chunk
TREES = (4, 16)  # rows of trees that are checked
DOUBTED = 4  # number of positions whose rounding error is measured
by_share = operator.attrgetter("share")


@dataclass(frozen=True)
class Way:
    """One way to draft: keyword arguments of `generate_step`."""

    name: str
    options: dict[str, Any]

    def sampled(self, temp: float, seed: int, mode: str) -> "Way":
        """Return the same way with a temperature, a seed, and `draft_sampling` = mode."""
        return Way(self.name, self.options | {"temp": temp, "seed": seed, "draft_sampling": mode})

    def noise(self, position: int, vocab_size: int) -> np.ndarray | float:
        """Return the noise [V] that the draw at a position adds to its logits; the number 0 for a way without a seed.

        position: of the drawn token in prompt and output.
        """
        if "seed" not in self.options:
            return 0.0
        dice = mx.random.split(key_at(random_key(self.options["seed"]), position))[1]
        return self.options["temp"] * np.array(mx.random.gumbel((1, vocab_size), key=dice)[0])


PLAIN = Way("plain", {"num_draft_tokens": 0})


def ways(k: int, *, adaptive: bool, p_min: float, lookup: bool, compiled: bool, trees: int = 0) -> list[Way]:
    """Return a way for each fixed number of drafts from 1 to k, then one for each other option that is to be checked.

    p_min: `draft_p_min` of the way with that name, which is always included with k > 0. trees: maximum rows of a
    tree, 0 for none. With k = 0 only lookups draft, if `lookup`, and the result is otherwise empty.
    """
    fixed: dict[str, Any] = {"adaptive": False, "prompt_lookup": False, "compile_cycles": False}
    maximum: dict[str, Any] = {"num_draft_tokens": k or None}
    found = [Way(f"{n} draft{'s' * (n > 1)}", fixed | {"num_draft_tokens": n}) for n in range(1, k + 1)]
    others = (
        (lookup, Way("lookups", fixed | maximum | {"prompt_lookup": True})),
        (k, Way("p_min", fixed | maximum | {"draft_p_min": p_min})),
        (k and adaptive, Way("adaptive", maximum | {"compile_cycles": False})),
        *((k and rows <= trees, Way(f"trees of {rows} rows", fixed | maximum | {"tree": rows})) for rows in TREES),
        (k and compiled, Way("compiled", maximum | {"adaptive": False, "compile_cycles": True})),
    )
    return found + [way for wanted, way in others if wanted]


@dataclass(frozen=True)
class Difference:
    """Two different tokens at a position of the output, and the judgement on them.

    plain, drafted: None if that output has ended before; the judgement is then None, too.
    """

    prompt: str
    way: str
    position: int
    plain: int | None
    drafted: int | None
    judgement: Judgement | None

    @property
    def near_tie(self) -> bool:
        return self.judgement is not None and self.judgement.gap <= self.judgement.tolerance


@dataclass
class Comparison:
    """One way's outputs for all prompts compared with the references, as differences.

    prompts, tokens: number of prompts, and of the references' tokens. kept: by prompt, the accepted drafts of the
    first run, before any restart. stats: of all runs, restarts included. The one pass leaves kept and stats empty.
    """

    way: str
    prompts: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)

    @property
    def diverged(self) -> bool:
        return not all(difference.near_tie for difference in self.differences)


@dataclass(frozen=True)
class Drift:
    """At a position of the output, the greatest change of any token's logprob, and the tolerance there."""

    prompt: str
    position: int
    change: float
    tolerance: float

    @property
    def share(self) -> float:
        """The change relative to the tolerance; infinite if one of them is NaN, which makes it the worst."""
        share = self.change / self.tolerance
        return math.inf if math.isnan(share) else share


class Reference:
    """A prompt, its output without drafts (sampled if `plain` samples), and the judge of differences."""

    def __init__(self, model: Target, prompt: NamedPrompt, max_tokens: int, stops: Sequence[int], plain: Way = PLAIN):
        self.model, self.prompt, self.max_tokens = model, prompt, max_tokens
        self.stops = stops if prompt.stops else ()
        self.text: list[int] = []
        self.text, _ = self.generated(plain)

    @cached_property
    def one_pass(self) -> OnePass:
        return OnePass(self.model, self.prompt.tokens + self.text, self.prompt.pictures)

    def generated(self, way: Way, given: int = 0) -> tuple[list[int], Stats]:
        """Return (a way's tokens, its stats) after the prompt and the first `given` tokens of the plain output.

        The tokens exclude these; output and `given` together have at most `max_tokens`.
        """
        stats = Stats()
        return [token for token, _, _ in self.steps(way, given, stats=stats)], stats

    def steps(self, way: Way, given: int = 0, **options: Any) -> Any:
        """Yield `generate_step`'s items for a way after the prompt and the first `given` tokens of the output.

        options: further arguments of `generate_step`.
        """
        tokens = self.prompt.tokens + self.text[:given]
        limits = {"max_tokens": self.max_tokens - given, "stop_tokens": self.stops, "prefill_step_size": STEP}
        options["pictures"] = self.prompt.pictures
        return generate_step(tokens, self.model, **limits, **way.options, **options)

    def difference(self, way: Way, position: int, drafted: int | None) -> Difference:
        """Return the difference at a position of the output (not the prompt), where a way has the token `drafted`.

        drafted: None if that way's output has ended. If either output has ended there, there is no judgement.
        """
        plain, judgement = self.text[position] if position < len(self.text) else None, None
        if plain is not None and drafted is not None:
            place = len(self.prompt.tokens) + position
            judgement = self.one_pass.judge(place, (plain, drafted), way.noise(place, self.model.vocab_size))
        return Difference(self.prompt.name, way.name, position, plain, drafted, judgement)


def compare(reference: Reference, way: Way, into: Comparison) -> list[int]:
    """Add a way's output for one prompt to a comparison, which is modified; return the tokens of its first run.

    After a near-tie the way runs again from the plain output up to and including that token; after another
    difference, such as an output that ends early, it stops.
    """
    done, (first, stats) = 0, reference.generated(way)
    text, into.kept[reference.prompt.name] = first, sum(stats.accepted)
    while True:
        into.stats.add(stats)
        pairs = itertools.zip_longest(reference.text[done:], text)  # an output that ends early differs there
        at = next((i for i, (plain, drafted) in enumerate(pairs) if plain != drafted), None)
        if at is None:
            break
        into.differences.append(reference.difference(way, done + at, text[at] if at < len(text) else None))
        done += at + 1
        if not into.differences[-1].near_tie or done >= len(reference.text):
            break
        text, stats = reference.generated(way, done)
    into.prompts += 1
    into.tokens += len(reference.text)
    return first


def compare_one_pass(reference: Reference, into: Comparison) -> None:
    """Add to a comparison each output position whose token is not the greedy token of one pass over the output.

    The pass uses no drafts; its caches and its number of rows are not those of decoding.
    """
    start, way = len(reference.prompt.tokens), Way(into.way, {})
    predicted = reference.one_pass.predicted[start - 1 : -1]
    for position, (plain, other) in enumerate(zip(reference.text, predicted, strict=True)):
        if plain != other:
            into.differences.append(reference.difference(way, position, other))
    into.prompts += 1
    into.tokens += len(reference.text)


def drift(reference: Reference, way: Way) -> Drift:
    """Return the change of a way's logprobs from the judge's that is greatest relative to its tolerance.

    Positions of the output are compared up to and including the first with another token than the plain one. The
    DOUBTED changes that are greatest relative to their tolerance, if above it, get one that repeated passes measure.
    """
    found: list[Drift] = []
    one_pass, start = reference.one_pass, len(reference.prompt.tokens)
    steps = reference.steps(way, logprobs=True)
    for position, ((token, logprobs, _), plain) in enumerate(zip(steps, reference.text, strict=False)):
        place = start + position
        row = mx.array(one_pass.logits(place))
        change = np.abs(np.array(logprobs.astype(mx.float32) - (row - mx.logsumexp(row)))).max()
        found.append(Drift(reference.prompt.name, position, float(change), one_pass.floor(place)))
        if token != plain:
            break
    worst = sorted(found, key=by_share, reverse=True)[:DOUBTED]
    reached = [replace(d, tolerance=one_pass.reach(start + d.position)) if d.share > 1 else d for d in worst]
    return max(reached, key=by_share)
