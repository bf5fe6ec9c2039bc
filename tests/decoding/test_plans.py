"""Any plan follows any plan: tokens are the target's, drafts are exact, and a stop anywhere leaves correct caches."""

import itertools

import families
import mlx.core as mx
import pytest
from oracle import Oracle, Spy
from plans import Listed, Script, follow
from subjects import PLANS, PROMPT, assert_same_rows, quantizable_model, steps, subjects, text_of
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.tuning.plan import Plan


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.mark.parametrize(("length", "seed"), sampled([(1, 0), (30, 3)], [(1, 0), (7, 1), (30, 2), (30, 3)]))
def test_any_plan_follows_any_plan(subject, monkeypatch, length, seed):
    s = subject("step3p5")
    mx.random.seed(length)
    prompt = mx.random.randint(0, 5, (length,)).tolist()
    script, spy, stats = Script(seed, max_drafts=3, p_min=True), Spy(monkeypatch, s.model), Stats()
    follow(monkeypatch, script)
    text = text_of(s.model, prompt, 3, prefill_step_size=(5, 2048)[seed % 2], stats=stats)
    assert text == s.truth(tuple(prompt), 60, tuple(text))
    s.assert_drafts(spy, prompt + text, least=5, most=8)
    kinds = [(c.plan.source, c.plan.p_min, c.plan.k > 0) for c in script.cycles]
    assert {(source, k) for source, _, k in kinds} == {("heads", True), ("heads", False), ("lookup", True)}
    assert len(set(itertools.pairwise(kinds))) >= 8
    assert any(c.prefilled for c in script.cycles)


NAMES = ["qwen3_next", "deepseek_v32", "mimo_v2_flash", "nemotron_h_latent", "eagle"]
OTHERS = [name for name in families.FAMILIES if name not in NAMES]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=sweep) for name in OTHERS)])
def test_every_family(subject, monkeypatch, name):
    s = subject(name)
    script, spy = Script(len(name), max_drafts=s.k, p_min=True), Spy(monkeypatch, s.model)
    follow(monkeypatch, script)
    text = text_of(s.model, PROMPT, s.k, max_tokens=24, prefill_step_size=4)
    assert text == s.truth(tuple(PROMPT), 24, tuple(text))
    s.assert_drafts(spy, PROMPT + text, least=3, most=4)
    assert any(c.prefilled for c in script.cycles)


SLOW_CASES = [
    pytest.param(by, idle, marks=sweep)
    for by, idle in (("lookup", 40), ("plain", 40), ("plain", 100), ("lookup", 100))
]


@pytest.mark.parametrize(("by", "idle"), [("plain", 1), ("lookup", 5), ("plain", 88), *SLOW_CASES])
def test_heads_draft_after_a_pause_as_without_it(subject, monkeypatch, by, idle):
    """More rows than the windows of 8, their rings and one prefill chunk; of 88 rows only the 24 that the windows
    reach are kept.
    """
    s = subject("step3p5")
    spy = Spy(monkeypatch, s.model)
    plans = [PLANS["heads"]] * 2 + [PLANS[by]] * idle
    control = Listed(plans)
    follow(monkeypatch, control)
    text = text_of(s.model, PROMPT, 3, max_tokens=len(plans) + min(len(plans), 16) + 8, prefill_step_size=7)
    caught_up = [c.prefilled for c in control.cycles if c.prefilled]
    assert caught_up == [n for n, c in zip(control.pending, control.cycles, strict=False) if c.prefilled]
    assert caught_up[0] == len(PROMPT) - 1
    assert min(caught_up[1:]) >= min(idle, 24)  # the windows reach no further
    s.assert_drafts(spy, PROMPT + text, least=4, most=12)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_heads_read_a_prompt_if_they_will_draft(subject, k):
    s = subject("qwen3_next")
    cache = mlx_mtp.make_prompt_cache(s.model)
    text_of(s.model, PROMPT, k, prompt_cache=cache, max_tokens=0, prompt_lookup=False)
    assert cache.primed == (len(PROMPT) - 1 if k else 0)


@pytest.fixture(scope="module")
def quantizable(tiny_models):
    return quantizable_model(tiny_models)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=sweep) for seed in (1, 2))])
@pytest.mark.parametrize("start", sampled([12], [0, 12, 30]))
def test_quantizing_in_the_middle(quantizable, monkeypatch, start, seed):
    model, plain = quantizable
    options = {"kv_bits": (4, 8)[seed % 2], "kv_group_size": 32, "quantized_kv_start": start}
    expected = plain(tuple(options.items()))
    follow(monkeypatch, Script(seed, max_drafts=3, p_min=True))
    cache = mlx_mtp.make_prompt_cache(model, **options, mtp_kv_bits=8)
    assert text_of(model, PROMPT, 3, prompt_cache=cache, prefill_step_size=5) == expected
    assert cache.quantizing is None


