"""Decode every family: tokens equal a cacheless forward's, drafts equal those recomputed from scratch."""

import functools

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from oracle import Oracle, Spy
from scratch import drafts_from_scratch, target_rows
from sweep import SWEEP, paired, sampled

import mlx_mtp

# Tests of the load cover these too; decoding them exercises nothing that a variant of theirs does not.
SIMPLER = ("glm4_moe_untied", "glm_moe_dsa", "nemotron_h")
# A prompt whose output runs past a ring of 40 slots and changes if a row is in the wrong slot.
LONG = np.random.default_rng(0).integers(0, families.V, 36).tolist()


NAMES = [name for name in sorted(families.FAMILIES) if name not in SIMPLER]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """Return (our model, mlx-lm's plain model) of one random checkpoint."""
    path, _, plain = families.build(request.param, tmp_path_factory.mktemp("family"))
    return mlx_mtp.load_model(path), plain


@pytest.fixture(scope="module")
def truth(family):
    """Return greedy tokens from a cacheless forward, computed once per prompt."""
    model, plain = family

    def greedy(prompt):
        return tiny.greedy(plain, list(prompt), 17, ours(model, list(prompt), 17, 0)[0])

    return functools.cache(greedy)


def ours(model, prompt, n, k, **options):
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, stats=stats, **options
    )
    return [token for token, _, _ in steps], stats


def in_families(name: str, values: list, few: list = NAMES):
    """Parametrize each family, or those in `few`, with one of the values; in a sweep with all."""
    return pytest.mark.parametrize(("family", name), paired(sampled(few, NAMES), values), indirect=["family"])


@in_families("length", [30, 1, 30], NAMES[::3])
def test_greedy_equals_cacheless_forward(family, truth, length):
    model, _ = family
    mx.random.seed(length)
    prompt = mx.random.randint(0, families.V, (length,)).tolist()
    for k in (k for k in (sampled((3,), (0, 3)) if length > 1 else (1, 6)) if k <= model.max_draft_tokens):
        assert ours(model, prompt, 17, k, prefill_step_size=11)[0] == truth(tuple(prompt)), f"k={k}"


# Not every k + 1, which would only ever fall on bonus tokens.
@in_families("every", [3, 0, 2, 5], [*NAMES[2::6], *NAMES[4::6]])
def test_right_wrong_and_partly_right_drafts(family, truth, monkeypatch, every):
    model, prompt = family[0], LONG
    text = prompt + truth(tuple(prompt))
    wrong = set(range(36, len(text), every)) if every else set()
    monkeypatch.setattr(model, "drafter", Oracle(model, text, wrong))
    tokens, stats = ours(model, prompt, 16, 3)
    assert tokens == text[36:52]
    assert (stats.acceptance == [1.0] * 3) is (not wrong)


@in_families("length", [30, 3, 1], NAMES[1::2])
def test_drafts_equal_recomputation(family, monkeypatch, length):
    model, plain = family
    mx.random.seed(length)
    prompt = mx.random.randint(0, families.V, (length,)).tolist()
    k, spy = 3, Spy(monkeypatch, model)
    text = prompt + ours(model, prompt, 16, k, prefill_step_size=7)[0]
    found = spy.drafts(text)
    assert len(found) > 5
    rows = target_rows(plain, text)
    for known, drafts in sampled(found[::2], found):
        assert drafts == drafts_from_scratch(model, plain, text[:known], k, rows)


@in_families("stop", [(3, 2), (3, 9), (3, 4)] if not SWEEP else [(3, 2), (0, 4), (3, 9), (3, 1), (3, 4)], NAMES[1::6])
def test_stop_anywhere_save_and_continue(family, truth, monkeypatch, tmp_path, stop):
    """A cache that ends inside an accepted run, and its copy from a file, continue as after one-by-one decoding."""
    (model, _), (k, stop), prompt = family, stop, LONG
    expected = truth(tuple(prompt))[: stop + 8]
    cache = mlx_mtp.make_prompt_cache(model)
    with monkeypatch.context() as patch:
        patch.setattr(model, "drafter", Oracle(model, prompt + expected, {42}))
        steps = mlx_mtp.generate_step(
            prompt, model, num_draft_tokens=k, adaptive=False, prompt_cache=cache, max_tokens=20
        )
        text = [token for _, (token, _, _) in zip(range(stop), steps, strict=False)]
        steps.close()
    assert text == expected[:stop]
    assert cache.tokens == prompt + text[:-1]
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    copy = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)
    snapshot = cache.snapshot()
    for kept in (cache, copy):
        assert ours(model, text[-1:], 8, 2, prompt_cache=kept)[0] == expected[stop:]
    cache.rewind(snapshot)
    assert ours(model, text[-1:], 8, 3, prompt_cache=cache)[0] == expected[stop:]
