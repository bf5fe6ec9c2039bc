"""Decide whether cycles are replayed: by a trial, block against block."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_mtp.decoding.replay import Compiled, Recorder
from mlx_mtp.tuning.controller import Plan
from mlx_mtp.tuning.replay_choice import BLOCK, WINDOW, CompileChoice


def feed(choice, n, seconds, waited=0.0, like="a"):
    """n cycles, each as the choice has it; `seconds` of those built and replayed."""
    for _ in range(n):
        choice.observe(like, choice.on, seconds[choice.on], waited)


@pytest.mark.parametrize(
    ("replayed", "verdict"), [(0.8, True), (0.96, True), (0.98, False), (1.0, False), (2, False)]
)
def test_a_trial(replayed, verdict):
    choice = CompileChoice(None)
    feed(choice, WINDOW - 1, (1.0, replayed), waited=0.04)
    choice.observe("a", False, None, 0.0)
    assert not choice._trying
    assert not choice.on
    feed(choice, 1, (1.0, replayed))
    feed(choice, 3 * BLOCK, (1.0, replayed))
    assert choice.verdict is None
    feed(choice, 5 * BLOCK, (1.0, replayed))
    assert choice.verdict is choice.on is verdict


def test_a_device_that_is_waited_for_has_no_trial():
    choice = CompileChoice(None)
    feed(choice, 10 * WINDOW, (1.0, 0.5), waited=0.06)
    assert choice.verdict is None
    assert not choice.on


def test_cycles_of_another_kind_are_not_compared():
    choice = CompileChoice(None)
    feed(choice, WINDOW, (1.0, 1.0))
    for _ in range(40 * BLOCK):
        choice.observe(("short",) if choice.on else ("long",), choice.on, 0.1 if choice.on else 1.0, 0.0)
    assert choice.verdict is None


def test_recording_does_not_count_as_a_cycle_s_time():
    flight = SimpleNamespace(plan=Plan(), run=SimpleNamespace(tokens=mx.zeros(1)), replayed=True)
    one = Compiled(Recorder(), CompileChoice(True))
    one._spoilt = 2
    assert [one.observe(flight, 1.0, 0.0) for _ in range(3)] == [None, None, 1.0]
