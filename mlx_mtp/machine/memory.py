"""How much memory this process may still take, what limits it, and MLX's own limits while something runs."""

import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

IGNORE = "MLX_MTP_IGNORE_MEMORY"  # set to anything but "" and "0": nothing is refused
MOUNT = Path("sys/fs/cgroup")
_wired: list[int] = []  # the limit before, and one entry for each that asked for another
_lock = threading.RLock()  # a finalizer may come in between


@dataclass(frozen=True)
class Available:
    """Bytes that may still be taken, and what limits them."""

    bytes: int
    limit: str


def available(root: Path = Path("/")) -> Available:
    """The least of physical memory, free memory, the limits of the control group and of the process, and Metal's
    recommended working set. What MLX holds for reuse counts as free. root: where /proc and /sys are.
    """
    reusable = mx.get_cache_memory()
    found = [(_physical(), "physical memory")]
    if (free := free_memory(root)) is not None:
        found.append((free + reusable, "free memory"))
    found += [(room + reusable, "the control group's limit") for room in cgroup_rooms(root)]
    if (room := address_room(root)) is not None:
        found.append((room + reusable, "the limit on virtual memory"))
    if (most := _working_set()) is not None:
        found.append((most - mx.get_active_memory(), "the GPU's recommended working set"))
    least, limit = min(found)
    return Available(max(0, least), limit)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the system can give without swapping, file caches included; None where it does not say."""
    if sys.platform == "darwin":
        try:
            done = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return free_in_vm_stat(done.stdout, _physical())
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def free_in_vm_stat(text: str, physical: int) -> int | None:
    """What `vm_stat` of macOS leaves of physical memory: all but wired, anonymous and compressed pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    kinds = ("Pages wired down", "Anonymous pages", "Pages occupied by compressor")
    counts = [re.search(rf"^{kind}:\s+(\d+)\.$", text, re.MULTILINE) for kind in kinds]
    if size is None or None in counts:
        return None
    return max(0, physical - int(size[1]) * sum(int(count[1]) for count in counts if count))


def cgroup_rooms(root: Path = Path("/")) -> Iterator[int]:
    """Bytes left in each control group above this process that has a limit, versions 1 and 2.

    File caches that the kernel would drop first are left, too. A group's directory may be outside of a container's
    view, whose own limit is then at the mount.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
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
    """Bytes left of what `ulimit -v` lets this process map; None where there is no limit, or no way to know."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    size = re.search(r"^VmSize:\s+(\d+) kB$", _read(root / "proc/self/status"), re.MULTILINE)
    return None if most == resource.RLIM_INFINITY or size is None else most - int(size[1]) * 1024


@contextmanager
def wired() -> Iterator[None]:
    """Keep what the GPU may recommend resident while something runs; what was set before comes back in any case.

    Of several that overlap, as generators do in any order, the first sets it and the last brings it back.
    """
    most = _working_set()
    if most is None:
        yield
        return
    with _lock:
        if not _wired:
            _wired.append(mx.set_wired_limit(most))
        _wired.append(most)
    try:
        yield
    finally:
        with _lock:
            _wired.pop()
            if len(_wired) == 1:
                _unwire(_wired.pop())


def _unwire(before: int) -> None:
    try:
        mx.synchronize()  # not to be changed while something is computed
    finally:
        mx.set_wired_limit(before)


@contextmanager
def cache_limit(limit: int | None) -> Iterator[None]:
    """Let MLX keep at most `limit` bytes of freed buffers for reuse; None: as many as before."""
    if limit is None:
        yield
        return
    before = mx.set_cache_limit(limit)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def _working_set() -> int | None:
    """Bytes that the GPU recommends to use; None where nothing runs on one, or it does not say."""
    most = mx.device_info().get("max_recommended_working_set_size") if mx.default_device() == mx.gpu else None
    return None if most is None else int(most)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ignored() -> bool:
    """Whether the user insists, by the environment."""
    return os.environ.get(IGNORE, "") not in ("", "0")


def check_room(what: str, needed: int, *, ignore: bool, largest: Callable[[int], int] | None = None) -> None:
    """Raise ValueError where `needed` bytes beside a loaded model are not available.

    largest: how many tokens fit into so many.
    """
    have = available()
    if needed > have.bytes and not ignore and not ignored():
        there = f"{in_gb(have.bytes)} GB available ({have.limit})"
        fits = f"; {largest(have.bytes)} tokens in all fit" if largest else ""
        raise ValueError(f"{what} {in_gb(needed)} GB needed beside the model, {there}{fits}; {IGNORE}=1 insists")


def in_gb(size: int) -> str:
    return f"{size / 1e9:.{1 if size >= 1e10 else 2 if size >= 1e8 else 3}f}"
