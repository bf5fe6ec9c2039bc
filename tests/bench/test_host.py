"""Check the accounting of bench/host.py: the parts of a cycle, and where cycles end."""

import time
from importlib import import_module

import mlx.core as mx
import pytest

host = import_module("host")


def test_parts_of_a_cycle_add_up():
    # Seconds of submitting, waiting, CPU in both, wall and CPU at the ends of two cycles.
    moments = [(0.0, 0.0, 0.0, 10.0, 5.0), (0.001, 0.004, 0.002, 10.008, 5.006), (0.003, 0.004, 0.003, 10.018, 5.013)]
    found = host.differences(moments)
    expected = {"build": [3, 8], "submit": [1, 2], "wait": [4, 0], "total": [8, 10], "CPU build": [4, 6]}
    for part, ms in {**expected, "CPU total": [6, 7]}.items():
        assert found[part] == pytest.approx(ms), part


def test_a_cycle_ends_with_a_token_that_is_not_a_draft():
    drafted = [False] * (host.WARM + 1) + [True, True, False] + [False] + [True, False] + [True] * 100
    ms, tokens = host.cycles_of(iter(drafted), host.Clock(), 3)
    assert len(ms["total"]) == 3
    assert tokens == 2  # of 3 + 1 + 2


def test_submissions_and_waits_of_any_loop_are_recorded_until_the_end():
    stock = mx.async_eval, mx.eval, mx.array.item, mx.array.tolist
    with host.watched() as clock:
        a = mx.arange(4) + 1
        mx.async_eval(a)
        assert clock.spent["submit"] > 0 == clock.spent["wait"]
        for wait in (lambda: a.tolist(), lambda: a.sum().item(), lambda: mx.eval(a * 2)):
            before = clock.spent["wait"]
            wait()
            assert clock.spent["wait"] > before
    assert (mx.async_eval, mx.eval, mx.array.item, mx.array.tolist) == stock


def test_sleeping_is_not_cpu_time():
    clock = host.Clock()
    clock.timed("wait", time.sleep)(0.05)
    assert clock.spent["wait"] >= 0.05 > 0.02 > clock.spent["CPU"]
