"""Texts of a pool draft with all that a text alone has: the LM head's kernel, lookups, and confidence that cuts."""

import pytest
from subjects import subjects
from sweep import paired

import mlx_mtp
from mlx_mtp.batch import pool_cycle
from mlx_mtp.cache.pool import Pool
from mlx_mtp.decoding import step as one_step
from mlx_mtp.decoding.policy import LOOKUP_DRAFTS
from mlx_mtp.kernels import KernelRefused
from mlx_mtp.layers.lm_head import LMHeadSite, place_heads
from mlx_mtp.tuning.plan import Fixed, Plan

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [2, 3, 4, 2, 3, 4, 2, 3], [4, 4, 1, 4, 4, 1, 4]]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def together(model, n: int = 30, **options) -> tuple[list[list[int]], mlx_mtp.Stats]:
    texts, stats = [[] for _ in PROMPTS], mlx_mtp.Stats()
    batch = mlx_mtp.BatchGenerator(model, adaptive=False, stats=stats, **options)
    batch.insert(PROMPTS, [n] * len(PROMPTS), seeds=[0, 1, 2])
    while responses := batch.next_generated():
        for response in responses:
            texts[response.uid].append(response.token)
    return texts, stats


def alone(model, n: int = 30, **options) -> list[list[int]]:
    return [
        [t for t, *_ in mlx_mtp.generate_step(p, model, max_tokens=n, num_draft_tokens=0, seed=i, **options)]
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture
def verified(monkeypatch):
    """Drafts of each text that a pool's passes verified, and how many passes looked them up."""
    found, real = [], one_step.verify

    def verify(frame, run, drafts, most=None):
        if isinstance(frame.cache, Pool):
            found.append((frame.plan, drafts.k))
        return real(frame, run, drafts, most)

    monkeypatch.setattr(one_step, "verify", verify)
    monkeypatch.setattr("mlx_mtp.batch.pool_cycle.verify", verify)
    return found


@pytest.mark.parametrize(("name", "options"), paired(["step3p5", "qwen3_next"], [{}, {"temp": 1.0}]))
def test_what_is_looked_up_in_a_pool(subject, verified, name, options):
    """By texts of which one repeats itself."""
    model = subject(name).model
    for k in (1, 2):
        texts, stats = together(model, num_draft_tokens=k, prompt_lookup=True, **options)
        assert texts == alone(model, **options)
        looked_up = [drafts for plan, drafts in verified if plan.source == "lookup"]
        assert set(looked_up) <= {LOOKUP_DRAFTS}
        assert stats.lookups >= len(looked_up)
        if not options:  # what is drawn repeats itself by chance only
            assert looked_up
            assert stats.lookup_accepted > 0
        verified.clear()


@pytest.mark.parametrize("p_min", [0.0001, 0.5, 1.0])
def test_confidence_cuts_the_drafts_of_a_pool(subject, verified, p_min):
    """The pass has as many rows as the surest text needs; the others' drafts are verified beside them."""
    s = subject("step3p5")
    texts, _ = together(s.model, num_draft_tokens=3, draft_p_min=p_min, prompt_lookup=False)
    assert texts == alone(s.model)
    counts = {drafts for plan, drafts in verified if plan.p_min}
    assert counts == {0.0001: {3}, 1.0: {0}}.get(p_min, counts)
    assert p_min != 0.5 or len(counts) > 1


def test_drafts_of_a_pool_are_chosen_by_the_lm_heads_kernel(subject, monkeypatch):
    """In one launch for all texts, where it is on for so many rows: no logits are written."""
    model, rows, real = subject("step3p5").model, [], LMHeadSite.ours
    expected, _ = together(model, num_draft_tokens=2, prompt_lookup=False)
    monkeypatch.setattr(LMHeadSite, "ours", lambda site, x: rows.append(x.shape[0]) or real(site, x))
    heads = place_heads(model)
    for head in heads:
        head.rows = frozenset({1, 2, 3, 6, 9})
    try:
        found, _ = together(model, num_draft_tokens=2, prompt_lookup=False)
    finally:
        for head in heads:
            del head.module.choice
    assert found == expected
    assert {3, 9} <= set(rows)  # drafts of three texts, and the verify of three rows of each


def test_plans_of_a_pool_come_in_any_order(subject, monkeypatch, verified):
    """Lookups while heads are idle and while they follow, behind cycles whose confidence was read."""
    s, turn = subject("eagle"), iter(range(10**6))
    expected = alone(s.model, 60)
    sure, plans = Plan(k=2, p_min=True), [Plan(k=2), Plan("lookup", 5), Plan(), Plan("lookup", 7), Plan()]
    plans += [sure, Plan("lookup", 1), *[Plan()] * 9, Plan("lookup", 3), Plan("lookup", 3), Plan(k=2), sure]
    monkeypatch.setattr(Fixed, "plan", lambda *_, **__: plans[next(turn) % len(plans)])
    for replay in (False, True):
        options = {"draft_p_min": 0.2, "prompt_lookup": True, "compile_cycles": replay}
        texts, _ = together(s.model, 60, num_draft_tokens=2, **options)
        assert texts == expected
    assert {(plan.source, plan.p_min) for plan, _ in verified} >= {("lookup", False), ("heads", True)}


def test_a_failure_behind_read_confidence_is_recovered(subject, monkeypatch):
    """Its drafts were evaluated, so that no text's own cache is what it was: all are read again."""
    s, real, calls = subject("step3p5"), pool_cycle.verify, []

    def refused(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KernelRefused([], voted=True)
        return real(*args)

    monkeypatch.setattr(pool_cycle, "verify", refused)
    monkeypatch.setattr("mlx_mtp.tuning.kernel_fallback.Fallback.take", lambda *_: None)
    texts, _ = together(s.model, num_draft_tokens=2, draft_p_min=0.3, prompt_lookup=False)
    assert texts == alone(s.model)
    assert len(calls) > 5
