"""Sequences come and go at random while trees are drafted: each is what it is alone, and so is its cache."""

import random

import families
import pytest
from fuzzing import count
from schedules import Case, Whims, alike, assert_as_alone, run
from subjects import quantizable_model, subjects
from sweep import SWEEP
from tree_drafts import TreeDrafts, TreeHeads, assert_equal

import mlx_mtp
from mlx_mtp.decoding.logit_rules import LogitRules

NAMES = ["nemotron_h_latent", "quantized"]
EVERY = ["step3p5", "quantized", "eagle", *families.FAMILIES]


class TreeCase(Case):
    """A case whose penalties are rules, since a caller's own processors exclude trees."""

    def __init__(self, rng: random.Random, vocab: int, most: int):
        super().__init__(rng, vocab, most)
        self.max_tokens += 10

    @property
    def processors(self):
        return [LogitRules(repetition_penalty=self.penalty)] if self.penalty else []


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.mark.parametrize("name", EVERY if SWEEP else NAMES)
def test_every_text_is_what_it_is_alone(subject, tiny_models, monkeypatch, name, recorded_at_once):
    """Every third schedule is recorded, and of every third one the heads read the accepted paths."""
    quantized = name == "quantized"
    model = quantizable_model(tiny_models)[0] if quantized else subject(name).model
    trees, stats = 0, mlx_mtp.Stats()
    for seed in range(count(2, 60)):
        rng = random.Random(f"{name} {seed}")
        layout = {"kv_bits": rng.choice([4, 8])} if quantized else rng.choice([{}, {"max_kv_size": 24}])
        cases = [TreeCase(rng, model.vocab_size, 15) for _ in range(rng.randint(2, 5))]
        if replayed := seed % 3 == 2:
            alike(cases)
        texts = [case.prompt + case.alone(model, layout, case.max_tokens)[0] for case in cases]
        heads = seed % 3 == 1
        drafter = TreeHeads(model) if heads else TreeDrafts()
        drafter.grow(model, texts, seed, right=rng.choice([0.5, 0.8]), in_step=replayed or heads)
        monkeypatch.setattr(model, "drafter", drafter)
        run(model, cases, layout, 15, Whims(rng, 15, trees=True), compile_cycles=replayed, stats=stats)
        for case in cases:
            if case.tokens:
                assert_equal(case.cache, case.alone(model, layout, len(case.tokens))[1])
            assert_as_alone(case, model, layout)
        monkeypatch.setattr(model, "drafter", None)
        trees += len(drafter.drafted)
    assert trees > 3
