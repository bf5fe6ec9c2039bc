"""List what a roofline needs to know of Apple's chips, and find the one that this machine has."""

import platform
import re
import subprocess
from dataclasses import dataclass

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


# The middle of a range of clocks or estimates; fewer cores in proportion; `usable` where one is published; the most
# memory sold.
CHIPS = {
    chip.name: chip
    for chip in (
        *(Chip("M1", 13, 68, 2.6, 16), Chip("M1 Pro", 13, 200, 5.3, 32), Chip("M1 Max", 13, 400, 10.6, 64)),
        *(Chip("M1 Ultra", 13, 800, 21.2, 128, 680 / 800), Chip("M2", 14, 100, 3.6, 24)),
        *(Chip("M2 Pro", 14, 200, 6.8, 32), Chip("M2 Max", 14, 400, 13.6, 96), Chip("M2 Ultra", 14, 800, 27.2, 192)),
        *(Chip("M3", 15, 100, 3.85, 24), Chip("M3 Pro", 15, 150, 6.9, 36), Chip("M3 Max 30c", 15, 300, 11.5, 96)),
        *(Chip("M3 Max 40c", 15, 400, 15.3, 128), Chip("M3 Ultra", 15, 819, 28, 512, 692 / 819)),
        *(Chip("M4", 16, 120, 4.45, 32), Chip("M4 Pro", 16, 273, 9.2, 64), Chip("M4 Max 32c", 16, 410, 14.7, 36)),
        *(Chip("M4 Max 40c", 16, 546, 18.4, 128), Chip("M5", 17, 153, 4.2, 32, 122 / 153)),
        *(Chip("M5 Pro", 17, 307, 8.5, 64, 266 / 307), Chip("M5 Max 32c", 17, 460, 13.6, 128)),
        Chip("M5 Max 40c", 17, 614, 17, 128),
    )
}


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
    return find(str(mx.device_info().get("device_name", "")), _gpu_cores())


def _gpu_cores() -> int | None:
    command = ["system_profiler", "SPDisplaysDataType"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Total Number of Cores: (\d+)", shown)
    return int(match[1]) if match else None
