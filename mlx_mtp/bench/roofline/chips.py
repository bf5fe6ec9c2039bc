"""List what a roofline needs to know of Apple's chips, and find the one that this machine has."""

import csv
import json
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True)
class Chip:
    """A chip's figures, and the two shares that are fitted: of the bandwidth, and of the issue rate."""

    name: str
    generation: int
    gbps: float
    tflops: float
    memory: int  # GB at most
    usable: float = 0.85  # of the bandwidth, where nothing is published
    issue: float = 1.0

    @property
    def bandwidth(self) -> float:
        return self.gbps * 1e9 * self.usable

    @property
    def rate(self) -> float:
        return self.tflops * 1e12 / 2 * self.issue

    @property
    def family(self) -> str:
        """From M3 on integer and float instructions issue side by side."""
        return "M3 and later" if self.generation >= 15 else "M1 and M2"

    @property
    def ultra(self) -> bool:
        return "Ultra" in self.name


def _chip(name: str, *figures: str) -> Chip:
    generation, gbps, tflops, memory, usable = (json.loads(figure or "null") for figure in figures)
    return Chip(name, generation, gbps, tflops, memory, usable / gbps if usable else Chip.usable)


_LINES = Path(__file__).with_name("chips.csv").read_text().splitlines()
CHIPS = {name: _chip(name, *figures) for name, *figures in csv.reader(_LINES[3:])}


def find(device: str, gpu_cores: int | None = None) -> str | None:
    """Find the name in CHIPS of a device such as "Apple M3 Max"; None for one that is not there.

    gpu_cores: decides where a chip was sold with two GPUs; None takes the larger.
    """
    match = re.search(r"\bM\d+(?: (?:Pro|Max|Ultra))?\b", device)
    if match is None:
        return None
    name = match[0]
    sold = {int(chip.removeprefix(name + " ")[:-1]): chip for chip in CHIPS if re.fullmatch(name + r" \d+c", chip)}
    if sold:
        return sold.get(gpu_cores or 0, sold[max(sold)])
    return name if name in CHIPS else None


def at_hand() -> str | None:
    """Find the name in CHIPS of this machine's chip; None where it is not there, as on Linux."""
    if platform.system() != "Darwin":
        return None
    command = ["system_profiler", "SPDisplaysDataType"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    cores = re.search(r"Total Number of Cores: (\d+)", shown)
    return find(str(mx.device_info().get("device_name", "")), int(cores[1]) if cores else None)
