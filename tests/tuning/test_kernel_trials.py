"""Decide which kernels are on: only right ones, and by trial only those that are also faster."""

import math
import time
import warnings
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from product_clock import ProductClock
from trial_cases import SHAPE, K, fails, off_by_one_bit, stock, trial

from mlx_mtp.tuning import ab_test, kernel_trials
from mlx_mtp.tuning.kernel_trials import (
    BUDGET,
    VARIABLE,
    KernelTrial,
    decide,
    requested,
    time_pair,
)
from mlx_mtp.tuning.kernel_verdict import MARGIN, KernelVerdict, in_words, off
from mlx_mtp.tuning.verdict_file import MLX_VERSION, RememberedVerdicts


def never(_):
    raise AssertionError("timed")


# Verdicts.


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
def test_a_kernel_is_on_if_right_and_faster(ratio, on, words):
    timed = []
    one = trial()
    verdict = decide([one], lane=None, timer=lambda t: timed.append(t) or ratio)[one.key]
    assert (verdict, str(verdict)) == (KernelVerdict(on, True, ratio, verdict.reason), words)
    assert timed == [one]
    assert one.key == ("double", SHAPE, 3)


@pytest.mark.parametrize("lane", ["exact", "matrix"])
def test_requested_kernels_are_on_if_right_and_not_timed(lane):
    trials = [trial(), trial(off_by_one_bit(), rows=2)]
    with pytest.warns(UserWarning, match="stays off"):
        right, wrong = decide(trials, lane=lane, timer=never).values()
    assert (right.on, str(right)) == (True, "on (asked for)")
    assert (wrong.on, wrong.right, str(wrong)) == (False, False, "off: row 1 of 2 differs from one row alone")


@pytest.mark.parametrize("lane", [None, "exact"])
def test_a_kernel_that_is_wrong_is_wrong_in_every_context(lane):
    right, wrong = trial(), trial(off_by_one_bit(), rows=2)
    longer = [replace(each, shape="longer", base=each.key) for each in (right, wrong)]
    timed = []
    with pytest.warns(UserWarning, match="stays off"):
        verdicts = decide([right, wrong, *longer], lane=lane, timer=lambda t: timed.append(t.key) or 2.0)
    assert [verdicts[each.key].on for each in longer] == [True, False]
    assert sorted(timed) == ([] if lane else sorted([right.key, longer[0].key]))


def test_off_runs_nothing():
    (verdict,) = decide([trial(fails(KeyboardInterrupt()))], lane="off", timer=never).values()
    assert (verdict.on, str(verdict)) == (False, "off: asked for")


def test_invalid_arguments_are_bugs():
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


def takes(now, seconds, ratio):
    return lambda _: now.__setitem__(0, now[0] + seconds) or ratio


def test_the_budget_bounds_all_trials(monkeypatch):
    trials, now = [trial(rows=rows) for rows in (2, 3, 4)], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    verdicts = decide(trials, lane=None, timer=takes(now, 0.6, 2.0), budget=0.5)
    assert [str(v) for v in verdicts.values()] == ["on, 2.00x"] + [
        "off: not tried, the 0.5 s for trials were used up"
    ] * 2
    assert 1 < BUDGET < 60


# One trial is timed, the others of its kernel follow.


def of_a_kind(rows, shape="a", weights=1, ours=stock, kind="k"):
    return replace(trial(ours, rows, shape=shape), kind=kind, weights=weights)


def decided(trials, timer, **how):
    """Return verdicts by (shape, rows), and the (shape, rows) that were timed."""
    timed = []
    found = decide(trials, lane=None, timer=lambda t: timed.append((t.shape, t.rows)) or timer(t), **how)
    return {key[1:]: verdict for key, verdict in found.items()}, timed


