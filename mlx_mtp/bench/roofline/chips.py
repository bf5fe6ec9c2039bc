"""List published and fitted figures of Apple's chips; find the one of this machine."""

import csv
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..result import gpu_cores


@dataclass(frozen=True)
class Chip:
    """A chip's published figures, and two shares that are fitted: of the bandwidth (`usable`) and of the issue rate.

    gbps: memory bandwidth in GB/s. tflops: of fp32. generation: of the GPU; 17 is the M5's.
    launch, independent: seconds that a launch adds to a pass if it waits for an earlier one, and if it does not.
    launch_source: of these two, for tables.
    bandwidth, rate: usable bytes and instructions per second.
    """

    name: str
    generation: int
    gbps: float
    tflops: float
    memory: int  # maximum GB
    launch: float
    independent: float
    launch_source: str
    usable: float = 0.85  # share of the bandwidth if none is published
    issue: float = 1.0

    @property
    def bandwidth(self) -> float:
        return self.gbps * 1e9 * self.usable

    @property
    def rate(self) -> float:
        return self.tflops * 1e12 / 2 * self.issue


def _chip(name: str, *line: str) -> Chip:
    *figures, source = line
    generation, gbps, tflops, memory, usable, launch, independent = (
        json.loads(figure or "null") for figure in figures
    )
    share = usable / gbps if usable else Chip.usable
    return Chip(name, generation, gbps, tflops, memory, launch * 1e-6, independent * 1e-6, source, share)


HERE = Path(__file__).parent
FILE = HERE / "fitted.json"
CHIPS = {line[0]: _chip(*line) for line in csv.reader((HERE / "chips.csv").read_text().splitlines()[4:])}


def read_fitted() -> dict[str, Any]:
    """Return the stored output of `python -m bench.cost_model.fit` on published times.

    chips: by name the shares `usable` and `issue`, and `fitted_to`, the number of times. validation: as in a result.
    summary: lines about the errors, for printing.
    """
    return json.loads(FILE.read_text())


def fitted_chips() -> dict[str, Chip]:
    """Return all of CHIPS with their two fitted shares."""
    found = read_fitted()["chips"]
    return {name: replace(c, usable=found[name]["usable"], issue=found[name]["issue"]) for name, c in CHIPS.items()}


def find(device: str, gpu_cores: int | None = None) -> str | None:
    """Return the name in CHIPS of a device such as "Apple M3 Max"; None if it is missing.

    gpu_cores: selects the variant of a chip sold with two GPUs; None or another number selects the larger.
    """
    match = re.search(r"\bM\d+(?: (?:Pro|Max|Ultra))?\b", device)
    name = match[0] if match else ""
    sold = {int(chip.removeprefix(name + " ")[:-1]): chip for chip in CHIPS if re.fullmatch(name + r" \d+c", chip)}
    if sold:
        return sold.get(gpu_cores or 0, sold[max(sold)])
    return name if name in CHIPS else None


def at_hand() -> str | None:
    """Return the name in CHIPS of this machine's chip; None if it is missing, as on Linux."""
    return find(str(mx.device_info().get("device_name", "")), gpu_cores())
