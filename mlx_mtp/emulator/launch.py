"""Run a compiled kernel: pass its buffers to the runtime, return the first fault and the memory traffic.

Traffic is counted, never timed.
"""

import ctypes as c
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .buffers import INPUT, OUTPUT, THREADGROUP, KernelBuffer
from .compile import runtime_library
from .options import ORDERS, CompileError, EmulatorOptions

MAX_BUFFERS = 128
COUNTS = ("reads", "writes", "bytes_read", "bytes_written", "group_lines", "simd_accesses", "simd_lines")
TOTALS = ("barriers", "collectives", "max_barriers", "max_collectives", "threads", "threadgroup_bytes")
Triple = tuple[int, ...]  # numbers of threads along x, y and z
_lock = threading.Lock()


def _each(type_: type, *names: str) -> list[tuple[str, type]]:
    return [(name, type_) for name in names]


class _Buffer(c.Structure):
    _fields_ = [
        *_each(c.c_uint64, "size"),
        *_each(c.c_uint32, "kind", "initialised"),
        *_each(c.c_void_p, "contents", "copy_back"),
        *_each(c.c_uint64, "base"),
        *_each(c.c_void_p, "touched", "shadow", "line_stamp"),
        *_each(c.c_uint64, *COUNTS),
        *[("name", c.c_char_p), ("tag", c.c_void_p), ("item", c.c_uint64)],
    ]


class Fault(c.Structure):
    """The runtime's data on a fault of a kernel; kind 0 if there is none."""

    _fields_ = [
        *_each(c.c_uint32, "kind", "writes", "thread", "other_thread", "other_writes", "other_group_known"),
        *_each(c.c_uint64, "buffer", "size", "address", "site", "other_site"),
        *[("offset", c.c_int64), ("group", c.c_uint32 * 3), ("text", c.c_char * 512)],
    ]


class _Launch(c.Structure):
    _fields_ = [
        *_each(c.c_void_p, "entry", "image_low", "image_high"),
        *_each(c.c_uint64, "max_steps"),
        *_each(c.c_uint32 * 3, "grid", "group"),
        *_each(c.c_uint32, "order", "races", "initialised", "none_orders", "traffic", "buffers"),
        *_each(c.c_uint64, "steps", *TOTALS),
        *_each(Fault, "fault", "earlier"),
    ]


@dataclass
class Outcome:
    """A launch that has run: its buffers (threadgroup arrays after the parameters), fault if any, and counts.

    earlier: a fault before it that may be its cause. image_low: the address at which the kernel's library is loaded.
    """

    buffers: list[KernelBuffer]
    fault: Fault | None
    earlier: Fault | None
    counts: dict[str, int]
    image_low: int


@functools.cache
def _runtime() -> c.CDLL:
    library = c.CDLL(str(runtime_library()), mode=c.RTLD_GLOBAL)
    library.emulated_layout.restype = c.c_uint64
    assert library.emulated_layout() == c.sizeof(_Launch) << 32 | c.sizeof(_Buffer), "the runtime's structures differ"
    library.emulated_launch.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
    return library


@functools.cache
def _kernel(path: Path) -> c.CDLL:
    _runtime()
    try:
        library = c.CDLL(str(path))
    except OSError as error:
        symbol = str(error).partition("undefined symbol: ")[2]
        missing = "is declared and used, but has no value; option function_constants sets one of a constant"
        raise CompileError(f"{symbol} {missing}" if symbol else f"cannot load a kernel: {error}") from error
    library.emulated_bound.restype = c.c_void_p
    return library