@pytest.mark.parametrize("plan", ["lookup", "sure", pytest.param("heads", marks=sweep)])
def test_plans_are_cut_short_before_quantizing(quantizable, monkeypatch, plan):
    """Down to zero drafts: such a cycle is plain, whatever its source was."""
    model, plain = quantizable
    for start in range(len(PROMPT) + 2, len(PROMPT) + 6):
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
        control, stats, expected = Listed([PLANS[plan]]), Stats(), plain((*options.items(), ("max_tokens", 12)))
        with monkeypatch.context() as patch:
            follow(patch, control)
            assert text_of(model, PROMPT, 3, max_tokens=12, stats=stats, **options) == expected
        assert_adds_up(stats, control)
        assert all(c.plan == Plan() or c.plan.k for c in control.cycles)
        assert not any(c.context < start <= c.context + c.plan.k for c in control.cycles)


def test_caches_are_quantized_at_their_position(quantizable, monkeypatch):
    """With drafts that are all accepted. Only a cycle before which that position may be reached is built late."""
    model, _ = quantizable
    found, real, late = [], PromptCache.quantize_at, []

    def quantize_at(cache, position):
        due = cache.quantizing
        real(cache, position)
        if due and not cache.quantizing:
            found.append(position - due.start)

    monkeypatch.setattr(PromptCache, "quantize_at", quantize_at)
    options = {"max_tokens": 24, "prompt_lookup": False, "draft_p_min": 0.0, "adaptive": False}
    truth = PROMPT + text_of(model, PROMPT, 0, **options)
    monkeypatch.setattr(model, "drafter", Oracle(model, truth, set()))
    for start in (len(PROMPT) + 8, len(PROMPT) + 11):
        text_of(
            model,
            PROMPT,
            3,
            stats=(stats := Stats()),
            kv_bits=8,
            kv_group_size=32,
            quantized_kv_start=start,
            **options,
        )
        late.append(stats.built_late["quantizing the caches"])
    assert found == [0, 0]
    assert late == [1, 2]  # without and with a shorter cycle before


def assert_adds_up(stats: Stats, control) -> None:
    """The stats count the cycles that the control observed."""
    cycles = control.cycles
    assert stats.cycles == len(cycles) == sum(stats.lengths.values())
    assert stats.waits == stats.cycles + sum(c.plan.p_min for c in cycles)
    by = {source: [c for c in cycles if c.plan.source == source] for source in ("heads", "lookup")}
    assert stats.lookups == len(by["lookup"])
    assert stats.lookup_drafted == sum(c.verified for c in by["lookup"])
    assert stats.lookup_accepted == sum(c.accepted for c in by["lookup"])
    for depth in range(len(stats.drafted)):
        assert stats.drafted[depth] == sum(c.verified > depth for c in by["heads"])
        assert stats.accepted[depth] == sum(c.accepted > depth for c in by["heads"])
    # Every token but the first is from a cycle; the last one may have been cut.
    tokens = stats.cycles + sum(stats.accepted) + stats.lookup_accepted
    assert 0 <= tokens - (stats.generation_tokens - 1) <= cycles[-1].accepted


@pytest.mark.parametrize("seed", sampled([0], range(2)))
def test_a_window_on_full_attention(subject, monkeypatch, seed):
    s = subject("step3p5")
    expected = text_of(s.model, PROMPT, 0, prompt_lookup=False, max_kv_size=12, max_tokens=36)
    follow(monkeypatch, Script(seed, max_drafts=3, p_min=True))
    assert text_of(s.model, PROMPT, 3, max_kv_size=12, max_tokens=36, prefill_step_size=(5, 2048)[seed]) == expected


@pytest.mark.parametrize("name", sampled(["qwen3_5", "mimo_v2_flash"], ["step3p5", "qwen3_5", "mimo_v2_flash"]))
def test_turns_that_end_anywhere(subject, monkeypatch, name):
    """Turns end by a limit, the caller or a stop token; each continues after the last token with exact drafts."""
    s, text = subject(name), list(PROMPT)
    spy = Spy(monkeypatch, s.model)
    cache = mlx_mtp.make_prompt_cache(s.model)
    for turn, n in enumerate(sampled((1, 7, 4), (1, 9, 4, 11, 2))):
        follow(monkeypatch, Script(turn, max_drafts=s.k, p_min=True))
        new, how = text[len(cache.tokens) :], ("limit", "close", "stop")[turn % 3]
        truth = s.truth(tuple(text), 12)
        stops = {truth[n - 1]} if how == "stop" else ()
        limit = n if how == "limit" else 12
        generation = steps(
            s.model, new, s.k, prompt_cache=cache, max_tokens=limit, stop_tokens=stops, prefill_step_size=3
        )
        shown = []
        for token, _, _ in generation:
            shown.append(token)
            if how == "close" and len(shown) == n:
                generation.close()
        assert shown == truth[: truth.index(truth[n - 1]) + 1 if how == "stop" else n]
        assert cache.tokens == (text + shown)[:-1]
        assert_same_rows(s.model, cache, s.read(tuple(cache.tokens)))
        s.assert_drafts(spy, text + shown, least=0, most=3)
        spy.calls.clear()
        text += [*shown, 3, 1, 2][: len(shown) + turn]
