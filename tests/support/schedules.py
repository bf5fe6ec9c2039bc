"""Random schedules of sequences that join and leave a batch."""

import random
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_mtp
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.decoding import alone, driver
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.tuning.plan import SHORTEST, Plan

SAMPLINGS = [{}, {}, {"temp": 1.0}, {"temp": 0.8, "top_k": 3}, {"temp": 1.0, "min_p": 0.05, "xtc_probability": 0.5}]


class Case:
    """A sequence of a schedule: its request, the cycle at which it joins, and perhaps when it is removed."""

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

    def alone(self, model, layout: dict, n: int) -> tuple[list[int], mlx_mtp.PromptCache]:
        """Return the first n tokens of plain decoding, and the cache after them."""
        cache = mlx_mtp.make_prompt_cache(model, **layout)
        how = {"prompt_cache": cache, "sampler": self.sampler, "logits_processors": self.processors}
        options = {} if self.own_sampler else self.sampling
        plain = {"num_draft_tokens": 0, "prefill_step_size": 16, "seed": self.seed}
        steps = mlx_mtp.generate_step(self.prompt, model, max_tokens=n, **plain, **how, **options)
        return [token for token, *_ in steps], cache


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


class Whims:
    """Random plans, with series of plain cycles after which paused heads leave a pool; replaces a control.

    trees: most of the model's drafts are trees.
    """

    def __init__(self, rng: random.Random, most: int, *, trees: bool = False):
        self.rng, self.most, self.plain, self.trees = rng, most, 0, trees

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        self.plain = (
            self.plain - 1 if self.plain else self.rng.choice([*([0] * 9 if self.trees else ()), 0, 0, 0, 2, 12])
        )
        return Plan(k=0 if self.plain else self.rng.randint(0, self.most))

    def drafting(self, k: int) -> Plan:
        """Return a plan of k drafts of the model's drafter."""
        if self.trees and k and self.rng.random() < 0.8:
            return Plan(k=k, tree=True)
        return Plan(k=k, p_min=k > 0 and not self.trees and self.rng.random() < 0.2)

    def observe(self, cycle) -> None:
        assert 0 <= cycle.accepted <= cycle.verified
        assert len(cycle.depths) in (0, cycle.verified)
        assert not cycle.prefilled or (cycle.plan.k and cycle.plan.source == "heads")


class Bounded:
    """Random plans with a maximum of drafts, also of lookups and with p_min."""

    def __init__(self, plans: Whims, most: int, max_lookup: int):
        self.plans, self.most, self.max_lookup, self.observe = plans, most, max_lookup, plans.observe

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        k, rng = min(self.plans.plan().k, self.most), self.plans.rng
        if self.max_lookup and rng.random() < 0.3:
            return Plan("lookup", rng.randint(1, self.max_lookup))
        return self.plans.drafting(k)


def alike(cases: list[Case]) -> None:
    """Give all cases the sampling of the first, without samplers or penalties."""
    for case in cases:
        case.sampling, case.own_sampler, case.penalty = cases[0].sampling, False, None


class LoneWhims(Whims):
    """Random plans of a lone sequence, also of lookups and with p_min or trees."""

    def __init__(self, rng: random.Random, most: int, max_lookup: int, *, trees: bool = False):
        super().__init__(rng, most, trees=trees)
        self.max_lookup = max_lookup

    @classmethod
    def of(cls, whims: Whims, model, k: int, max_lookup: int, **how) -> "LoneWhims":
        """Replace `control_for`."""
        return cls(whims.rng, k, max_lookup, trees=whims.trees)

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        if self.max_lookup and matched >= SHORTEST and self.rng.random() < 0.5:
            return Plan("lookup", self.rng.randint(1, self.max_lookup))
        return self.drafting(super().plan().k)

    def observe(self, cycle) -> None:
        assert 0 <= cycle.accepted <= cycle.verified


def run(model, cases: list[Case], layout: dict, k: int, whims: Whims | None, **options) -> None:
    """Run a schedule; with whims, plans are random, and a single sequence leaves the pool after a random time."""
    fixed = {"adaptive": False, "num_draft_tokens": k, "quantized_kv_start": 0}
    with ExitStack() as stack:
        if whims:
            rng = whims.rng
            stack.enter_context(patch.object(driver, "CALM", rng.choice([1, 1, 2, 16])))
            stack.enter_context(patch.object(alone, "control_for", partial(LoneWhims.of, whims)))
            fixed |= {"prompt_lookup": k > 0, "draft_p_min": 0.3}
        batch = BatchGenerator(model, prefill_step_size=16, **fixed, **layout, **options)
        if whims:
            batch._drivers.controls = lambda _, most, max_lookup: Bounded(whims, most, max_lookup)
        drive(batch, cases)
        batch.close()


def drive(batch: BatchGenerator, cases: list[Case]) -> None:
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


def ended(case: Case, text: list[int]) -> list[int]:
    """Return the tokens up to the first stop sequence."""
    for end in range(1, len(text) + 1):
        if any(text[:end][-len(stop) :] == stop for stop in case.stops):
            return text[:end]
    return text


def assert_as_alone(case: Case, model, layout: dict) -> None:
    text, cache = case.alone(model, layout, case.max_tokens)
    text, n = ended(case, text), len(case.tokens)
    assert case.tokens == (text[:n] if case.reason == "removed" else text)
    if n == 0:
        return
    if n < case.max_tokens:
        _, cache = case.alone(model, layout, n)
    ours, theirs = (
        mlx_mtp.generate_step(case.tokens[-1:], model, prompt_cache=each, max_tokens=5, num_draft_tokens=k)
        for each, k in ((case.cache, min(case.k, 1)), (cache, 0))
    )
    assert [token for token, *_ in ours] == [token for token, *_ in theirs]
