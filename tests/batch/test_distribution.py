"""Sampled sequences of a pool have exactly the target's distribution, independently: all paths are enumerated."""

import itertools

import mlx.core as mx
import pytest
from draws import Draws, reference
from sweep import sampled

import mlx_mtp
from mlx_mtp.cache.pool import Pool
from mlx_mtp.decoding import step
from mlx_mtp.decoding.sampling import Sampling

PROMPTS = [[1, 0, 1, 1], [0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0]]
HOT, COLD = Sampling(temp=0.9), Sampling()
N = 2
CASES = {"two": [HOT, COLD, Sampling(temp=2.0)], "all": [HOT, Sampling(temp=2.0), HOT]}  # by the sequences that draw


@pytest.mark.parametrize("case", sampled(["two"], CASES))
def test_distributions_of_a_pool_of_three_are_exact_and_independent(tiny_models, monkeypatch, case):
    model, plain = tiny_models(4, vocab_size=2)
    samplings, pools, kept = CASES[case], [], set()
    draws, accept = Draws(), step.accept
    draws.stand_in(monkeypatch)

    def noted(drafts, tokens):
        found = accept(drafts, tokens)
        pools.append(drafts.shape)
        kept.update(found.tolist())
        return found

    monkeypatch.setattr(step, "accept", noted)
    same = [[lambda tokens, logits: logits]] * 3  # cycles are then built late, which gives fewer paths

    def run():
        batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False, draft_sampling="greedy")
        batch.insert(PROMPTS, [N] * 3, samplers=samplings, logits_processors=same)
        texts = [[], [], []]
        while responses := batch.next_generated():
            for response in responses:
                texts[response.uid].append(response.token)
        return tuple(map(tuple, texts))

    found: dict = {}
    for texts, p in draws.paths(run):
        found[texts] = found.get(texts, 0.0) + p
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    own = [
        reference(plain, prompt, N, s, []) if s.temp else greedy(plain, prompt)
        for prompt, s in zip(PROMPTS, samplings, strict=True)
    ]
    for texts in itertools.product(*own):
        expected = own[0][texts[0]] * own[1][texts[1]] * own[2][texts[2]]
        assert found.get(texts, 0.0) == pytest.approx(expected, abs=1e-6), texts
    assert {shape[0] for shape in pools} == {3}
    assert kept == {0, 1}, "drafts must have been both accepted and rejected"


def greedy(plain, prompt: list[int]) -> dict:
    text = list(prompt)
    for _ in range(N):
        text.append(int(mx.argmax(plain(mx.array([text]))[0, -1]).item()))
    return {tuple(text[len(prompt) :]): 1.0}


def test_the_enumerated_sequences_share_a_pool(tiny_models):
    """From their first cycle on."""
    model, _ = tiny_models(4, vocab_size=2)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False)
    batch.insert(PROMPTS, [5] * 3)
    batch.next()
    batch.next()
    (driver,) = batch._drivers
    assert isinstance(driver.seating.cache, Pool)
    assert len(driver.sequences) == 3
