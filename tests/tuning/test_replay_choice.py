"""Decide whether cycles are replayed: by a trial, block against block."""

import pytest

from mlx_mtp.decoding.replay import Compiled, Recorder
from mlx_mtp.tuning.plan import Plan
from mlx_mtp.tuning.replay_choice import BLOCK, MIXED, CompileChoice


def feed(choice, n, seconds, like="a"):
    """Observe n cycles as chosen. seconds: of a built and of a replayed cycle."""
    for _ in range(n):
        choice.observe(like, choice.on, seconds[choice.on])


@pytest.mark.parametrize(("replayed", "verdict"), [(0.8, True), (1.0, True), (1.01, False), (2, False)])
def test_a_trial(replayed, verdict):
    """Cycles are replayed from the first on, and after the trial unless that is slower."""
    choice = CompileChoice(None)
    assert choice.on
    feed(choice, 3 * BLOCK, (1.0, replayed))
    assert choice.verdict is None
    feed(choice, 5 * BLOCK, (1.0, replayed))
    assert choice.verdict is choice.on is verdict


def test_all_but_the_first_cycles_of_a_block_are_compared():
    """The first ones overlap with the last block; here they would decide otherwise."""
    choice, cycles = CompileChoice(None), 0
    while choice.verdict is None:
        seconds = {True: 1.0, False: 2.0} if cycles % BLOCK >= MIXED else {True: 9.0, False: 0.1}
        feed(choice, 1, seconds)
        cycles += 1
    assert choice.verdict
    missing = 2 * BLOCK - 2 * (BLOCK - MIXED)  # of each kind after two blocks
    assert cycles == 5 * BLOCK + MIXED + missing


def test_cycles_of_another_kind_are_not_compared():
    choice = CompileChoice(None)
    for _ in range(40 * BLOCK):
        choice.observe(("short",) if choice.on else ("long",), choice.on, 0.1 if choice.on else 1.0)
    assert choice.verdict is None


def test_recording_does_not_count_as_a_cycle_s_time():
    one = Compiled(Recorder(), CompileChoice(True))
    one._untimed = 2
    assert [one.observe(Plan(), 1, True, 1.0) for _ in range(3)] == [None, None, 1.0]
