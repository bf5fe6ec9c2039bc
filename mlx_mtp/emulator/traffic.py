"""Count what a launch asked of memory; never times."""

from collections.abc import Mapping
from dataclasses import dataclass

from .buffers import INPUT, OUTPUT, THREADGROUP
from .launch import Outcome, Triple


@dataclass(frozen=True)
class BufferTraffic:
    """One buffer's accesses, in bytes or times.

    `simd_accesses` counts accesses by simdgroups: the n-th execution of an instruction by each of the 32 lanes is
    one; `simd_lines` the distinct lines of 64 bytes in each, summed; `group_lines` those of each threadgroup, summed.
    """

    name: str
    space: str  # input, output or threadgroup
    size: int
    bytes_read: int
    bytes_written: int
    distinct_read: int
    distinct_written: int
    reads: int
    writes: int
    group_lines: int
    simd_accesses: int
    simd_lines: int

    @property
    def reread(self) -> float:
        """Bytes requested over distinct bytes, of the reads."""
        return self.bytes_read / self.distinct_read if self.distinct_read else 0.0

    @property
    def lines_per_access(self) -> float:
        return self.simd_lines / self.simd_accesses if self.simd_accesses else 0.0


@dataclass(frozen=True)
class Traffic:
    """One launch: buffers by name, and per thread the mean and the most barriers and collectives."""

    kernel: str
    grid: Triple
    threadgroup: Triple
    threads: int
    threadgroup_bytes: int
    barriers: int
    max_barriers: int
    collectives: int
    max_collectives: int
    buffers: Mapping[str, BufferTraffic]

    def __getitem__(self, name: str) -> BufferTraffic:
        return self.buffers[name]

    def __str__(self) -> str:
        """The report as a table, a line per buffer."""
        lines = [
            f"{self.kernel}: {self.threads} threads; per thread at most {self.max_barriers} barriers, "
            f"{self.max_collectives} collectives (counts of the emulator, no times)",
            f"{'buffer':<24} {'read':>12} {'distinct':>12} {'re-read':>8} {'written':>12} {'lines/access':>12}",
        ]
        for b in self.buffers.values():
            lines.append(
                f"{b.name:<24} {b.bytes_read:>12} {b.distinct_read:>12} {b.reread:>7.2f}x {b.bytes_written:>12} "
                f"{b.lines_per_access:>12.1f}"
            )
        return "\n".join(lines)

    @property
    def bytes_read(self) -> int:
        """Bytes requested from device and constant memory."""
        return sum(b.bytes_read for b in self.buffers.values() if b.space != "threadgroup")


def make_traffic(kernel: str, outcome: Outcome, grid: Triple, threadgroup: Triple) -> Traffic:
    """Report a launch that has run."""
    spaces = {INPUT: "input", OUTPUT: "output", THREADGROUP: "threadgroup"}
    buffers = {
        buffer.name: BufferTraffic(
            name=buffer.name,
            space=spaces[buffer.kind],
            distinct_read=int((buffer.touched & 1).sum()),
            distinct_written=int((buffer.touched >> 1 & 1).sum()),
            **buffer.counts,
        )
        for buffer in outcome.buffers
    }
    return Traffic(kernel=kernel, grid=grid, threadgroup=threadgroup, buffers=buffers, **outcome.counts)