def run(
    path: Path, buffers: list[KernelBuffer], grid: Triple, threadgroup: Triple, options: EmulatorOptions
) -> Outcome:
    """Run the kernel library at `path` on `buffers`, one per parameter; return its Outcome.

    A fault is returned, not raised. Outputs are written to the buffers' data, and counts of accesses to the buffers.
    grid: all threads. Raises CompileError if the library cannot be loaded, MemoryError if address space is missing.
    """
    runtime, kernel = _runtime(), _kernel(path)
    free = c.CDLL(None).free
    free.argtypes = [c.c_void_p]
    shared = (_Buffer * MAX_BUFFERS)()
    for raw, buffer in zip(shared, buffers, strict=False):
        raw.size, raw.kind, raw.initialised = buffer.data.nbytes, buffer.kind, buffer.initialised
        raw.contents = buffer.data.ctypes.data if buffer.data.nbytes else None
        raw.copy_back = raw.contents if buffer.kind == OUTPUT else None
    low = kernel.emulated_bound(0)
    launch = _Launch(
        entry=c.cast(kernel.emulated_entry, c.c_void_p).value,
        image_low=low,
        image_high=kernel.emulated_bound(1),
        max_steps=options.max_steps,
        grid=(c.c_uint32 * 3)(*grid),
        group=(c.c_uint32 * 3)(*threadgroup),
        order=ORDERS[options.order] if isinstance(options.order, str) else options.order,
        races="races" not in options.allow,
        initialised="uninitialised" not in options.allow,
        none_orders="mem_none" in options.allow,
        traffic=options.traffic,
        buffers=len(buffers),
    )
    origins = (c.c_uint64 * len(buffers))(*(buffer.origin for buffer in buffers))
    with _lock:
        if runtime.emulated_launch(c.byref(launch), shared, origins):
            raise MemoryError("the emulator could not allocate its address space")
    arrays = [raw for raw in shared[len(buffers) :] if raw.base]
    nothing = np.zeros(0, np.uint8)
    after = [*buffers, *(KernelBuffer((a.name or b"").decode(), nothing, a.item, THREADGROUP) for a in arrays)]
    for raw, buffer in zip([*shared[: len(buffers)], *arrays], after, strict=True):
        buffer.touched = np.frombuffer(c.string_at(raw.touched, raw.size), np.uint8)
        free(raw.touched)
        buffer.counts = {name: getattr(raw, name) for name in (*COUNTS, "size")}
    fault, earlier = (found if found.kind else None for found in (launch.fault, launch.earlier))
    return Outcome(after, fault, earlier, {name: getattr(launch, name) for name in TOTALS}, low)


@dataclass(frozen=True)
class BufferTraffic:
    """One buffer's accesses, in bytes or numbers of accesses.

    `simd_accesses` counts accesses by simdgroups: the n-th execution of an instruction by each of the 32 lanes is one
    access. `simd_lines` sums the distinct 64-byte lines of each; `group_lines` sums those of each threadgroup.
    distinct_read, distinct_written: bytes, each counted once.
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
        """Ratio of bytes read to distinct bytes read; 0 if none was read."""
        return self.bytes_read / self.distinct_read if self.distinct_read else 0.0

    @property
    def lines_per_access(self) -> float:
        return self.simd_lines / self.simd_accesses if self.simd_accesses else 0.0


@dataclass(frozen=True)
class Traffic:
    """The traffic of one launch: buffers by name, and barriers and collectives, summed over all threads.

    max_barriers, max_collectives: those of the thread with the most.
    """

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
        """Return the report as a table: two lines of headings, then a line per buffer."""
        most = f"{self.max_barriers} barriers, {self.max_collectives} collectives"
        first = f"{self.kernel}: {self.threads} threads; per thread at most {most} (counts of the emulator, no times)"
        second = f"{'buffer':<24} {'read':>12} {'distinct':>12} {'re-read':>8} {'written':>12} {'lines/access':>12}"
        lines = [first, second]
        for b in self.buffers.values():
            read = f"{b.bytes_read:>12} {b.distinct_read:>12} {b.reread:>7.2f}x"
            lines.append(f"{b.name:<24} {read} {b.bytes_written:>12} {b.lines_per_access:>12.1f}")
        return "\n".join(lines)

    @property
    def bytes_read(self) -> int:
        """Bytes requested from device and constant memory."""
        return sum(b.bytes_read for b in self.buffers.values() if b.space != "threadgroup")


def make_traffic(kernel: str, outcome: Outcome, grid: Triple, threadgroup: Triple) -> Traffic:
    """Return the report of a completed launch."""
    spaces, buffers = {INPUT: "input", OUTPUT: "output", THREADGROUP: "threadgroup"}, {}
    for b in outcome.buffers:
        distinct = {"distinct_read": int((b.touched & 1).sum()), "distinct_written": int((b.touched >> 1 & 1).sum())}
        buffers[b.name] = BufferTraffic(name=b.name, space=spaces[b.kind], **distinct, **b.counts)
    return Traffic(kernel=kernel, grid=grid, threadgroup=threadgroup, buffers=buffers, **outcome.counts)
