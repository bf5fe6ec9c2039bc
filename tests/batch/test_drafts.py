"""Heads in a pool draft what they would alone, whatever they missed meanwhile and whoever came and went."""

import random

import pytest
from fuzzing import count
from schedules import Case, Whims, run
from subjects import subjects
from sweep import sampled

from mlx_mtp.batch import step as pooled_step

NAMES = ["step3p5", "qwen3_next", "mimo_v2_flash", "eagle"]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_drafts_are_those_from_scratch(subject, monkeypatch, name):
    s, calls, real = subject(name), [], pooled_step.draft

    def spy(model, pool, given, k, texts):
        drafts = real(model, pool, given, k, texts)
        if k:
            calls.append((texts, pool.layers[0].offset, drafts))
        return drafts

    monkeypatch.setattr(pooled_step, "draft", spy)
    checked = 0
    for seed in range(count(1, 10)):
        rng = random.Random(seed)
        cases = [Case(rng, s.model.vocab_size, s.k) for _ in range(4)]
        for case in cases:
            case.sampling, case.own_sampler, case.penalty, case.stops = {}, False, None, []
            case.k, case.max_tokens = s.k, 30
        calls.clear()
        run(s.model, cases, {}, s.k, Whims(rng, s.k))
        for texts, offset, drafts in calls:
            for text, position, found in zip(texts, offset.tolist(), drafts.tolist(), strict=True):
                if text and position + 1 <= len(text.tokens) and rng.random() < 0.7:
                    assert found == s.scratch(text.tokens[: position + 1], len(found))
                    checked += 1
    assert checked >= 5
