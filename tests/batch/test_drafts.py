"""Heads in a pool draft what they would alone, whatever they missed meanwhile and whoever came and went."""

import random

import pytest
from fuzzing import count
from schedules import Case, Whims, run
from subjects import subjects
from sweep import sampled

from mlx_mtp.batch import step as pooled_step
from mlx_mtp.decoding import step as single_step

NAMES = ["step3p5", "qwen3_next", "mimo_v2_flash", "eagle"]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_drafts_are_those_from_scratch(subject, monkeypatch, name):
    """In the pool, and of who is alone before and after it."""
    s, together, alone = subject(name), [], []
    pooled, single = pooled_step.draft, single_step.draft

    def spy(model, pool, given, k, texts):
        drafts = pooled(model, pool, given, k, texts)
        if k:
            together.append((texts, pool.layers[0].offset, drafts))
        return drafts

    def spy_alone(model, cache, given, k, chooser):
        drafts = single(model, cache, given, k, chooser)
        alone.append((cache, cache.layers[0].offset, drafts.tokens))
        return drafts

    monkeypatch.setattr(pooled_step, "draft", spy)
    monkeypatch.setattr(single_step, "draft", spy_alone)
    checked = [0, 0]
    for seed in range(5, 5 + count(1, 10)):
        rng = random.Random(seed)
        cases = [Case(rng, s.model.vocab_size, s.k) for _ in range(4)]
        for case in cases:
            case.sampling, case.own_sampler, case.penalty, case.stops, case.goes = {}, False, None, [], None
            case.k, case.max_tokens = s.k, 30
            case.comes += 12
        cases[0].comes, cases[0].max_tokens = 0, 70
        together.clear()
        alone.clear()
        run(s.model, cases, {}, s.k, Whims(rng, s.k))
        found = [
            (text.tokens, position, drafts, 0)
            for texts, offset, every in together
            for text, position, drafts in zip(texts, offset.tolist(), every.tolist(), strict=True)
            if text
        ]
        text_of = {id(case.cache): case.prompt + case.tokens for case in cases}
        found += [(text_of[id(cache)], offset.item(), drafts.tolist(), 1) for cache, offset, drafts in alone]
        for tokens, position, drafts, where in found:
            if position + 1 <= len(tokens) and rng.random() < (1 if where else 0.6):
                assert drafts == s.scratch(tokens[: position + 1], len(drafts))
                checked[where] += 1
    assert min(checked) >= 5
