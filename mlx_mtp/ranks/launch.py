"""Read from the environment that this process was launched as one of several ranks."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

BEYOND = 1000  # from the port that the backend meets at to the one that ranks watch each other at
RANKS, SIZES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK"), ("MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


class Launch(NamedTuple):
    """This process's number among how many, and where rank 0 is to be met: a host and a port, None if unknown."""

    rank: int
    size: int
    meeting: tuple[str, int] | None


def launched() -> Launch | None:
    """Read from the environment what `mlx.launch` or `mpirun` started; None for a process of its own."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), None)
    if rank is None:
        return None
    hosts = _json("MLX_HOSTFILE") or []
    devices = _json("MLX_IBV_DEVICES") or []
    size = next((int(os.environ[name]) for name in SIZES if name in os.environ), len(hosts) or len(devices))
    first = hosts[0][0] if hosts else os.environ.get("MLX_JACCL_COORDINATOR")
    return Launch(int(rank), size, _beside(first) if first else None) if size > 1 else None


def rank_file(file: str | Path, rank: int) -> Path:
    """Name the file that a rank has in the place of `file`: rank 0 that one, another one beside it."""
    path = Path(file)
    return path.with_name(f"{path.name}.rank{rank}") if rank else path


def _beside(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, (int(port) + BEYOND - 1024) % (65536 - 1024) + 1024


def _json(name: str) -> Any:
    """Read the JSON file that a variable of the environment names; None where there is none."""
    try:
        return json.loads(Path(os.environ[name]).read_text())
    except (KeyError, OSError, ValueError):
        return None
