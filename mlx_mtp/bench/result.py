"""Represent one measurement as one JSON object with environment, options and every raw value; write and read it."""

import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from .._version import __version__
from ..machine.atomic import write_whole
from ..machine.errors import one_line

FORMAT = 1
CHECKOUT = Path(__file__).parents[2] / ".git"
KINDS = ("decode", "verify", "kernels", "profile", "model", "parallel")


def environment() -> dict[str, Any]:
    """Return the chip, system and versions that times depend on; None for what is not known here."""
    device = mx.device_info()
    return {
        "chip": device.get("device_name") or platform.processor() or platform.machine(),
        "memory_bytes": device.get("memory_size"),
        "cores": os.cpu_count(),
        "os": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "blas": Path(os.environ.get("LD_PRELOAD") or "mlx's own").name,
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "mlx_mtp": __version__,
        "commit": _output("git", "--git-dir", str(CHECKOUT), "rev-parse", "--short", "HEAD"),  # None of a wheel
    }


def gpu_cores() -> int | None:
    """Return the number of GPU cores on a Mac, which MLX does not report; None if unknown, as elsewhere."""
    found = re.search(r'"gpu-core-count" = (\d+)', _output("ioreg", "-rc", "AGXAccelerator", "-d", "1") or "")
    return int(found[1]) if found else None


def thermal_state() -> str | None:
    """Return macOS's thermal state in one line; None if unknown, as elsewhere."""
    lines = (_output("pmset", "-g", "therm") or "").splitlines()
    return "; ".join(line.strip(" \t-") for line in lines if line.strip()) or None


def _output(*command: str) -> str | None:
    """Return a system command's output; None if it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def result(kind: str, model: dict[str, Any], options: dict[str, Any], **measured: Any) -> dict[str, Any]:
    """Return a benchmark's result as it is after JSON: keys are strings, tuples are lists.

    kind: one of KINDS. model: name, family, bytes, quantization, kernels that are on. options: the requested
    settings. measured: raw values, which become further entries.
    """
    assert kind in KINDS
    found = {"bench": kind, "format": FORMAT, "environment": environment(), "model": model, "options": options}
    return json.loads(json.dumps(found | measured))  # as after a round trip: keys are strings


def named(model: dict[str, Any]) -> str:
    """Return the name of a result's model for table titles, with a note if it is synthetic."""
    return f"{model['name']}, SYNTHETIC: {label}" if (label := model.get("synthetic")) else model["name"]


def curve_title(curve: dict[str, Any]) -> str:
    """Return the name of a curve of `bench verify`, with its context if it has one."""
    return curve["name"] if curve["context"] is None else f"{curve['name']} at {curve['context']}"


def new_table(title: str | None, *columns: str, left: int = 1, **style: Any) -> Table:
    """Return an empty table with these columns: the first `left` aligned left, the others (numbers) right."""
    table = Table(title=title, **style)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def write(found: dict[str, Any], path: Path) -> None:
    """Write a result to a file as one line of JSON, atomically."""
    write_whole(path, json.dumps(found) + "\n")


def read(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read a result from a file: from the whole text if it begins with "{", as that of `write`, else the last line.

    kind: the one of KINDS that is accepted; None accepts all. Raises ValueError if the text is no result in this
    format, or a result of another kind, and OSError if the file cannot be opened.
    """
    with one_line(f"{path}: no result of `mlx-mtp bench`", (ValueError, RecursionError)):
        text = path.read_text().strip()
        found = json.loads(text if text.startswith("{") else text.rpartition("\n")[2])
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("bench") not in KINDS:
        raise ValueError(f"{path}: no result of `mlx-mtp bench` in format {FORMAT}; run the benchmark again")
    if kind and found["bench"] != kind:
        raise ValueError(f"{path}: a result of `bench {found['bench']}`, not of `bench {kind}`")
    return found
