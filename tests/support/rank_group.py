"""Run a command as several ranks over loopback, as `mlx.launch` does, and collect their outputs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("rank_worker.py")
ROOT = Path(__file__).parents[2]


def free_ports(n: int) -> list[int]:
    """Return ports that are free now; another process may still take them."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def environments(n: int, folder: Path, **more: str) -> list[dict[str, str]]:
    """Return the environments of the processes of a ring of n ranks."""
    hostfile = folder / f"hosts-{n}.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(n)]))
    path = os.pathsep.join([str(ROOT), str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
    shared = {**os.environ, "PYTHONPATH": path, "MLX_HOSTFILE": str(hostfile), **more}
    return [{**shared, "MLX_RANK": str(rank)} for rank in range(n)]


def start(n: int, folder: Path, argv: list[str], **more: str) -> list[subprocess.Popen]:
    """Start a command as n ranks; return their processes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [subprocess.Popen(argv, env=env, text=True, **pipes) for env in environments(n, folder, **more)]


def ended(ranks: list[subprocess.Popen], stdin: str = "", timeout: float = 120) -> list[tuple[int, str, str]]:
    """Wait for all ranks; return (exit code, stdout, stderr) of each. stdin: input of rank 0."""
    try:
        for rank in ranks[1:]:
            rank.stdin.close()
            rank.stdin = None
        first = ranks[0].communicate(stdin, timeout=timeout)
        others = [rank.communicate(timeout=timeout) for rank in ranks[1:]]
        return [(rank.returncode, *streams) for rank, streams in zip(ranks, [first, *others], strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


def work(n: int, folder: Path, name: str, **options) -> list:
    """Run a function of `rank_worker` on n ranks; return its result on each."""
    return [found for (found,) in work_all(n, folder, (name, options))]


def work_all(n: int, folder: Path, *calls: tuple[str, dict]) -> list:
    """Run functions of `rank_worker` in turn in the same n processes; return for each rank the results."""
    argv = [sys.executable, str(WORKER), *(word for name, given in calls for word in (name, json.dumps(given)))]
    found = ended(start(n, folder, argv), timeout=900)
    for rank, (code, _, stderr) in enumerate(found):
        assert code == 0, f"rank {rank}: {stderr}"
    return [json.loads(stdout.splitlines()[-1]) for _, stdout, _ in found]
