"""Decide which kernels are on: only what is right, and by trial only what is faster too."""

import math
import time
import warnings

import mlx.core as mx
import numpy as np
import pytest
from trial_cases import SHAPE, K, fails, off_by_one_bit, trial

from mlx_mtp.tuning import ab_test
from mlx_mtp.tuning.kernel_trials import (
    BUDGET,
    MARGIN,
    VARIABLE,
    KernelTrial,
    KernelVerdict,
    decide,
    in_words,
    requested,
    time_pair,
)
from mlx_mtp.tuning.verdict_file import MLX_VERSION


def never(_):
    raise AssertionError("timed")


# The trial's verdict.


@pytest.mark.parametrize(
    ("ratio", "on", "words"),
    [
        (1.42, True, "on, 1.42x"),
        (MARGIN + 1e-6, True, "on, 1.02x"),
        (MARGIN, False, "off: no faster, 1.02x"),
        (1.0, False, "off: no faster, 1.00x"),
        (0.93, False, "off: slower, 0.93x"),
    ],
)
def test_on_where_right_and_faster(ratio, on, words):
    timed = []
    one = trial()
    verdict = decide([one], lane=None, timer=lambda t: timed.append(t) or ratio)[one.key]
    assert (verdict, str(verdict)) == (KernelVerdict(on, True, ratio, verdict.reason), words)
    assert timed == [one]
    assert one.key == ("double", SHAPE, 3)


@pytest.mark.parametrize("lane", ["exact", "fast"])
def test_what_is_asked_for_is_on_where_right_and_not_timed(lane):
    trials = [trial(), trial(off_by_one_bit(), rows=2)]
    with pytest.warns(UserWarning, match="stays off"):
        right, wrong = decide(trials, lane=lane, timer=never).values()
    assert (right.on, str(right)) == (True, "on (asked for)")
    assert (wrong.on, wrong.right, str(wrong)) == (False, False, "off: row 1 of 2 differs from one row alone")


def test_off_runs_nothing():
    (verdict,) = decide([trial(fails(KeyboardInterrupt()))], lane="off", timer=never).values()
    assert (verdict.on, str(verdict)) == (False, "off: asked for")


def test_a_lane_that_is_none_is_a_bug():
    with pytest.raises(AssertionError):
        decide([trial()], lane="quick")
    with pytest.raises(AssertionError, match="two trials"):
        decide([trial(), trial()], lane="off")
    with pytest.raises(AssertionError, match="without layers"):
        trial(weights=[])


@pytest.mark.parametrize("lane", [None, "exact"])
def test_wrong_kernels_are_off_and_one_warning_names_the_first_of_each_op(lane):
    wrong_at_3 = off_by_one_bit(2, when=lambda x, w: len(x) == 3)
    others = [trial(off_by_one_bit(), rows, op="other", shape=shape) for shape in "ba" for rows in (2, 3)]
    trials = [others[0], *(trial(wrong_at_3, rows) for rows in (4, 3, 2)), *others[1:]]
    with pytest.warns(UserWarning, match="stays off") as caught:
        verdicts = decide(trials, lane=lane, timer=lambda _: 2.0)
    assert [v.on for v in verdicts.values()] == [False, True, False, True, *[False] * 3]
    found = f"with mlx {MLX_VERSION} and stays off: "
    row = "of 3 differs from one row alone"
    assert sorted(str(w.message) for w in caught) == [
        f"kernel double is wrong {found}{SHAPE}, M=3: row 3 {row}",
        f"kernel other is wrong {found}a, M=2: row 1 of 2 differs from one row alone (and 3 more)",
    ]


def test_a_timing_that_fails_is_off_and_no_crash():
    def timer(_):
        raise RuntimeError("out of memory\nsecond line")

    (verdict,) = decide([trial()], lane=None, timer=timer).values()
    assert str(verdict) == "off: timing it fails with RuntimeError: out of memory"
    with pytest.raises(KeyboardInterrupt):
        decide([trial()], lane=None, timer=fails(KeyboardInterrupt())(0))


def test_the_budget_bounds_all_trials():
    trials = [trial(rows=rows) for rows in (2, 3, 4)]
    verdicts = decide(trials, lane=None, timer=lambda _: time.sleep(0.6) or 2.0, budget=0.5)
    assert [str(v) for v in verdicts.values()] == ["on, 2.00x"] + [
        "off: not tried, the 0.5 s for trials were over"
    ] * 2
    assert 1 < BUDGET < 60


# Right or wrong.


def work(times, w):
    def run(x):
        y = x
        for _ in range(times):
            y = mx.matmul(mx.matmul(y, w), w)
        return [x[:, :1], y]  # the second output is the one that takes time

    return run


def test_the_clock_orders_what_differs():
    weights = [mx.random.normal((128, 128)) / 12 for _ in range(3)]
    mx.eval(weights)
    layers = [(work(1, w), work(12, w)) for w in weights]
    assert time_pair(KernelTrial("op", "s", 4, layers, 128, mx.float32)) > 1.5
    assert time_pair(KernelTrial("op", "s", 4, [(b, a) for a, b in layers], 128, mx.float32)) < 0.67


