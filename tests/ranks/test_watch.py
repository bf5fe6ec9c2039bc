"""Check that a rank that dies, hangs, leaves or does not start ends the others, with a message that names it."""

import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import rank_group
from fake_clock import Clock, Ended
from sweep import sampled, sweep

from mlx_mtp.ranks import watch
from mlx_mtp.ranks.watch import Watch

WATCHER = """
import pathlib, select, sys
from mlx_mtp.ranks import watch
*numbers, file = sys.argv[1:]
rank, size, port, code = map(int, numbers)
part = pathlib.Path(file)
watch.begin(rank, size, ("127.0.0.1", port))
try:
    part.write_text("half")
    print("begun", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
except KeyboardInterrupt:
    pass
finally:
    part.unlink()
watch.leave(code)
sys.exit(code)
"""
NOWHERE = ("127.0.0.1", 0)
SECONDS = 3  # limit of the watch if a test waits for it, else ten times as long


def start(folder, ranks, size: int, code: int = 0, seconds: float = SECONDS) -> dict[int, subprocess.Popen]:
    port = str(rank_group.free_ports(1)[0])
    env = {**os.environ, "PYTHONPATH": str(rank_group.ROOT), "MLX_MTP_RANK_SECONDS": str(seconds)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    argv = [sys.executable, "-c", WATCHER]
    return {
        rank: subprocess.Popen(
            [*argv, str(rank), str(size), port, str(code), str(folder / f"{rank}.part")], env=env, text=True, **pipes
        )
        for rank in ranks
    }


def met(processes) -> None:
    for process in processes.values():
        assert process.stdout.readline() == "begun\n"
    time.sleep(1)


def ends(process: subprocess.Popen) -> tuple[int, str]:
    """Return the exit code and stderr, within a time limit."""
    try:
        return process.wait(timeout=5 * SECONDS + 10), process.stderr.read()  # its input stays open
    finally:
        process.kill()


def ended_by_a_stop(monkeypatch, limit: float, size: int, victim: int, stop: float) -> dict[str, float]:
    """Return when each rank ends on a fake clock if the victim stops and main threads do not clean up."""
    clock = Clock({str(victim): stop})

    def leave(code: int) -> None:
        raise Ended

    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "os", SimpleNamespace(write=lambda *_: None, _exit=leave))
    monkeypatch.setattr(watch.ctypes, "pythonapi", SimpleNamespace(PyThreadState_SetAsyncExc=lambda *_: None))
    ranks = [Watch(rank, size, NOWHERE, limit) for rank in range(size)]
    pairs = [socket.socketpair() for _ in ranks[1:]]
    for rank, (one, other) in enumerate(pairs, 1):
        ranks[0]._add(rank, one)
        ranks[rank]._add(0, other)
    try:
        return clock.run({str(rank): each._keep_listening for rank, each in enumerate(ranks)})
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("limit", [watch.LIMIT, 3.0, 100.0])
def test_all_others_have_ended_within_the_limit_of_a_stop(monkeypatch, limit, victim):
    """At least five polls before the limit, and not before 0.7 of it."""
    for part in (0.0, 0.3, 0.99):
        poll = Watch(0, 1, NOWHERE, limit).poll
        ended = ended_by_a_stop(monkeypatch, limit, 3, victim, stop := limit + part * poll)
        assert ended.keys() == {"0", "1", "2"} - {str(victim)}
        for end in ended.values():
            assert 0.7 * limit <= end - stop <= limit - 5 * poll


DIES = [(signal.SIGKILL, 2, "rank 2 has ended"), (signal.SIGKILL, 0, "rank 0 has ended")]
HANGS = [
    (signal.SIGSTOP, rank, f"rank {rank} has not answered for {Watch(0, 1, NOWHERE, SECONDS).silence:g} s")
    for rank in (1, 0)
]
ABSENT = [
    ((1,), 0.4, "rank 0 at 127.0.0.1 has not started within 1.2 s"),
    ((0, 2), 2, "rank 1 has not started within 6 s"),
]


@pytest.mark.parametrize(("sent", "victim", "message"), sampled(DIES[:1], [*DIES, *HANGS]))
def test_a_rank_that_dies_or_hangs_is_named_by_all_others(tmp_path, sent, victim, message):
    processes = start(tmp_path, range(3), 3, seconds=SECONDS if sent == signal.SIGSTOP else 10 * SECONDS)
    met(processes)
    processes[victim].send_signal(sent)
    for rank in {0, 1, 2} - {victim}:
        assert ends(processes[rank]) == (1, f"error: rank {rank}: {message}\n")
    assert [part.name for part in tmp_path.iterdir()] == [f"{victim}.part"]  # the others have removed their files
    processes[victim].kill()


@pytest.mark.parametrize(("started", "seconds", "message"), sampled(ABSENT[:1], ABSENT))
def test_a_rank_that_does_not_start_is_named(tmp_path, started, seconds, message):
    processes = start(tmp_path, started, 3, seconds=seconds)
    for rank, process in processes.items():
        assert ends(process) == (1, f"error: rank {rank}: {message}\n")


@sweep
def test_a_rank_that_leaves_with_0_ends_no_other_and_another_exit_code_is_shared(tmp_path):
    processes = start(tmp_path, range(2), 2)
    met(processes)
    assert processes[0].communicate("\n", timeout=10)[1] == ""
    time.sleep(2 * SECONDS)
    assert processes[1].poll() is None
    assert processes[1].communicate("\n", timeout=10)[1] == ""
    processes = start(tmp_path, range(2), 2, code=130)
    met(processes)
    processes[0].stdin.write("\n")
    processes[0].stdin.flush()
    assert ends(processes[1]) == ends(processes[0]) == (130, "")
