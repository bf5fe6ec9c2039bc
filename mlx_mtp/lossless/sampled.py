"""Test whether sampled tokens have the target's probabilities.

The test draws many short texts with independent seeds. Given the text before it, a token falls into one of four
classes (the likeliest, the second, the third or fourth, any later one) with probabilities that one pass of the target
gives. The counts minus their expectations are a sum of martingale differences over all texts and positions, with
known covariance, so their quadratic form is chi-squared. No text is drawn twice, and the vocabulary may be any size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.make_cache import make_prompt_cache
from ..generate import generate_step
from ..layers.target import Target
from .rounding_judge import OnePass

RANKS = (0, 1, 2, 4)  # first rank of each class of tokens, the likeliest first
LEAST_VARIANCE = 20.0  # minimum variance of a class's count for the chi-squared approximation
LEAST_P = 1e-4  # a test fails below this probability
HOTTER = 1.25  # factor on the temperature: the error that `power` is computed for


@dataclass(frozen=True)
class Fit:
    """A test's outcome: tokens drawn, the statistic, its degrees of freedom and its p-value.

    power: the probability that draws at HOTTER times the temperature would be refused.
    """

    mode: str
    tokens: int
    statistic: float
    freedom: int
    p: float
    power: float

    @property
    def refused(self) -> bool:
        return not self.p >= LEAST_P


def draw(
    model: Target, prompt: list[int], options: dict[str, Any], *, seeds: Iterable[int], length: int
) -> list[list[int]]:
    """Return a list of a sampled output of `length` tokens for each of `seeds`, all after one prefill of the prompt.

    options: keyword arguments of `generate_step`, but for cache, seed and maximum; with `stop_tokens` outputs may be
    shorter.
    """
    k = options.get("num_draft_tokens")
    cache = make_prompt_cache(model, num_draft_tokens=k)
    if len(prompt) > 1:
        list(generate_step(prompt[:-1], model, prompt_cache=cache, max_tokens=0, num_draft_tokens=k))
    snapshot, texts = cache.snapshot(), []
    for seed in seeds:
        steps = generate_step(prompt[-1:], model, prompt_cache=cache, max_tokens=length, seed=seed, **options)
        texts.append([token for token, _, _ in steps])
        cache.rewind(snapshot)
    return texts


def fit(model: Target, prompt: list[int], texts: Iterable[list[int]], *, temp: float, mode: str) -> Fit:
    """Return the test of whether sampled texts have the target's probabilities.

    texts: one or more, which follow the prompt; they were sampled with the temperature `temp` and no filters. mode:
    the name of the sampling in the result.
    """
    seen, expected, hotter = [], [], []
    for text in texts:
        one_pass = OnePass(model, [*prompt, *text])
        for i, token in enumerate(text):
            logits = one_pass.logits(len(prompt) + i).astype(np.float64)
            order = np.argsort(-logits, kind="stable")
            seen.append(_classes(order == token))
            expected.append(_classes(_softmax(logits[order] / temp)))
            hotter.append(_classes(_softmax(logits[order] / (temp * HOTTER))))
    p = np.array(expected)
    groups = _merged(p)
    seen, p, hotter = (np.array(rows) @ groups for rows in (seen, p, hotter))
    statistic, freedom = _quadratic(seen.sum(axis=0), p)
    noncentral, _ = _quadratic(hotter.sum(axis=0), p)
    power = noncentral_tail(quantile(LEAST_P, freedom), freedom, noncentral) if freedom else 0.0
    return Fit(mode, len(p), statistic, freedom, chi_squared_tail(statistic, freedom), power)


def spread(logits: np.ndarray, temp: float) -> float:
    """Return the variance of a draw's log probability: its information about the temperature."""
    p = _softmax(logits.astype(np.float64) / temp)
    logs = np.log(np.maximum(p, 1e-30))
    return float((p * logs**2).sum() - (p * logs).sum() ** 2)


def _softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max())
    return e / e.sum()


def _classes(values: np.ndarray) -> np.ndarray:
    """Return the sums per class, [classes], of values [V] in the order of their tokens' ranks."""
    return np.add.reduceat(values.astype(np.float64), [start for start in RANKS if start < len(values)])


def _merged(p: np.ndarray) -> np.ndarray:
    """Return groups of the classes of p [n, C], as 0/1 [C, groups].

    Neighbouring classes are merged until the variance of each count is at least LEAST_VARIANCE, or one is left.
    """
    groups = np.eye(p.shape[1])
    while groups.shape[1] > 1:
        one = p @ groups
        variances = (one * (1 - one)).sum(axis=0)
        least = int(variances.argmin())
        if variances[least] >= LEAST_VARIANCE:
            break
        groups[:, least - 1 if least else 1] += groups[:, least]
        groups = np.delete(groups, least, axis=1)
    return groups


def _quadratic(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Return the quadratic form of counts [C] minus their expectation from p [n, C], and its degrees of freedom."""
    off = (counts - p.sum(axis=0))[1:]  # the first class follows from the others
    covariance = (np.diag(p.sum(axis=0)) - p.T @ p)[1:, 1:]
    return (float(off @ np.linalg.solve(covariance, off)) if off.size else 0.0), off.size


def chi_squared_tail(x: float, freedom: int) -> float:
    """Return the probability that chi-squared exceeds x (Abramowitz and Stegun 26.4.4-5); 1 without freedom."""
    if freedom < 1 or x <= 0:
        return 1.0
    half, odd = x / 2, freedom % 2
    orders = np.arange(odd / 2, freedom / 2)
    terms = [math.exp(order * math.log(half) - half - math.lgamma(order + 1)) for order in orders]
    return min(1.0, sum(terms) + odd * math.erfc(math.sqrt(half)))


def noncentral_tail(x: float, freedom: int, noncentral: float) -> float:
    """Return the probability that noncentral chi-squared, a Poisson mixture, exceeds x (as above, 26.4.25).

    noncentral: above 300 it counts as 300.
    """
    half = min(noncentral, 300.0) / 2
    weights = [math.exp(j * math.log(half) - half - math.lgamma(j + 1)) if half else float(not j) for j in range(400)]
    return min(1.0, sum(w * chi_squared_tail(x, freedom + 2 * j) for j, w in enumerate(weights) if w > 1e-12))


def quantile(p: float, freedom: int) -> float:
    """Return the value, at most 1000, that chi-squared exceeds with probability p, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_squared_tail(middle, freedom) > p else (low, middle)
    return low
