"""Check that a rank that dies, hangs, leaves or never comes ends the others, with a line that names it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import rank_group
from sweep import sampled, sweep

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
SECONDS = 2  # of silence until a rank is given up; where none is waited for, ten times as many


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
    """Exit code and what was said, in a stated time."""
    try:
        return process.wait(timeout=5 * SECONDS + 10), process.stderr.read()  # its input stays open
    finally:
        process.kill()


DIES = [(signal.SIGKILL, 2, "rank 2 has ended"), (signal.SIGKILL, 0, "rank 0 has ended")]
HANGS = [(signal.SIGSTOP, rank, f"rank {rank} has not answered for {SECONDS:g} s") for rank in (1, 0)]
ABSENT = [
    ((0, 2), f"rank 1 has not started within {3 * SECONDS:g} s"),
    ((1,), f"rank 0 at 127.0.0.1 has not started within {3 * SECONDS:g} s"),
]


@pytest.mark.parametrize(("sent", "victim", "what"), sampled([DIES[0], HANGS[1]], [*DIES, *HANGS]))
def test_one_that_dies_or_hangs_is_named_by_all_others(tmp_path, sent, victim, what):
    processes = start(tmp_path, range(3), 3, seconds=SECONDS if sent == signal.SIGSTOP else 10 * SECONDS)
    met(processes)
    processes[victim].send_signal(sent)
    for rank in {0, 1, 2} - {victim}:
        assert ends(processes[rank]) == (1, f"error: rank {rank}: {what}\n")
    assert [part.name for part in tmp_path.iterdir()] == [f"{victim}.part"]  # the others have cleared up
    processes[victim].kill()


@pytest.mark.parametrize(("there", "what"), sampled(ABSENT[:1], ABSENT))
def test_one_that_never_starts_is_named(tmp_path, there, what):
    processes = start(tmp_path, there, 3)
    for rank, process in processes.items():
        assert ends(process) == (1, f"error: rank {rank}: {what}\n")


@sweep
def test_who_leaves_in_order_is_not_missed_and_whose_user_left_is_followed(tmp_path):
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
