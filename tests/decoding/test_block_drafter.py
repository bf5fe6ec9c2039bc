"""Draft with block drafters: the text is the target's, and drafts are those of a forward from scratch."""

import random

import block_drafters
import drafters
import families
import mlx.core as mx
import numpy as np
import pytest
from block_scratch import drafts as from_scratch
from forced_drafts import ForcedBlock
from plans import Listed, follow
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint.block_drafter import set_drafter
from mlx_mtp.tuning.plan import Plan, ladder

V = families.V
KINDS = block_drafters.KINDS
PROMPTS = [np.random.default_rng(n).integers(0, V, n).tolist() for n in (37, 2, 11)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(model with a drafter of a kind, mlx-lm's plain target, tensors, config)"""
    found: dict = {}

    def make(kind, **changes):
        key = kind, *changes.items()
        if key not in found:
            path, config = tmp_path_factory.mktemp("block"), {**KINDS[kind], **changes}
            directory, plain = families.headless(path / "target", drafters.HEADLESS["qwen3"])
            drafter = block_drafters.save(path / "drafter", config)
            model = mlx_mtp.load_model(directory, draft_model=drafter)
            found[key] = model, plain, block_drafters.weights(config), config
        return found[key]

    return make


def ours(model, prompt, k, n=40, **options):
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, **{"adaptive": False, **options})
    return [token for token, _, _ in steps]


def check(calls, text, plain, w, config, least=5):
    """Drafts of calls, in a sweep of each, are those from scratch; `calls`: as `Forced.noted` returns them."""
    assert len(calls) >= least
    for _, position, tokens in calls[:: 1 if SWEEP else 3]:
        assert tokens == from_scratch(plain, w, config, text[: position + 1], len(tokens))[0], position


@pytest.mark.parametrize(("kind", "k"), sampled([("dflash2", 4), ("assistant", 15)], paired(KINDS, range(1, 16))))
def test_drafts_equal_a_forward_from_scratch(made, monkeypatch, kind, k):
    """Behind every number of accepted drafts, with wrapped windows, and prompts shorter than a window.

    The second prompt's cycles have the rows and ends of recorded ones, but are run again each time.
    """
    model, plain, w, config = made(kind)
    own = model.drafter
    monkeypatch.setattr(mx, "compile", lambda function: function)
    for prompt, replay in zip(PROMPTS[:2], (False, True), strict=True):
        text = prompt + ours(model, prompt, 0, 32)
        at = np.cumsum([1 + i % (k + 1) for i in range(k, 60)]) + len(prompt)
        forced = ForcedBlock(own.net).force(V, text, {*at.tolist()})
        set_drafter(model, forced)
        stats = mlx_mtp.Stats()
        options = {"stats": stats, "prefill_step_size": 16, "compile_cycles": replay}
        assert ours(model, prompt, k, 32, **options) == text[len(prompt) :]
        assert stats.accepted[0] > 0
        assert bool(stats.compiled_cycles) == replay
        check(forced.noted(len(text)), text, plain, w, config, least=4 if k > 12 else 5)
    set_drafter(model, own)


@pytest.mark.parametrize("kind", sampled(["assistant"], KINDS))
def test_drafts_behind_pauses_and_in_a_pool(made, monkeypatch, kind):
    model, plain, w, config = made(kind)
    own, prompt = model.drafter, PROMPTS[0]
    texts = [p + ours(model, p, 0, n) for p, n in zip(PROMPTS, (58, 24, 24), strict=True)]
    forced = ForcedBlock(own.net).force(V, texts[0], {*range(0, 200, 5)})
    set_drafter(model, forced)
    with monkeypatch.context() as patch:
        plans = [Plan("block", 3), *[Plan()] * 24, Plan("block", 6), Plan("lookup", 2), Plan("block", 1)]
        follow(patch, Listed(plans))
        assert ours(model, prompt, 6, 58, prompt_lookup=True) == texts[0][37:]
    check(forced.noted(len(texts[0])), texts[0], plain, w, config, 4)
    forced.calls.clear()
    batch, found = mlx_mtp.BatchGenerator(model, num_draft_tokens=4, adaptive=False), [[] for _ in PROMPTS]
    batch.insert(PROMPTS, [20] * 3)
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found == [text[len(p) : len(p) + 20] for p, text in zip(PROMPTS, texts, strict=True)]
    for uid, text in enumerate(texts):
        rows = [
            (source, position, tokens)
            for source, at, members, drafts in forced.calls
            for member, position, tokens in zip(members, at.tolist(), drafts.tokens.tolist(), strict=True)
            if getattr(member, "uid", None) == uid and position < len(text)
        ]
        check(rows, text, plain, w, config)
    set_drafter(model, own)


def test_confidence_is_the_confidence_heads(made):
    model, plain, w, config = made("dspark")
    own, prompt = model.drafter, PROMPTS[2]
    text = prompt + ours(model, prompt, 0, 26)
    forced = ForcedBlock(own.net).force(V, text, {*range(0, 99, 4)})
    set_drafter(model, forced)
    assert ours(model, prompt, 5, 26, draft_p_min=0.3) == text[len(prompt) :]
    found = [(at.item(), drafts) for _, at, _, drafts in forced.calls if at.item() < len(text)]
    assert len(found) > 5
    for position, drafts in found:
        tokens, sure = from_scratch(plain, w, config, text[: position + 1], 5)
        assert drafts.tokens.tolist()[0] == tokens
        np.testing.assert_allclose(drafts.confidence.tolist()[0], sure, atol=1e-4)
    set_drafter(model, own)


FILTERS = [{"temp": 1.0}, {"temp": 0.8, "top_k": 4}, {"temp": 1.0, "top_p": 0.7}]


@pytest.mark.parametrize(("kind", "options"), paired(KINDS, FILTERS))
def test_draws_do_not_depend_on_drafts(made, kind, options):
    model, texts = made(kind)[0], set()
    for k, replay in sampled([(0, False), (3, True)], [(0, False), (3, True), (2, False)]):
        texts.add(tuple(ours(model, PROMPTS[2], k, 12, seed=5, compile_cycles=replay, **options)))
    assert len(texts) == 1


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_drafts_have_the_noise_of_their_positions(made, monkeypatch, kind):
    """At a high temperature the noise decides: drafts drawn with it are right far more often than one in V."""
    model, accepted = made(kind)[0], {}
    for mode in ("coupled", "greedy"):
        stats = mlx_mtp.Stats()
        ours(model, PROMPTS[2], 4, 60 if SWEEP else 30, temp=20.0, seed=1, draft_sampling=mode, stats=stats)
        accepted[mode] = stats.accepted[0] / stats.drafted[0]
    assert accepted["coupled"] > (0.9 if kind == "dflash" else 0.25)
    assert accepted["greedy"] < 0.3


@pytest.mark.parametrize("kind", sampled(["dflash2"], KINDS))
def test_replayed_cycles_draft_the_same(made, kind):
    model = made(kind)[0]
    for k in sampled((2,), (2, 15)):
        found = []
        for replay in (False, True):
            stats = mlx_mtp.Stats()
            found.append((ours(model, PROMPTS[0], k, 24, stats=stats, compile_cycles=replay), stats.accepted))
            assert not replay or stats.compiled_cycles > 10
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", sampled(["dspark"], KINDS))
def test_recorded_steps_are_few(made, monkeypatch, kind):
    """At most 12 of a long answer in which every length follows every other, copies and plain steps included."""
    model, *_ = made(kind)
    own, prompt, n = model.drafter, PROMPTS[2], 2000 if SWEEP else 110
    text = prompt + ours(model, prompt, 0, n, temp=1.0, seed=1)
    rng = random.Random(kind)
    set_drafter(model, ForcedBlock(own.net).force(V, text, {i for i in range(n) if rng.random() < 0.3}))
    every = [Plan("block", k) for k in ladder(15)] + [Plan("lookup", k) for k in (3, 7, 15)] + [Plan()] * 3
    follow(monkeypatch, Listed(rng.choices(every, k=n)))
    stats = mlx_mtp.Stats()
    options = {"temp": 1.0, "seed": 1, "prompt_lookup": True, "compile_cycles": True}
    assert ours(model, prompt, 15, n, stats=stats, **options) == text[len(prompt) :]
    assert stats.compiled_cycles > 0.7 * stats.cycles
    assert 5 < stats.compiled_shapes <= 12
    set_drafter(model, own)


@pytest.mark.parametrize("stop", sampled([(3, 1), (15, 9)], [(3, 1), (15, 9), (0, 30)]))
def test_stop_anywhere_save_rewind_and_continue(made, tmp_path, stop):
    (k, n), (model, plain, w, config) = stop, made("assistant")
    own, prompt = model.drafter, PROMPTS[0]
    text = prompt + ours(model, prompt, 0, n + 12)
    cache = mlx_mtp.make_prompt_cache(model)
    first = ours(model, prompt, k, n, prompt_cache=cache)
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    snapshot = cache.snapshot()
    forced = ForcedBlock(own.net).force(V, text, {*range(0, 99, 3)})
    set_drafter(model, forced)
    loaded = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)
    for i, each in enumerate((cache, loaded, cache)):
        if i == 2:
            cache.rewind(snapshot)
        forced.calls.clear()
        assert first + ours(model, first[-1:], 5, 12, prompt_cache=each) == text[37 : 37 + n + 12]
        check(forced.noted(len(text)), text, plain, w, config, least=3)
    set_drafter(model, own)


def test_few_rows_wait_while_drafting_is_paused(made):
    """Neither a prompt nor a pause keeps the target's states of more than a few tokens."""
    model = made("dflash")[0]
    cache = mlx_mtp.make_prompt_cache(model)
    ours(model, PROMPTS[0] * 4, 0, 90, prompt_cache=cache, prefill_step_size=64)
    assert cache.offset > 200
    assert sum(rows.shape[1] for rows in cache.backlog) <= 80
    assert cache.primed >= cache.offset - 80


def test_quantized_caches(made):
    model = made("dflash", head_dim=32)[0]
    plain = ours(model, PROMPTS[0], 0, 20)
    assert ours(model, PROMPTS[0], 6, 20, mtp_kv_bits=8, kv_group_size=32) == plain


def test_the_default_is_the_trained_block_and_the_controller_chooses(made):
    model, *_ = made("dflash")
    stats = mlx_mtp.Stats()
    text = [t for t, *_ in mlx_mtp.generate_step(PROMPTS[0], model, max_tokens=30, stats=stats)]
    assert stats.num_draft_tokens == model.drafter.most == 15
    assert text == ours(model, PROMPTS[0], 0, 30)
