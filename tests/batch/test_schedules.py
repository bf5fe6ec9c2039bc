"""Let texts come and go at random, of every family: each is what it is alone, and so is its cache afterwards."""

import random

import families
import pytest
from fuzzing import LONG, count
from schedules import Case, Whims, alike, assert_as_alone, run
from subjects import quantizable_model, subjects

import mlx_mtp

NAMES = ["nemotron_h_latent", "glm_moe_dsa_shared"]
EVERY = ["step3p5", "eagle", "quantized", *families.FAMILIES]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.mark.parametrize("name", EVERY if LONG else NAMES)
def test_every_text_is_what_it_is_alone(subject, tiny_models, name, recorded_at_once):
    """Every other schedule is of texts whose cycles can be replayed, and most are."""
    quantized = name == "quantized"
    model = quantizable_model(tiny_models)[0] if quantized else subject(name).model
    most = min(3, model.max_draft_tokens)
    counted = {False: mlx_mtp.Stats(), True: mlx_mtp.Stats()}
    for seed in range(count(1, 60)):
        rng = random.Random(f"{name} {seed}")
        layout = {"kv_bits": rng.choice([4, 8]), "mtp_kv_bits": rng.choice([None, 8])} if quantized else {}
        layout = layout or rng.choice([{}, {"max_kv_size": 24}])
        cases = [Case(rng, model.vocab_size, most) for _ in range(rng.randint(1, 5))]
        if replayed := seed % 2 == 1:
            alike(cases)
        stats = counted[replayed]
        whims = Whims(rng, most) if rng.random() < 0.7 else None
        run(model, cases, layout, most, whims, compile_cycles=replayed, stats=stats)
        for case in cases:
            assert_as_alone(case, model, layout)
    assert counted[False].compiled_cycles == 0
    assert counted[True].compiled_cycles >= 0.8 * counted[True].cycles
