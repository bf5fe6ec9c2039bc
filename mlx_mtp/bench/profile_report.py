"""Report a profile: a line per phase, what is left unexplained, and the price of having looked."""

from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from .census import stream_rate
from .profile import HOST, PHASES, Profile
from .roofline.chips import CHIPS, at_hand
from .timing import Measured, measured, ratio

REST = "in no phase"
COLUMNS = ("ms", "of the wall", "operations", "MB read", "GB/s", "of bandwidth")


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, and where the figure comes from."""

    rate: float
    source: str

    def __str__(self) -> str:
        return f"{self.rate / 1e9:.1f} GB/s, {self.source}"


@dataclass(frozen=True)
class Line:
    """One phase. ms: of a cycle, those of "prefill" of the whole prompt; operations, nbytes: as `census` counts."""

    name: str
    ms: Measured
    share: float
    operations: int | None = None
    nbytes: float | None = None

    @property
    def rate(self) -> float | None:
        """Bytes per second."""
        return None if self.nbytes is None else self.nbytes / (self.ms.median / 1e3)


def lines(found: Profile, operations: dict[str, int], nbytes: dict[str, float]) -> list[Line]:
    """Make a line of each phase that took any time; behind "host" its parts, and what is left of the wall."""
    made, walls = [], sum(t.wall for t in found.timers)
    for name in (*PHASES, *HOST, REST):
        seconds = [{**t.seconds, **t.phases, REST: t.unexplained}[name] for t in found.timers]
        if min(seconds) > 0:
            cycles = [1 if name == "prefill" else max(1, t.cycles) for t in found.timers]
            ms = measured([1e3 * s / n for s, n in zip(seconds, cycles, strict=True)])
            made.append(Line(name, ms, sum(seconds) / walls, operations.get(name), nbytes.get(name)))
    return made


def phase_table(found: list[Line], bandwidth: Bandwidth, title: str) -> Table:
    """Show the lines, with what share of the bandwidth each phase that reads weights achieved."""
    headers = [Column("phase", no_wrap=True), *(Column(name, justify="right") for name in COLUMNS)]
    caption = f"of a cycle, but prefill: of the prompt; bandwidth {bandwidth}"
    table = Table(*headers, title=title, caption=caption)
    for line in found:
        part = line.name in HOST
        if line.name == REST:
            table.add_section()
        cells = [f"{line.ms}", f"{line.share:.1%}", "" if line.operations is None else str(line.operations)]
        if line.nbytes and line.rate is not None:
            cells += [f"{line.nbytes / 1e6:.1f}", f"{line.rate / 1e9:.1f}", f"{line.rate / bandwidth.rate:.0%}"]
        table.add_row(f"  {line.name}" if part else line.name, *cells, style="dim" if part else None)
    return table


def remarks(found: Profile, made: list[Line], bandwidth: Bandwidth) -> list[str]:
    """Say what the table does not, a sentence each."""
    first, wall = found.timers[0], measured([t.wall for t in found.timers])
    price = ratio([t.wall for t in found.timers], found.undisturbed)
    rest = sum(t.unexplained for t in found.timers) / sum(t.wall for t in found.timers)
    sure = "" if price.conclusive else " (inconclusive)"
    said = [
        f"{len(first.tokens)} tokens, {first.cycles} cycles; {rest:.2%} of {1e3 * wall.median:.1f} ms in no phase.",
        f"Overhead: it takes {price.median:.2f}x{sure} the time of the loop, which builds a cycle while one runs.",
    ]
    if any(line.rate and line.rate > bandwidth.rate for line in made):
        said.append("More than all of the bandwidth: weights came out of caches.")
    return said


def raw(found: Profile, operations: dict[str, int], nbytes: dict[str, float]) -> dict[str, Any]:
    """Collect every round's seconds, for a result."""
    first = found.timers[0]
    return {
        **{"tokens": len(first.tokens), "cycles": first.cycles},
        "seconds": {name: [t.seconds[name] for t in found.timers] for name in first.seconds},
        **{name: [getattr(t, name) for t in found.timers] for name in ("wall", "unexplained")},
        **{"undisturbed": found.undisturbed, "operations": operations, "bytes": nbytes},
    }


def bandwidth_of(stated: float | None) -> Bandwidth:
    """Take the bandwidth stated, in GB/s, else of the chip at hand, else what MLX streams on this machine."""
    if stated is not None:
        return Bandwidth(1e9 * stated, "as stated")
    if known := CHIPS.get(at_hand() or ""):
        return Bandwidth(1e9 * known.gbps, f"of an {known.name}, as published")
    return Bandwidth(stream_rate(), "measured: MLX copies a large array, reads and writes")
