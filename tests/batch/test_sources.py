"""Sequences of a pool draft as a lone one does: with the LM head's kernel, lookups and p_min."""

import functools

import pytest
from subjects import subjects
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.cache.pool import Pool
from mlx_mtp.decoding import early, step
from mlx_mtp.decoding.policy import LOOKUP_DRAFTS
from mlx_mtp.kernels import KernelRefused
from mlx_mtp.layers.lm_head import LMHeadSite, place_heads
from mlx_mtp.tuning.plan import Fixed, Plan

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [2, 3, 4, 2, 3, 4, 2, 3], [4, 4, 1, 4, 4, 1, 4]]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def together(model, n: int = 24, **options) -> tuple[list[list[int]], mlx_mtp.Stats]:
    texts, stats = [[] for _ in PROMPTS], mlx_mtp.Stats()
    batch = mlx_mtp.BatchGenerator(model, adaptive=False, stats=stats, **options)
    batch.insert(PROMPTS, [n] * len(PROMPTS), seeds=[0, 1, 2])
    while responses := batch.next_generated():
        for response in responses:
            texts[response.uid].append(response.token)
    return texts, stats


@pytest.fixture(scope="module")
def alone(subject):
    """Return the prompts' tokens by a family's model, each decoded alone by plain steps, computed once."""

    @functools.cache
    def texts(name, **options):
        model, options = subject(name).model, {"max_tokens": 24, "num_draft_tokens": 0, **options}
        return [[t for t, *_ in mlx_mtp.generate_step(p, model, seed=i, **options)] for i, p in enumerate(PROMPTS)]

    return texts


@pytest.fixture
def verified(monkeypatch):
    """Record the plan and the number of drafts of each verify of a pool."""
    found, real = [], step.verify

    def verify(frame, run, drafts, limits=None):
        if isinstance(frame.cache, Pool):
            found.append((frame.plan, drafts.k))
        return real(frame, run, drafts, limits)

    monkeypatch.setattr(step, "verify", verify)
    monkeypatch.setattr(early, "verify", verify)
    return found


@pytest.mark.parametrize(("name", "options"), paired(["step3p5", "qwen3_next"], [{}, {"temp": 1.0}]))
def test_lookups_in_a_pool(subject, alone, verified, name, options):
    """One of the sequences repeats itself."""
    model = subject(name).model
    for k in sampled((2,), (1, 2)):
        texts, stats = together(model, num_draft_tokens=k, prompt_lookup=True, **options)
        assert texts == alone(name, **options)
        looked_up = [drafts for plan, drafts in verified if plan.source == "lookup"]
        assert set(looked_up) <= {LOOKUP_DRAFTS}
        assert stats.lookups >= len(looked_up)
        if not options:  # what is drawn repeats itself by chance only
            assert looked_up
            assert stats.lookup_accepted > 0
        verified.clear()


@pytest.mark.parametrize("p_min", [0.0001, 0.5, 1.0])
def test_confidence_cuts_the_drafts_of_a_pool(subject, alone, verified, p_min):
    """A pass has the rows of the sequence with the most probable drafts; the others' drafts are verified too."""
    s = subject("step3p5")
    texts, _ = together(s.model, num_draft_tokens=3, draft_p_min=p_min, prompt_lookup=False)
    assert texts == alone("step3p5")
    counts = {drafts for plan, drafts in verified if plan.p_min}
    assert counts == {0.0001: {3}, 1.0: {0}}.get(p_min, counts)
    assert p_min != 0.5 or len(counts) > 1


def test_drafts_of_a_pool_are_chosen_by_the_lm_heads_kernel(subject, monkeypatch):
    """One launch for all sequences, if the kernel is on for that number of rows; no logits are written."""
    model, rows, real = subject("step3p5").model, [], LMHeadSite.tokens
    expected, _ = together(model, num_draft_tokens=2, prompt_lookup=False)

    def noted(site, x, *mask, fused):
        rows.append(x.shape[0])
        return real(site, x, *mask, fused=fused)

    monkeypatch.setattr(LMHeadSite, "tokens", noted)
    heads = place_heads(model)
    for head in heads:
        head.rows = frozenset({1, 2, 3, 6, 9})
    try:
        found, _ = together(model, num_draft_tokens=2, prompt_lookup=False)
    finally:
        for head in heads:
            del head.module.choice
    assert found == expected
    assert {3, 9} <= set(rows)  # drafts of three sequences, and the verify of three rows of each


def test_plans_of_a_pool_in_any_order(subject, alone, monkeypatch, verified):
    """Lookups while heads are paused and while they read, after cycles with p_min."""
    s, turn = subject("eagle"), iter(range(10**6))
    expected = alone("eagle", max_tokens=44)
    sure, plans = Plan(k=2, p_min=True), [Plan(k=2), Plan("lookup", 5), Plan(), Plan("lookup", 7), Plan()]
    plans += [sure, Plan("lookup", 1), *[Plan()] * 9, Plan("lookup", 3), Plan("lookup", 3), Plan(k=2), sure]
    monkeypatch.setattr(Fixed, "plan", lambda *_, **__: plans[next(turn) % len(plans)])
    for replay in sampled((True,), (False, True)):
        options = {"draft_p_min": 0.2, "prompt_lookup": True, "compile_cycles": replay}
        texts, _ = together(s.model, 44, num_draft_tokens=2, **options)
        assert texts == expected
    assert {(plan.source, plan.p_min) for plan, _ in verified} >= {("lookup", False), ("heads", True)}


def test_a_failure_after_reading_the_confidence_is_recovered(subject, alone, monkeypatch):
    """The drafts were evaluated and have changed the caches: all sequences are prefilled again."""
    s, real, calls = subject("step3p5"), early.verify, []

    def refused(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KernelRefused([], voted=True)
        return real(*args)

    monkeypatch.setattr(early, "verify", refused)
    monkeypatch.setattr("mlx_mtp.tuning.kernel_fallback.Fallback.take", lambda *_: None)
    texts, _ = together(s.model, num_draft_tokens=2, draft_p_min=0.3, prompt_lookup=False)
    assert texts == alone("step3p5")
    assert len(calls) > 5