def test_the_heaviest_of_a_kind_is_timed_for_all():
    trials = [
        of_a_kind(m, shape, weights) for shape, weights in (("a", 1), ("b 4-bit", 3), ("c", 2)) for m in range(1, 9)
    ]
    verdicts, timed = decided(trials, lambda _: 1.5)
    assert timed == [("b 4-bit", m) for m in (2, 4, 1, 6, 8)]
    assert all(verdict.on for verdict in verdicts.values())
    reported = {place: str(verdicts[place]) for place in (("b 4-bit", 4), ("b 4-bit", 3), ("a", 4), ("c", 7))}
    assert list(reported.values()) == ["on, 1.50x", "on (as M=4)", "on (as b)", "on (as b)"]


def test_another_kind_is_timed_apart():
    _, timed = decided([of_a_kind(2), of_a_kind(2, "b", kind="other")], lambda _: 1.5)
    assert timed == [("a", 2), ("b", 2)]


def test_rows_follow_only_between_two_numbers_that_are_on():
    """Three rows are off because two are: MLX may be faster there although the kernel wins at four."""
    verdicts, timed = decided([of_a_kind(m) for m in (2, 3, 4, 5, 6)], lambda t: 1.01 if t.rows == 2 else 1.5)
    assert [m for _, m in timed] == [2, 4, 6]
    assert [(m, verdict.on) for (_, m), verdict in verdicts.items()] == [
        (2, False), (3, False), (4, True), (5, True), (6, True)
    ]  # fmt: skip
    assert str(verdicts["a", 3]) == "off: no faster"


def test_kernels_that_follow_are_checked():
    wrong_at_three = off_by_one_bit(2, when=lambda x, w: len(x) == 3)
    trials = [
        of_a_kind(m, shape, w, ours)
        for shape, w, ours in (("a", 2, wrong_at_three), ("b", 1, off_by_one_bit()))
        for m in (3, 4)
    ]
    with pytest.warns(UserWarning, match=r"kernel double is wrong .* \(and 2 more\)"):
        verdicts, _ = decided(trials, lambda _: 1.5)
    assert [place for place, verdict in verdicts.items() if verdict.on] == [("a", 4)]


def test_a_wrong_kernel_has_no_followers_and_followers_of_a_slower_one_are_not_run():
    with pytest.warns(UserWarning, match="stays off"):
        verdicts, timed = decided([of_a_kind(4, "a", 2, off_by_one_bit()), of_a_kind(4, "b")], lambda _: 1.5)
    assert (timed, verdicts["b", 4].on) == ([("b", 4)], True)
    slower, _ = decided([of_a_kind(4, "a", 2), of_a_kind(4, "b", 1, fails(KeyboardInterrupt()))], lambda _: 0.9)
    assert str(slower["b", 4]) == "off: slower"


def test_compilation_is_not_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(kernel_trials, "compile_kernel", takes(now, 100.0, None))
    trials = [of_a_kind(2, shape, kind=shape) for shape in "abcd"]
    verdicts, timed = decided(trials, takes(now, 1.0, 1.5), budget=2.5)
    assert (len(timed), now) == (3, [303.0])
    assert str(verdicts["d", 2]) == "off: not tried, the 2.5 s for trials were used up"


def test_trials_stop_on_request_and_the_others_run_later(monkeypatch, own_cache):
    remembered, trials, compiled = RememberedVerdicts("m"), [of_a_kind(2, shape, kind=shape) for shape in "abc"], []
    monkeypatch.setattr(kernel_trials, "compile_kernel", lambda trial: compiled.append(trial.shape))
    first, timed = decided(trials, lambda _: 1.5, remembered=remembered, stop=lambda: len(compiled) == 2)
    assert (compiled, timed) == (["a", "b"], [("a", 2)])  # nothing is timed after the request
    assert [str(verdict) for verdict in first.values()] == ["on, 1.50x", *["off: not tried yet"] * 2]
    later, timed = decided(trials, lambda _: 1.6, remembered=remembered)
    assert timed == [("b", 2), ("c", 2)]
    assert [verdict.ratio for verdict in later.values()] == [1.5, 1.6, 1.6]


def test_findings_are_kept_in_memory_if_no_file_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "file"))
    remembered = RememberedVerdicts("m")
    with pytest.warns(UserWarning, match="cannot be kept"):
        decided([of_a_kind(2)], lambda _: 1.5, remembered=remembered)
    assert decided([of_a_kind(2)], never, remembered=remembered)[1] == []


