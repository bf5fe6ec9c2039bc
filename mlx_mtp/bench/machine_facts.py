"""Ask the system what MLX does not say, a Mac's GPU cores and whether its chip is throttled; None: nor does it."""

import re
import shutil
import subprocess
from collections.abc import Sequence


def gpu_cores() -> int | None:
    """Count the GPU's cores on a Mac."""
    found = re.search(r'"gpu-core-count" = (\d+)', _said(["ioreg", "-rc", "AGXAccelerator", "-d", "1"]) or "")
    return int(found[1]) if found else None


def thermal_state() -> str | None:
    """Say in one line what macOS notes of heat, as `pmset -g therm` has it."""
    lines = (_said(["pmset", "-g", "therm"]) or "").splitlines()
    return "; ".join(line.strip(" \t-") for line in lines if line.strip()) or None


def _said(command: Sequence[str]) -> str | None:
    """Run a command of the system's; None where there is none, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
