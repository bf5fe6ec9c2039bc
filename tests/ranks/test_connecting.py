"""Check that a rank that dies or hangs while MLX connects ranks is named by the others, and that Ctrl-C works."""

import signal
import sys
import time

import pytest
import rank_group
from sweep import sampled, sweep

RANK = """
import ctypes, os, sys
import mlx.core as mx
from mlx_mtp.ranks import group
if os.environ["MLX_RANK"] in sys.argv[1:]:  # Python's lock is held, as MLX's own call holds it
    mx.distributed.init = lambda **_: (print("met", flush=True), ctypes.PyDLL(None).sleep(90))
group.meet()
print("connected")
"""


def started(folder, n: int, *hang: int, seconds: float):
    argv = [sys.executable, "-c", RANK, *map(str, hang)]
    ranks = rank_group.start(n, folder, argv, MLX_MTP_RANK_SECONDS=str(seconds))
    for rank in hang:
        assert ranks[rank].stdout.readline() == "met\n"
    time.sleep(1)  # for the guards to begin
    return ranks


def ends(rank) -> tuple[int, str]:
    """Return the exit code and stderr, within 15 seconds."""
    try:
        return rank.wait(timeout=15), rank.stderr.read()
    finally:
        rank.kill()


@pytest.mark.parametrize(("sent", "victim", "n", "message"), sampled([(signal.SIGKILL, 1, 2, "has ended")], [
    *((signal.SIGKILL, victim, n, "has ended") for victim, n in ((0, 2), (1, 2), (0, 3), (2, 3))),
    *((signal.SIGSTOP, victim, n, "has not answered for 3.5 s") for victim, n in ((0, 2), (1, 2), (0, 3), (2, 3))),
]))  # fmt: skip
def test_a_rank_that_dies_or_hangs_is_named_by_all_others(tmp_path, sent, victim, n, message):
    ranks = started(tmp_path, n, victim, seconds=5 if sent == signal.SIGSTOP else 30)
    ranks[victim].send_signal(sent)
    for rank in set(range(n)) - {victim}:
        assert ends(ranks[rank]) == (-signal.SIGKILL, f"error: rank {rank}: rank {victim} {message}\n")
    ranks[victim].wait(timeout=15)  # its guard also ends a stopped rank


@sweep
def test_a_connection_has_a_time_limit(tmp_path):
    for rank, process in enumerate(started(tmp_path, 2, 0, 1, seconds=2)):
        code, stderr = ends(process)
        assert code == -signal.SIGKILL
        assert stderr.startswith(f"error: rank {rank}: "), stderr


@sweep
def test_ctrl_c_ends_the_ranks(tmp_path):
    ranks = started(tmp_path, 2, 0, 1, seconds=30)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    assert [ends(rank)[0] for rank in ranks] == [-signal.SIGINT] * 2


@sweep
def test_connected_ranks_continue(tmp_path):
    found = rank_group.ended(started(tmp_path, 3, seconds=20))
    assert found == [(0, "connected\n", "")] * 3
