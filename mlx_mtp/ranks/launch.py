"""Read from the environment whether this process is one of several ranks, and where they meet."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

PORT_OFFSET = 1000  # from the backend's port to the port over which ranks watch each other
RANKS, SIZES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK"), ("MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


class RankLaunch(NamedTuple):
    """A process's rank, the number of ranks, and where the ranks' watches meet: rank 0's host and a port of it.

    meeting: None if rank 0's host is unknown.
    """

    rank: int
    size: int
    meeting: tuple[str, int] | None


def launched() -> RankLaunch | None:
    """Return the launch by `mlx.launch` or `mpirun` that started this process.

    None for a single process, or if the number of ranks is unknown.
    """
    rank = next((os.environ[name] for name in RANKS if name in os.environ), None)
    if rank is None:
        return None
    hosts = _json("MLX_HOSTFILE") or []
    devices = _json("MLX_IBV_DEVICES") or []
    size = next((int(os.environ[name]) for name in SIZES if name in os.environ), len(hosts) or len(devices))
    if size < 2:
        return None
    meeting = None
    if first := hosts[0][0] if hosts else os.environ.get("MLX_JACCL_COORDINATOR"):
        host, _, port = first.rpartition(":")
        meeting = host, (int(port) + PORT_OFFSET - 1024) % (65536 - 1024) + 1024
    return RankLaunch(int(rank), size, meeting)


def rank_file(file: str | Path, rank: int) -> Path:
    """Return the file that a rank uses for `file`: rank 0 the file itself, rank n "<file>.rank<n>"."""
    path = Path(file)
    return path.with_name(f"{path.name}.rank{rank}") if rank else path


def _json(name: str) -> Any:
    """Return the content of the JSON file that an environment variable names; None without the variable or the file.

    None also if the file cannot be read or is not JSON.
    """
    try:
        return json.loads(Path(os.environ[name]).read_text())
    except (KeyError, OSError, ValueError):
        return None
