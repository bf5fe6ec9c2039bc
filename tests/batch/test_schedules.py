"""Let texts come and go at random, of every family: each is what it is alone, and so is its cache afterwards."""

import random

import families
import pytest
from fuzzing import LONG, count
from schedules import Case, Whims, run
from subjects import subjects

import mlx_mtp

NAMES = ["step3p5", "qwen3_5_moe", "nemotron_h_latent", "mimo_v2_flash", "glm_moe_dsa_shared", "glm4_moe"]
EVERY = ["step3p5", "eagle", *families.FAMILIES]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def expected(case: Case, model, layout: dict) -> list[int]:
    text = [token for token, *_ in case.alone(model, layout)]
    for end in range(1, len(text) + 1):
        if any(text[:end][-len(stop) :] == stop for stop in case.stops):
            return text[:end]
    return text


def assert_as_alone(case: Case, model, layout: dict) -> None:
    text = expected(case, model, layout)
    assert case.tokens == (text[: len(case.tokens)] if case.reason == "removed" else text)
    if not case.tokens:
        return
    more = {"max_tokens": 5, "num_draft_tokens": min(case.k, 1)}
    plain = {"num_draft_tokens": 0, "prefill_step_size": 16, "quantized_kv_start": 0}
    fresh = mlx_mtp.generate_step(case.prompt + case.tokens, model, max_tokens=5, **plain, **layout)
    again = mlx_mtp.generate_step(case.tokens[-1:], model, prompt_cache=case.cache, **more)
    assert [token for token, *_ in again] == [token for token, *_ in fresh]


@pytest.mark.parametrize("name", EVERY if LONG else NAMES)
def test_every_text_is_what_it_is_alone(subject, name):
    s = subject(name)
    for seed in range(count(1, 60)):
        rng = random.Random(f"{name} {seed}")
        layout = rng.choice([{}, {}, {"max_kv_size": 24}, {"kv_bits": 8}])
        if layout.get("kv_bits") and (s.model.NO_KV_BITS or s.model.args.head_dim % 32):
            layout = {}
        cases = [Case(rng, s.model.vocab_size, s.k) for _ in range(rng.randint(1, 5))]
        run(s.model, cases, layout, s.k, Whims(rng, s.k) if rng.random() < 0.7 else None)
        for case in cases:
            assert_as_alone(case, s.model, layout)