# Timing.


def work(times, w, clock):
    def run(x):
        y, clock.built = x, clock.built + times
        for _ in range(times):
            y = mx.matmul(mx.matmul(y, w), w)
        return [x[:, :1], y]  # the second output is the one that takes time

    return run


def test_timing_finds_the_faster_side(monkeypatch):
    clock = ProductClock(monkeypatch, ab_test)
    weights = [mx.random.normal((128, 128)) / 12 for _ in range(3)]
    mx.eval(weights)
    layers = [(work(1, w, clock), work(4, w, clock)) for w in weights]
    assert time_pair(KernelTrial("op", "s", 4, layers, 128, mx.float32)) == 4
    assert time_pair(KernelTrial("op", "s", 4, [(b, a) for a, b in layers], 128, mx.float32)) == 1 / 4


def test_chains_alternate_and_each_step_depends_on_the_previous_one(monkeypatch):
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


def test_a_chain_evaluates_each_of_its_steps(monkeypatch):
    clock, w = ProductClock(monkeypatch, ab_test), mx.random.normal((256, 256)) / 16
    ops = [work(4, w, clock)]
    assert [ab_test._chain_seconds(ops, mx.ones((8, 256)), 0, steps) for steps in (1, 20)] == [4, 80]


def test_a_difference_is_measured_despite_other_work_on_the_machine(monkeypatch):
    """Half of the chains take up to ten times as long, as on a busy machine."""
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


# The user's request, and the report.


@pytest.mark.parametrize("lane", ["off", "exact", "matrix"])
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
    with pytest.raises(ValueError, match=r"^MLX_MTP_KERNELS=Exact: allowed are off, exact, matrix$"):
        requested(None)


@pytest.mark.parametrize("value", ["", "on", "OFF", True, 1])
def test_invalid_requests(value):
    with pytest.raises(ValueError, match=f"^kernels={value}: allowed are off, exact, matrix$"):
        requested(value)


def test_report_lines():
    def on(ratio):
        return KernelVerdict(True, True, ratio)

    def following(reason):
        return KernelVerdict(True, True, reason=reason)

    slower, same = (KernelVerdict(False, True, ratio, why) for ratio, why in ((0.9, "slower"), (1.01, "no faster")))
    wrong = [KernelVerdict(False, False, reason=f"row 1 of {m} differs from one row alone") for m in (2, 3)]
    asked = KernelVerdict(True, True, reason="asked for")
    verdicts = {
        **{("qmm", "a", m): on(1.3 + m / 10) for m in (3, 5, 2, 4)},
        **{("qmm", "a", m): slower for m in (6, 7, 8)},
        **{("qmm", "c", m): same for m in (2, 4)},
        **{("qmm", "c", 3): off("no faster"), ("qmm", "c", 6): on(1.5), ("qmm", "c", 5): following("as M=6")},
        **{("qmm", "d", m): following("as a") for m in (2, 3)},
        **{("qmm", "b", 2): wrong[0], ("qmm", "b", 3): wrong[1], ("qmm", "b", 4): on(2.0)},
        **{("head", "a", m): asked for m in (2, 3, 5)},
        **{("moe", "a", 2): on(1.2), ("moe", "a", 3): slower, ("moe", "a", 4): on(1.101), ("moe", "a", 5): on(1.1)},
    }
    assert in_words(verdicts) == (
        "qmm a: M=2-5 on (1.50-1.80x), M=6-8 MLX's own (faster)",
        "qmm c: M=2-4 MLX's own (as fast), M=5-6 on (1.50x)",
        "qmm d: M=2-3 on (as a)",
        "qmm b: M=2-3 off (row 1 of 2 differs from one row alone), M=4 on (2.00x)",
        "head a: M=2-3 on (asked for), M=5 on (asked for)",
        "moe a: M=2 on (1.20x), M=3 MLX's own (faster), M=4-5 on (1.10x)",
    )
    assert in_words({}) == ()


def test_right_kernels_cause_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(v.on for v in decide([trial(rows=m) for m in (2, 8)], lane="exact").values())
