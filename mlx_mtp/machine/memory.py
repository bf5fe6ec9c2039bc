"""Memory that this process may still allocate, and MLX's limit on freed memory kept for reuse."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

IGNORE = "MLX_MTP_IGNORE_MEMORY"  # any value but "" and "0" disables the memory checks
SKIP = f"; set {IGNORE}=1 to skip this check"  # the end of a message
MOUNT = Path("sys/fs/cgroup")
# Number of buffers at which MLX's Metal allocator raises: `iogpu.rsrc_limit`, else this (device_info:
# resource_limit).
METAL_BUFFERS = 499_000


@dataclass(frozen=True)
class Available:
    """Bytes that may still be allocated, and the name of the limit that applies."""

    bytes: int
    limit: str


def available(root: Path = Path("/")) -> Available:
    """Return the bytes that may still be allocated, at least 0, and the name of the lowest of these limits.

    Physical memory, free memory, and what control groups, `ulimit -v` and Metal's working set leave; unknown ones
    are left out. Memory that MLX keeps for reuse counts as free. root: the directory that contains proc and sys.
    """
    reusable = mx.get_cache_memory()
    rooms = [
        (free_memory(root), "free memory"),
        *((room, "the control group's limit") for room in cgroup_rooms(root)),
        (address_room(root), "the limit on virtual memory"),
    ]
    found = [(_physical(), "physical memory")]
    found += [(room + reusable, limit) for room, limit in rooms if room is not None]
    if (most := working_set()) is not None:
        found.append((most - mx.get_active_memory(), "the GPU's recommended working set"))
    least, limit = min(found)
    return Available(max(0, least), limit)


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping, file caches included; None if unknown.

    root: the directory that contains proc; unused on macOS.
    """
    if sys.platform != "darwin":
        return _in_bytes(root / "proc/meminfo", "MemAvailable")
    try:
        done = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return free_in_vm_stat(done.stdout, _physical())


def free_in_vm_stat(text: str, physical: int) -> int | None:
    """Return free bytes by macOS's `vm_stat`: physical memory without wired, anonymous and compressor's pages.

    At least 0; None if the text lacks one of these numbers or the page size.
    """
    kinds = ("Pages wired down", "Anonymous pages", "Pages occupied by compressor")
    patterns = [r"page size of (\d+) bytes", *(rf"^{kind}:\s+(\d+)\.$" for kind in kinds)]
    found = [match for pattern in patterns if (match := re.search(pattern, text, re.MULTILINE))]
    if len(found) < len(patterns):
        return None
    size, *counts = (int(match[1]) for match in found)
    return max(0, physical - size * sum(counts))


def cgroup_rooms(root: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes left, possibly negative, in each control group of this process, or above it, that has a limit.

    Versions 1 and 2. File caches that the kernel drops first count as free. In a container a group's directory may be
    hidden; then the container's own limit is at the mount point.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = ("memory.max", "memory.current", "inactive_file")
        mounts = [root / MOUNT, root / MOUNT / "unified"]
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [root / MOUNT / "memory", root / MOUNT / controllers]
        elif controllers:
            continue
        for mount in mounts:
            inside = mount / os.path.normpath(f"/{path}").lstrip("/")
            for group in [inside, *inside.parents][: len(inside.parts) - len(mount.parts) + 1]:
                if (room := _room(group, *names)) is not None:
                    yield room


def _room(group: Path, limit: str, usage: str, droppable: str) -> int | None:
    most, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not most.isdigit() or not used.isdigit():
        return None
    dropped = re.search(rf"^{droppable} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    return int(most) - int(used) + (int(dropped[1]) if dropped else 0)


def address_room(root: Path = Path("/")) -> int | None:
    """Return the bytes of address space that `ulimit -v` leaves; None if there is no limit or the use is unknown."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    size = _in_bytes(root / "proc/self/status", "VmSize")
    return None if most == resource.RLIM_INFINITY or size is None else most - size


@contextmanager
def cache_limit(limit: int | None) -> Iterator[None]:
    """Let MLX keep at most `limit` bytes of freed buffers inside the block; None leaves its limit unchanged."""
    before = None if limit is None else mx.set_cache_limit(limit)
    try:
        yield
    finally:
        if before is not None:
            mx.set_cache_limit(before)


def working_set() -> int | None:
    """Return Metal's recommended maximum working set in bytes.

    None if it is not reported, or the default device is not a GPU.
    """
    most = mx.device_info().get("max_recommended_working_set_size") if mx.default_device() == mx.gpu else None
    return None if most is None else int(most)


def _in_bytes(file: Path, name: str) -> int | None:
    """Return a value that a /proc file states in kB, in bytes; None if it is not there."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", _read(file), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ignored() -> bool:
    """Return whether the environment variable MLX_MTP_IGNORE_MEMORY disables memory checks: neither "" nor "0"."""
    return os.environ.get(IGNORE, "") not in ("", "0")


def check_room(what: str, needed: int, *, ignore: bool, largest: Callable[[int], int] | None = None) -> None:
    """Raise ValueError if `needed` bytes are not available in addition to the loaded model.

    what: the start of the message. ignore: do not check; MLX_MTP_IGNORE_MEMORY has the same effect. largest: returns
    the number of tokens that fit into a number of bytes, for the message.
    """
    have = available()
    if needed > have.bytes and not ignore and not ignored():
        free = f"{in_gb(have.bytes)} GB available ({have.limit})"
        fits = f"; {largest(have.bytes)} tokens in all fit" if largest else ""
        needs = f"{what} {in_gb(needed)} GB needed in addition to the model"
        raise ValueError(f"{needs}, {free}{fits}{SKIP}")


def in_gb(size: int) -> str:
    """Return bytes in GB (10^9 bytes) as text without the unit: one to three decimals, fewer for larger sizes."""
    return f"{size / 1e9:.{1 if size >= 1e10 else 2 if size >= 1e8 else 3}f}"
