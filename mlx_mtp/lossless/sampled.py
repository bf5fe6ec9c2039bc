"""Texts that are drawn: do they have the target's own probabilities?

Many short texts of one prompt with independent seeds; wherever enough of them agree so far, the counts of their
next tokens are compared with the target's exact probabilities by a likelihood ratio (G) test. Given how many texts
come by, the counts at different places are independent, so their statistics and degrees of freedom add up.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..generate import generate_step
from ..prompt_cache import make_prompt_cache
from .one_pass import OnePass

LEAST_EXPECTED = 5.0  # texts in a cell, for chi-squared to describe it
LEAST_P = 1e-4  # a test that fails more seldom than this by chance


@dataclass(frozen=True)
class Fit:
    """A test's outcome: texts drawn, the statistic, its degrees of freedom and the probability of one so large."""

    mode: str
    texts: int
    statistic: float
    freedom: int
    p: float

    @property
    def refused(self) -> bool:
        return not self.p >= LEAST_P


def draw(
    model: Any,
    prompt: list[int],
    options: dict[str, Any],
    *,
    seeds: Sequence[int],
    length: int,
    progress: Callable[[int], None],
) -> list[tuple[int, ...]]:
    """A text of `length` tokens for each seed; the prompt is read once."""
    k = options.get("num_draft_tokens")
    cache = make_prompt_cache(model, num_draft_tokens=k)
    if len(prompt) > 1:
        list(generate_step(prompt[:-1], model, prompt_cache=cache, max_tokens=0, num_draft_tokens=k))
    moment, texts = cache.snapshot(), []
    for seed in seeds:
        steps = generate_step(prompt[-1:], model, prompt_cache=cache, max_tokens=length, seed=seed, **options)
        texts.append(tuple(token for token, _, _ in steps))
        cache.rewind(moment)
        progress(len(texts))
    return texts


def fit(model: Any, prompt: list[int], texts: Sequence[tuple[int, ...]], *, temp: float, mode: str) -> Fit:
    """Whether texts, drawn at a temperature alone, have the target's probabilities."""
    statistic, freedom = 0.0, 0
    for length in range(len(texts[0])):
        for prefix, count in Counter(text[:length] for text in texts).items():
            if count < 2 * LEAST_EXPECTED:
                continue
            row = OnePass(model, [*prompt, *prefix]).logits(len(prompt) + length)
            expected = count * np.array(mx.softmax(mx.array(row) / temp))
            seen = Counter(text[length] for text in texts if text[:length] == prefix)
            g, cells = _likelihood_ratio(expected, seen)
            statistic, freedom = statistic + g, freedom + cells - 1
    return Fit(mode, len(texts), statistic, freedom, chi_squared_tail(statistic, freedom))


def _likelihood_ratio(expected: np.ndarray, seen: Counter[int]) -> tuple[float, int]:
    """G = 2 sum n ln(n / expected) and its number of cells: each likely token, and all others together."""
    likely = [int(i) for i in np.flatnonzero(expected >= LEAST_EXPECTED)]
    cells = [(seen[token], float(expected[token])) for token in likely]
    total = sum(seen.values())
    rest = total - sum(n for n, _ in cells), total - sum(e for _, e in cells)
    if rest[1] < LEAST_EXPECTED and cells:  # too few to be a cell of their own
        least = min(range(len(cells)), key=lambda i: cells[i][1])
        n, e = cells.pop(least)
        rest = rest[0] + n, rest[1] + e
    cells.append(rest)
    return 2 * sum(n * math.log(n / e) for n, e in cells if n), len(cells)


def chi_squared_tail(x: float, freedom: int) -> float:
    """The probability that chi-squared with so many degrees of freedom exceeds x (Abramowitz and Stegun 26.4.4-5)."""
    if freedom < 1 or x <= 0:
        return 1.0
    half = x / 2
    steps = range(1, (freedom + 1) // 2) if freedom % 2 else range(freedom // 2)
    shift = 0.5 if freedom % 2 else 0.0
    terms = [math.exp((i - shift) * math.log(half) - half - math.lgamma(i - shift + 1)) for i in steps]
    return min(1.0, sum(terms) + (math.erfc(math.sqrt(half)) if freedom % 2 else 0.0))
