"""Heads in a pool draft what they draft alone, after any pauses, joins and departures."""

import random
from itertools import count as counted

import mlx.core as mx
import pytest
from fuzzing import count
from oracle import Spy
from schedules import Case, Whims, run
from subjects import subjects
from sweep import sampled

from mlx_mtp import BatchGenerator
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.decoding import driver
from mlx_mtp.tuning.kernel_fallback import GraphFailed, KernelRefused
from mlx_mtp.tuning.plan import Fixed, Plan

NAMES = ["step3p5", "qwen3_next", "mimo_v2_flash", "eagle"]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def fail_at_random(monkeypatch, rng) -> None:
    """Let one of eight submitted cycles fail before or after the work, as a refused kernel or a whole graph."""
    real = driver.submit

    def submit(seating, last, new):
        if (place := rng.randrange(16)) == 0:
            raise KernelRefused([], voted=True)
        real(seating, last, new)
        if place == 1:
            raise GraphFailed(RuntimeError("lost"))

    monkeypatch.setattr(driver, "submit", submit)
    monkeypatch.setattr("mlx_mtp.tuning.kernel_fallback.Fallback.take", lambda *_: None)


@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_drafts_are_those_from_scratch(subject, monkeypatch, name, errors):
    """In the pool, and for lone sequences before and after it; also after errors."""
    s = subject(name)
    spy = Spy(monkeypatch, s.model)
    checked = [0, 0]
    if errors:
        fail_at_random(monkeypatch, random.Random(1))
    for seed in range(5, 5 + count(2 - errors, 10)):
        rng = random.Random(seed)
        cases = [Case(rng, s.model.vocab_size, s.k) for _ in range(4)]
        for case in cases:
            case.sampling, case.own_sampler, case.penalty, case.stops, case.goes = {}, False, None, [], None
            case.max_tokens = 30
            case.comes, case.k = case.comes + 12, s.k
        cases[0].comes, cases[0].max_tokens, cases[1].k = 0, 70, 1 if errors else s.k
        spy.calls.clear()
        run(s.model, cases, {}, s.k, Whims(rng, s.k))
        found, text_of = [], {id(case.cache): case.prompt + case.tokens for case in cases}
        for offset, members, drafts, cache in spy.calls:
            for member, position, row in zip(members, offset.tolist(), drafts.tolist(), strict=True):
                if member and isinstance(cache, PromptCache):
                    found.append((text_of[id(cache)], position, row, 1))
                elif member:
                    found.append((member.all_tokens, position, row, 0))
        for tokens, position, drafts, where in found:
            if position + 1 <= len(tokens) and rng.random() < (1 if where else 0.6):
                assert drafts == s.scratch(tokens[: position + 1], len(drafts))
                checked[where] += 1
    assert min(checked) >= 5


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_heads_draft_after_long_pauses_as_from_scratch(subject, monkeypatch, name):
    """Two of 30 cycles draft; in the others one sequence ends, two join, and kept rows are distributed repeatedly."""
    s, turn, read = subject(name), counted(), []
    spy = Spy(monkeypatch, s.model)
    copies = [Plan("lookup", 1), *[Plan()] * 2]
    plans = [*[Plan()] * 19, *copies * 3, *[Plan(k=s.k)] * 2]
    monkeypatch.setattr(Fixed, "plan", lambda *_, **__: plans[next(turn) % 30])
    monkeypatch.setattr(Fixed, "observe", lambda _, cycle: read.append(cycle.prefilled))
    batch = BatchGenerator(s.model, num_draft_tokens=s.k, adaptive=False, prompt_lookup=True)
    prompts = mx.random.randint(0, s.model.vocab_size, (4, 9), key=mx.random.key(3)).tolist()
    batch.insert(prompts[:2], [10, 52])
    for late in prompts[2:]:
        for _ in range(9):
            batch.next()
        batch.insert([late], [56])
    while batch.next_generated():
        pass
    checked = 0
    for offset, members, every, _ in spy.calls:
        for sequence, position, drafts in zip(members, offset.tolist(), every.tolist(), strict=True):
            if sequence and position + 1 <= len(sequence.history.tokens):
                assert drafts == s.scratch(sequence.history.tokens[: position + 1].tolist(), len(drafts))
                checked += 1
    assert checked >= 8
    # The windows of step3p5 reach 24 rows; the sequence that joins last has fewer.
    assert name != "step3p5" or [rows for rows in read if rows] == [24 + 24 + 18, 24 + 24]