def test_a_chain_takes_turns_and_each_step_waits_for_the_one_before(monkeypatch):
    calls, chains = [], []

    def side(name, layer):
        return lambda x: calls.append((name, layer, x)) or [x * math.nan, x.sum(axis=-1) - math.inf]

    seconds = ab_test._chain_seconds

    def chain(ops, x, start, steps):
        calls.clear()
        spent = seconds(ops, x, start, steps)
        chains.append((calls[0][0], [layer for _, layer, _ in calls], start))
        assert all(mx.array_equal(given, x) for *_, given in calls)  # also where the outputs are NaN and infinite
        return {"ours": 1e-4, "stock": 3e-4}[calls[0][0]] + 0 * spent

    monkeypatch.setattr(ab_test, "_chain_seconds", chain)
    layers = [(side("ours", i), side("stock", i)) for i in range(5)]
    assert time_pair(KernelTrial("op", "s", 2, layers, K, mx.float32)) == pytest.approx(3)
    steps = round(ab_test.CHAIN_SECONDS * 5 / 3e-4)
    names = [name for name, *_ in chains[4:]]
    assert names == ["stock", "ours", "ours", "stock"] * (ab_test.CHAINS // 2)
    assert [start for *_, start in chains[4:]] == [i * steps for i in range(2 * ab_test.CHAINS)]
    assert all(layers == [(start + i) % 5 for i in range(len(layers))] for _, layers, start in chains)
    assert {len(layers) for _, layers, _ in chains[4:]} == {steps}


def test_a_longer_chain_takes_longer():
    w = mx.random.normal((256, 256)) / 16
    mx.eval(w)
    short, long = (
        min(ab_test._chain_seconds([work(4, w)], mx.ones((8, 256)), 0, steps) for _ in range(4)) for steps in (1, 20)
    )
    assert long > 4 * short


def test_a_difference_is_seen_through_other_work_on_the_machine(monkeypatch):
    """Every other chain takes up to ten times as long, as they do when the machine does something else."""
    draws = np.random.default_rng(0)

    def slow(x):
        return [x]

    def chain(ops, x, start, steps):
        undisturbed = 1e-3 if ops[0] is slow else 0.8e-3
        return undisturbed * (draws.uniform(1, 10) if draws.random() < 1 / 2 else draws.uniform(1, 1.01))

    monkeypatch.setattr(ab_test, "_chain_seconds", chain)
    layers = [(lambda x: [x], slow)]
    for _ in range(30):
        assert time_pair(KernelTrial("op", "s", 2, layers, K, mx.float32)) == pytest.approx(1.25, rel=0.02)


# What the user asks for, and is told.


@pytest.mark.parametrize("lane", ["off", "exact", "fast"])
def test_requested(monkeypatch, lane):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert requested(None) is None
    assert requested(lane) == lane
    monkeypatch.setenv(VARIABLE, "")
    assert requested(None) is None
    monkeypatch.setenv(VARIABLE, lane)
    assert requested(None) == lane
    assert requested("off") == "off"
    monkeypatch.setenv(VARIABLE, "Exact")
    assert requested(lane) == lane
    with pytest.raises(ValueError, match=r"^MLX_MTP_KERNELS=Exact: allowed are off, exact, fast$"):
        requested(None)


@pytest.mark.parametrize("value", ["", "on", "OFF", True, 1])
def test_requests_that_are_none(value):
    with pytest.raises(ValueError, match=f"^kernels={value}: allowed are off, exact, fast$"):
        requested(value)


def test_verdicts_in_words():
    def on(ratio):
        return KernelVerdict(True, True, ratio)

    slower = KernelVerdict(False, True, 0.9, "slower")
    wrong = [KernelVerdict(False, False, reason=f"row 1 of {m} differs from one row alone") for m in (2, 3)]
    asked = KernelVerdict(True, True, reason="asked for")
    verdicts = {
        **{("qmm", "a", m): on(1.3 + m / 10) for m in (3, 5, 2, 4)},
        **{("qmm", "a", m): slower for m in (6, 7, 8)},
        **{("qmm", "b", 2): wrong[0], ("qmm", "b", 3): wrong[1], ("qmm", "b", 4): on(2.0)},
        **{("head", "a", m): asked for m in (2, 3, 5)},
        **{("moe", "a", 2): on(1.2), ("moe", "a", 3): slower, ("moe", "a", 4): on(1.101), ("moe", "a", 5): on(1.1)},
    }
    assert in_words(verdicts) == (
        "qmm a: M=2-5 on (1.50-1.80x), M=6-8 off (slower)",
        "qmm b: M=2-3 off (row 1 of 2 differs from one row alone), M=4 on (2.00x)",
        "head a: M=2-3 on (asked for), M=5 on (asked for)",
        "moe a: M=2 on (1.20x), M=3 off (slower), M=4-5 on (1.10x)",
    )
    assert in_words({}) == ()


def test_a_right_kernel_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(v.on for v in decide([trial(rows=m) for m in (2, 8)], lane="exact").values())
