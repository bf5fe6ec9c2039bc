"""Check choosing tokens without logits: the same tokens with and without drafts, and the same draws."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from headed import build_headed
from metal_cases import linux_only
from sweep import sampled

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.pick import pick
from mlx_mtp.decoding.sampling import Picker, Sampling
from mlx_mtp.layers import with_heads
from mlx_mtp.layers.lm_head import LMHeadSite, place_heads
from mlx_mtp.layers.runtime import Runtime
from mlx_mtp.tuning import ab_test

PROMPT = [1, 2, 3, 4, 1]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    config = {**tiny.CONFIG, "vocab_size": 41}
    path = tiny.save(tmp_path_factory.mktemp("step"), config, tiny.random_weights(config))
    return mlx_mtp.load_model(path)


@pytest.fixture
def heads(step):
    placed = place_heads(step)
    yield placed
    for head in placed:
        del head.module.choice


def text(model, k, **options):
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=7, num_draft_tokens=k, adaptive=False, seed=5, **options)
    return [token for token, _, _ in steps]


@linux_only
@pytest.mark.parametrize(
    "options",
    sampled([{"temp": 1.0, "top_k": 5, "top_p": 0.9}], [{}, {"temp": 1.0}, {"temp": 1.0, "top_k": 5, "top_p": 0.9}]),
)
def test_drafts_do_not_change_the_tokens(step, heads, options):
    """Also if the kernel is on for one row count only, or off."""
    expected, kernels = text(step, 0, **options), set()
    for rows in ({1, 3}, {3}):
        for head in heads:
            head.rows = frozenset(rows)
        for k in (0, 2):
            with emulator.emulated(emulator.Options(traffic=False)) as launches:
                found = text(step, k, **options)
            kernels |= {launch.kernel for launch in launches}
            assert found == expected
    assert kernels == ({"choose_rows"} if "top_k" in options else {"verify_head_dense", "verify_head_merge"})


@linux_only
def test_no_logits_are_computed(step, heads, monkeypatch):
    for head in heads:
        head.rows = frozenset({1, 3})
    monkeypatch.setattr(with_heads, "logits_of", None)
    monkeypatch.setattr(LMHeadSite, "logits", None)
    with emulator.emulated(emulator.Options(traffic=False)):
        for options in ({}, {"temp": 1.0}):
            assert len(text(step, 2, **options)) == 7


def test_heads_are_off_at_first(step, heads):
    assert [head.rows for head in heads] == [frozenset()] * 4
    assert step.choice(step.no_hidden()) is None
    assert text(step, 2) == text(step, 0)


NEEDING = [
    Picker(processors=[lambda tokens, logits: logits]),
    Picker(logprobs=True),
    Picker(sampler=lambda logprobs: mx.argmax(logprobs, axis=-1)),
    *(Picker(Sampling(temp=1.0, **filters)) for filters in ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3})),
    Picker(Sampling(temp=1.0, xtc_probability=0.5)),
]


@pytest.mark.parametrize("picker", NEEDING)
def test_options_that_need_logits_get_them(picker):
    """Processors, logprobs, a user's sampler, and filters."""
    hidden, asked = mx.zeros((1, 1, 4)), []
    given = {"choice": None, "runtime": Runtime()}
    model = SimpleNamespace(logits=lambda rows: asked.append(rows) or mx.zeros((1, 1, 8)), **given)
    pick(model, hidden, 0, None, [Single(picker)])
    assert asked == [hidden]


def is_head(path, module):
    return path.endswith(("embed_tokens", "lm_head", "head")) and module.weight.shape[0] > 8


@linux_only
@pytest.mark.parametrize(
    ("name", "count", "quantized"),
    sampled(
        [("eagle", 2, True), ("nemotron_h", 1, False)],
        [("eagle", 2, True), ("eagle", 2, False), ("mimo", 1, True), ("nemotron_h", 1, False)],
    ),
)
def test_drafts_are_chosen_without_logits(name, count, quantized, tmp_path):
    """By the head's own LM head, a shared one, and a tied embedding."""
    model = build_headed(name, tmp_path)
    if quantized:
        nn.quantize(model, 32, 4, class_predicate=is_head)
    off = text(model, 1)
    heads = place_heads(model)
    assert len(heads) == count
    output = mx.random.normal((1, 1, model.mtp[0].norm.weight.size))
    expected = mx.argmax(model.draft_logits(0, output)).item()
    assert model.draft_choice(0, output).item() == expected
    for head in heads:
        head.rows = frozenset({1, 2})
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        assert model.draft_choice(0, output).item() == expected
        assert text(model, 1) == off
    product = "verify_head" if quantized else "verify_head_dense"
    assert {product, "verify_head_merge"} <= {launch.kernel for launch in launches}


def test_a_choice_is_two_launches(heads, monkeypatch):
    """Arrays that only a draw needs are not created for a greedy choice. The graph is recorded, not computed."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    names, x = [], mx.zeros((2, 32))

    def note(event):
        if event["type"] == "primitive":
            names.append(event["name"])

    mx.export_function(note, heads[0].ours, x)
    assert names.count("CustomKernel") == 2
    assert "Full" not in names


@linux_only
def test_a_trial_judges_them(step, heads, monkeypatch):
    monkeypatch.setattr(ab_test, "DRAWS", 2)
    head = heads[0]
    assert head.shape == "41x32 float32"
    assert head.candidates == tuple(range(1, 9))
    pairs = [(head.ours, head.stock)]
    with emulator.emulated(emulator.Options(traffic=False)):
        for rows in (1, 4):
            trial = ab_test.KernelTrial(head.op, head.shape, rows, pairs, head.width, mx.float32)
            assert ab_test.check(trial) is None
        wrong = [(lambda x: [mx.maximum(y, 1) for y in head.ours(x)], head.stock)]
        trial = ab_test.KernelTrial(head.op, head.shape, 4, wrong, head.width, mx.float32)
        always = ab_test.KernelTrial(
            head.op, head.shape, 4, [(lambda x: [head.ours(x)[0] + 1], head.stock)], 32, mx.float32
        )
        assert "differs from one row alone" in str(ab_test.check(always))
    assert np.isfinite(ab_test.time_pair(trial))
