"""Let texts come and go at random, of every family: each is what it is alone, and so is its cache afterwards."""

import random

import families
import pytest
from fuzzing import LONG, count
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from subjects import subjects

import mlx_mtp
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.decoding.sampling import Sampling

NAMES = ["step3p5", "qwen3_5_moe", "nemotron_h_latent", "mimo_v2_flash", "glm_moe_dsa_shared", "glm4_moe"]
EVERY = ["step3p5", "eagle", *families.FAMILIES]
SAMPLINGS = [{}, {}, {"temp": 1.0}, {"temp": 0.8, "top_k": 3}, {"temp": 1.0, "min_p": 0.05, "xtc_probability": 0.5}]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


class Case:
    """A text of a schedule: how it is asked for, when it comes and, perhaps, goes."""

    def __init__(self, rng: random.Random, vocab: int, most: int):
        self.prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 7, 20, 45]))]
        self.max_tokens, self.k = rng.randint(1, 30), rng.randint(0, most)
        self.sampling, self.seed = rng.choice(SAMPLINGS), rng.randrange(1000)
        self.penalty = rng.choice([None, None, None, 1.3])
        self.own_sampler = rng.random() < 0.2
        self.stops = [[rng.randrange(vocab) for _ in range(rng.choice([1, 2]))]] if rng.random() < 0.3 else []
        self.comes, self.goes = rng.choice([0, 0, 2, 5, 9]), rng.choice([None, None, None, 3, 8])
        self.tokens, self.cache, self.reason = [], None, None

    @property
    def processors(self):
        return make_logits_processors(None, self.penalty) if self.penalty else []

    @property
    def sampler(self):
        return make_sampler(temp=1.0, top_p=0.9) if self.own_sampler else None

    def alone(self, model, layout: dict, n: int = 0) -> list[tuple]:
        options = {} if self.own_sampler else self.sampling
        return list(
            mlx_mtp.generate_step(
                self.prompt,
                model,
                max_tokens=n or self.max_tokens,
                num_draft_tokens=0,
                prefill_step_size=16,
                sampler=self.sampler,
                logits_processors=self.processors,
                seed=self.seed,
                quantized_kv_start=0,
                **options,
                **layout,
            )
        )


def insert(batch: BatchGenerator, case: Case) -> int:
    (uid,) = batch.insert(
        [case.prompt],
        [case.max_tokens],
        samplers=[case.sampler or Sampling(**case.sampling)],
        logits_processors=[case.processors],
        stop_sequences=[case.stops],
        seeds=[case.seed],
        num_draft_tokens=[case.k],
    )
    return uid


def run(model, cases: list[Case], layout: dict, k: int) -> None:
    batch = BatchGenerator(model, prefill_step_size=16, num_draft_tokens=k, quantized_kv_start=0, **layout)
    known, cycle = {}, 0
    while cycle < 10 or any(case.reason is None for case in cases):
        for case in cases:
            if case.comes == cycle:
                known[insert(batch, case)] = case
        for response in batch.next()[1]:
            case = known[response.uid]
            assert case.reason is None
            case.tokens.append(response.token)
            if response.finish_reason:
                case.reason, case.cache = response.finish_reason, response.prompt_cache
                assert response.all_tokens == (case.prompt + case.tokens)[:-1] == case.cache.tokens
        for uid, case in known.items():
            if case.reason is None and case.goes is not None and cycle >= case.comes + case.goes:
                case.cache, held = batch.remove([uid], return_prompt_caches=True)[uid]
                case.reason = "removed"
                assert not case.tokens or held == (case.prompt + case.tokens)[:-1] == case.cache.tokens
        cycle += 1
        assert cycle < 500
    batch.close()


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
        run(s.model, cases, layout, s.k)
        for case in cases:
            assert_as_alone(case, s.model, layout)
