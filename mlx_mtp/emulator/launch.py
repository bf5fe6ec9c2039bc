"""Runs a compiled kernel: hands buffers to the runtime, and turns its faults into messages."""

import ctypes as c
import functools
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .compile import runtime_library
from .errors import CompileError

MAX_BUFFERS = 128
INPUT, OUTPUT, THREADGROUP = range(3)
_lock = threading.Lock()


class _Buffer(c.Structure):
    _fields_ = [
        *[("size", c.c_uint64), ("kind", c.c_uint32), ("initialised", c.c_uint32)],
        *[("contents", c.c_void_p), ("copy_back", c.c_void_p)],
        *[("base", c.c_uint64), ("touched", c.c_void_p), ("shadow", c.c_void_p), ("line_stamp", c.c_void_p)],
        *[(name, c.c_uint64) for name in ("reads", "writes", "bytes_read", "bytes_written")],
        *[(name, c.c_uint64) for name in ("group_lines", "simd_accesses", "simd_lines")],
        *[("name", c.c_char_p), ("tag", c.c_void_p), ("item", c.c_uint64)],
    ]


class Fault(c.Structure):
    """What the runtime knows of a kernel's first fault."""

    _fields_ = [
        *[(n, c.c_uint32) for n in ("kind", "writes", "thread", "other_thread", "other_writes", "other_group_known")],
        *[(n, c.c_uint64) for n in ("buffer", "size", "address", "site", "other_site")],
        *[
            ("offset", c.c_int64),
            ("group", c.c_uint32 * 3),
            ("text", c.c_char * 512),
        ],
    ]


class _Launch(c.Structure):
    _fields_ = [
        *[(n, c.c_void_p) for n in ("entry", "image_low", "image_high")],
        ("max_steps", c.c_uint64),
        *[("grid", c.c_uint32 * 3), ("group", c.c_uint32 * 3)],
        *[(n, c.c_uint32) for n in ("order", "races", "none_orders", "traffic", "buffers")],
        *[(n, c.c_uint64) for n in ("steps", "barriers", "collectives", "max_barriers", "max_collectives")],
        *[("threads", c.c_uint64), ("threadgroup_bytes", c.c_uint64), ("fault", Fault), ("earlier", Fault)],
    ]


@dataclass
class Memory:
    """One buffer of a launch: its bytes, and after the launch what the kernel did with it."""

    name: str
    data: np.ndarray  # uint8, copied in before and back after
    itemsize: int
    kind: int
    initialised: bool = True
    origin: int = 0  # byte of `data` at which the kernel's pointer starts
    touched: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """A launch that has run."""

    memories: list[Memory]
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
        symbol = str(error).partition("undefined symbol: ")[2] or str(error)
        raise CompileError(f"{symbol} is declared and used, but has no value here") from error
    library.emulated_bound.restype = c.c_void_p
    return library


def _copy_out(buffer: _Buffer, free) -> np.ndarray:
    touched = np.ctypeslib.as_array(c.cast(buffer.touched, c.POINTER(c.c_uint8)), (max(buffer.size, 1),))
    copy = touched[: buffer.size].copy()
    free(buffer.touched)
    return copy


COUNTS = ("reads", "writes", "bytes_read", "bytes_written", "group_lines", "simd_accesses", "simd_lines")
TOTALS = ("steps", "barriers", "collectives", "max_barriers", "max_collectives", "threads", "threadgroup_bytes")


def run(
    path: Path,
    memories: list[Memory],
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    order: int,
    races: bool,
    none_orders: bool,
    traffic: bool,
    max_steps: int,
) -> Outcome:
    """Runs the kernel at `path` on `memories`, one per parameter, whose data and counts it fills in."""
    runtime, kernel = _runtime(), _kernel(path)
    free = c.CDLL(None).free
    free.argtypes = [c.c_void_p]
    buffers = (_Buffer * MAX_BUFFERS)()
    for buffer, memory in zip(buffers, memories, strict=False):
        buffer.size, buffer.kind, buffer.initialised = memory.data.nbytes, memory.kind, memory.initialised
        buffer.contents = memory.data.ctypes.data if memory.data.nbytes else None
        buffer.copy_back = memory.data.ctypes.data if memory.kind == OUTPUT and memory.data.nbytes else None
    low, high = kernel.emulated_bound(0), kernel.emulated_bound(1)
    launch = _Launch(
        entry=c.cast(kernel.emulated_entry, c.c_void_p).value,
        image_low=low,
        image_high=high,
        max_steps=max_steps,
        grid=(c.c_uint32 * 3)(*grid),
        group=(c.c_uint32 * 3)(*threadgroup),
        order=order,
        races=races,
        none_orders=none_orders,
        traffic=traffic,
        buffers=len(memories),
    )
    origins = (c.c_uint64 * len(memories))(*(m.origin for m in memories))
    with _lock:
        if runtime.emulated_launch(c.byref(launch), buffers, origins):
            raise MemoryError("the emulator could not get the address space that it needs")
    threadgroup_arrays = [b for b in buffers[len(memories) :] if b.base]
    for buffer in threadgroup_arrays:
        name = (buffer.name or b"").decode()
        memories.append(Memory(name, np.zeros(0, np.uint8), buffer.item, THREADGROUP))
    used = [*buffers[: len(memories) - len(threadgroup_arrays)], *threadgroup_arrays]
    for buffer, memory in zip(used, memories, strict=True):
        memory.touched = _copy_out(buffer, free)
        memory.counts = {name: getattr(buffer, name) for name in COUNTS} | {"size": buffer.size}
    totals = {name: getattr(launch, name) for name in TOTALS}
    return Outcome(
        memories,
        launch.fault if launch.fault.kind else None,
        launch.earlier if launch.earlier.kind else None,
        totals,
        low,
    )
