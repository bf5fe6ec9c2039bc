"""Report a profile: a line per phase, the unexplained time, and the overhead of profiling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .census import bytes_read, launches, stream_rate
from .profile import HOST, PHASES, Timer, Workload, profile
from .result import named, new_table
from .roofline.chips import CHIPS, at_hand
from .timing import Measured, measured, ratio

Result = dict[str, Any]
REST = "in no phase"
COLUMNS = ("ms", "of the wall", "operations", "MB read", "GB/s", "of bandwidth")


@dataclass(frozen=True)
class PhaseLine:
    """One phase. ms: per cycle, but of the whole prompt for "prefill". share: of the wall time.

    operations: launches at least; nbytes: read; None if not counted.
    """

    name: str
    ms: Measured
    share: float
    operations: int | None = None
    nbytes: float | None = None

    @property
    def rate(self) -> float | None:
        """Bytes read per second; None if bytes were not counted."""
        return self.nbytes and self.nbytes / (self.ms.median / 1e3)


def profiled(work: Workload, rounds: int, *, cooldown: float = 0.0, gbps: float | None = None) -> Result:
    """Profile a generation; return what `raw` does, with operations and bytes of phases, and the bandwidth.

    cooldown: seconds of rest before each turn. gbps: the bandwidth if it is stated, as in `bandwidth_of`.
    """
    found = raw(*profile(work, rounds=rounds, cooldown=cooldown))
    return {**found, "operations": launches(work), "bytes": bytes_read(work), "bandwidth": bandwidth_of(gbps)}


def raw(timers: Sequence[Timer], undisturbed: Sequence[float]) -> Result:
    """Return the times of every round for a profile's result."""
    first = timers[0]
    return {
        **{"tokens": len(first.tokens), "cycles": first.cycles, "undisturbed": undisturbed},
        "seconds": {name: [t.seconds[name] for t in timers] for name in first.seconds},
        **{name: [getattr(t, name) for t in timers] for name in ("wall", "unexplained")},
    }


def lines(found: Result) -> list[PhaseLine]:
    """Return a Line per phase of a profile, per part of "host", and for the rest of the wall time.

    A Line whose phase or part took no time in some round is left out.
    """
    made, seconds = [], found["seconds"]
    host = [sum(parts) for parts in zip(*(seconds[name] for name in HOST), strict=True)]
    seconds = {**seconds, "host": host, REST: found["unexplained"]}
    for name in (*PHASES, *HOST, REST):
        if min(seconds[name]) > 0:
            cycles = 1 if name == "prefill" else max(1, found["cycles"])
            ms = measured([1e3 * s / cycles for s in seconds[name]])
            counts = found["operations"].get(name), found["bytes"].get(name)
            made.append(PhaseLine(name, ms, sum(seconds[name]) / sum(found["wall"]), *counts))
    return made


def phase_table(found: Result) -> Table:
    """Return a table of a profile's lines, with the share of the memory bandwidth that each phase achieved."""
    bandwidth = found["bandwidth"]["rate"]
    title = f"{named(found['model'])}, {found['options']['k']} drafts per cycle"
    caption = f"per cycle, prefill: per prompt; bandwidth {bandwidth / 1e9:.1f} GB/s, "
    table = new_table(title, "phase", *COLUMNS, caption=caption + found["bandwidth"]["source"])
    for line in lines(found):
        part = line.name in HOST
        if line.name == REST:
            table.add_section()
        cells = [f"{line.ms}", f"{line.share:.1%}", "" if line.operations is None else str(line.operations)]
        if line.nbytes and line.rate:
            cells += [f"{line.nbytes / 1e6:.1f}", f"{line.rate / 1e9:.1f}", f"{line.rate / bandwidth:.0%}"]
        table.add_row(f"  {line.name}" if part else line.name, *cells, style="dim" if part else None)
    return table


def remarks(found: Result) -> list[str]:
    """Return remarks on a profile, one sentence each."""
    wall, slowdown = measured(found["wall"]), ratio(found["wall"], found["undisturbed"])
    rest = sum(found["unexplained"]) / sum(found["wall"])
    sure = "" if slowdown.conclusive else " (inconclusive)"
    sentences = [
        f"{found['tokens']} tokens, {found['cycles']} cycles; {rest:.2%} of {1e3 * wall.median:.1f} ms in no phase.",
        f"Overhead: {slowdown.median:.2f}x{sure} the time of the loop, which builds a cycle while another runs.",
    ]
    if any(line.rate and line.rate > found["bandwidth"]["rate"] for line in lines(found)):
        sentences.append("A phase exceeds the memory bandwidth: its weights were in caches.")
    return sentences


def bandwidth_of(stated: float | None) -> Result:
    """Return a dict with a memory bandwidth as "rate", in bytes per second, and its "source" in words.

    stated: in GB/s; without it the bandwidth is that published for this chip, else the one of `stream_rate`.
    """
    if stated is not None:
        return {"rate": 1e9 * stated, "source": "as stated"}
    if known := CHIPS.get(at_hand() or ""):
        return {"rate": 1e9 * known.gbps, "source": f"of an {known.name}, as published"}
    return {"rate": stream_rate(), "source": "measured: MLX copies a large array, reads and writes"}
