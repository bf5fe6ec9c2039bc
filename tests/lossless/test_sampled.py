"""Check the test of sampled output's distribution: how often it refuses right draws, how surely wrong ones."""

from dataclasses import replace

import numpy as np
import pytest
from sweep import SWEEP

from mlx_mtp.decoding import pick
from mlx_mtp.lossless import sampled
from mlx_mtp.lossless.sampled import chi_squared_tail, draw, fit, noncentral_tail, quantile, spread

V, PROMPT = 5, [1, 2, 3]
OPTIONS = {"adaptive": False, "prompt_lookup": False, "num_draft_tokens": 3, "temp": 1.0}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(0)[0]


@pytest.mark.parametrize(
    ("x", "freedom", "p"),
    [(3.841459, 1, 0.05), (5.991465, 2, 0.05), (18.307038, 10, 0.05), (24.995790, 15, 0.05), (35.0, 9, 6.0e-5)],
)
def test_the_chi_squared_tail(x, freedom, p):
    assert chi_squared_tail(x, freedom) == pytest.approx(p, rel=1e-5 if p == 0.05 else 2e-2)
    assert chi_squared_tail(0.0, freedom) == 1.0
    if p == 0.05:
        assert quantile(p, freedom) == pytest.approx(x, rel=1e-6)


def test_the_chi_squared_tail_at_its_limits():
    assert chi_squared_tail(5.0, 0) == 1.0
    assert 0 <= chi_squared_tail(1e6, 3) < 1e-300
    assert 0 <= chi_squared_tail(1e6, 4) < 1e-300
    assert chi_squared_tail(300.0, 300) == pytest.approx(0.4891, abs=1e-3)


@pytest.mark.parametrize("freedom", [1, 3])
@pytest.mark.parametrize("noncentral", [0.0, 7.0, 60.0, 1e4])
def test_the_noncentral_chi_squared_tail(freedom, noncentral):
    rng = np.random.default_rng(0)
    means = np.zeros(freedom)
    means[0] = np.sqrt(noncentral)
    drawn = ((rng.standard_normal((100_000, freedom)) + means) ** 2).sum(axis=1)
    for x in (2.0, 21.1):
        assert noncentral_tail(x, freedom, noncentral) == pytest.approx((drawn > x).mean(), abs=6e-3)


class Memory:
    """One pass of a model whose next token depends only on the last token."""

    rows = np.log(1e-9 + np.random.default_rng(3).dirichlet(np.full(40, 0.3), 40)).astype(np.float32)

    def __init__(self, model, tokens):
        self.tokens = tokens

    def logits(self, position):
        return self.rows[self.tokens[position - 1]]


def markov(n, length, seed, temp=1.0):
    """Return n texts of a model like Memory's after token 0, drawn by NumPy."""
    rng = np.random.default_rng(seed)
    p = np.exp(Memory.rows / temp)
    sums = (p / p.sum(axis=1, keepdims=True)).cumsum(axis=1)
    texts, last = [], np.zeros(n, int)
    for _ in range(length):
        last = (rng.random(n)[:, None] > sums[last]).sum(axis=1).clip(max=39)
        texts.append(last)
    return np.stack(texts, axis=1).tolist()


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(sampled, "OnePass", Memory)


def test_right_draws_pass_with_uniform_p(memory):
    ps = np.sort([fit(None, [0], markov(30, 4, seed), temp=1.0, mode="x").p for seed in range(100)])
    assert ps[0] > 1e-4
    # Kolmogorov-Smirnov, at 0.1%
    assert np.abs(ps - (np.arange(100) + 0.5) / 100).max() < 1.95 / np.sqrt(100)


def test_power_is_the_share_of_refused_draws(memory):
    found = [fit(None, [0], markov(180, 4, seed, temp=1.25), temp=1.0, mode="x") for seed in range(20)]
    stated = sum(f.power for f in found) / 20
    assert 0.2 < stated < 0.9
    assert sum(f.refused for f in found) / 20 == pytest.approx(stated, abs=0.2)


def test_too_few_draws_have_no_power(memory, monkeypatch):
    monkeypatch.setattr(Memory, "rows", np.where(np.eye(40), 20.0, 0.0).astype(np.float32))
    found = fit(None, [0], [[0] * 4] * 30, temp=1.0, mode="x")
    assert (found.freedom, found.p, found.power) == (0, 1.0, 0.0)
    assert spread(Memory.rows[0], 1.0) < 1e-3 < spread(np.log(np.array([0.5, 0.3, 0.2])), 1.0)


# The product's own draws, correct and with planted faults.

REAL_CHOICE = pick.choose_rows


def hotter(logits, options, *given, **more):
    return REAL_CHOICE(logits, [replace(each, temp=1.5 * each.temp) for each in options], *given, **more)


PLANTS = {"another temperature": (pick, "choose_rows", hotter), "right": None}


@pytest.mark.parametrize("plant", PLANTS if SWEEP else ["another temperature"])
def test_draws_of_the_product(model, monkeypatch, plant):
    wrong = PLANTS[plant]
    if wrong:
        monkeypatch.setattr(*wrong)
    options = {**OPTIONS, "draft_sampling": "coupled"}
    texts = draw(model, PROMPT, options, seeds=range(20), length=24 if SWEEP else 14)
    found = fit(model, PROMPT, texts, temp=1.0, mode="coupled")
    assert found.tokens == sum(map(len, texts)) == 20 * (24 if SWEEP else 14)
    assert found.refused == (wrong is not None)
