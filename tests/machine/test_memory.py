"""Check the memory limits read from any system's files, and that MLX's cache limit is restored."""

import contextlib
import resource
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_mtp.machine import memory
from mlx_mtp.machine.memory import available, cache_limit, cgroup_rooms, free_in_vm_stat, free_memory

GB = 10**9
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                            300000.
Pages inactive:                          290000.
Pages speculative:                         5000.
Pages wired down:                        150000.
Pages purgeable:                           7000.
File-backed pages:                       200000.
Anonymous pages:                         395000.
Pages stored in compressor:              600000.
Pages occupied by compressor:            120000.
"""


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Files of a Linux system: path -> text."""
    monkeypatch.setattr(memory, "_physical", lambda: 64 * GB)
    monkeypatch.setattr(sys, "platform", "linux")

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def group(limit, used, droppable=0, *, version=2):
    if version == 2:
        return {
            "memory.max": f"{limit}\n",
            "memory.current": f"{used}\n",
            "memory.stat": f"inactive_file {droppable}\n",
        }
    stat = f"inactive_file 1\ntotal_inactive_file {droppable}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def at(place, files):
    return {f"sys/fs/cgroup/{place}{name}": text for name, text in files.items()}


MEMINFO = {"proc/meminfo": "MemTotal:       62500000 kB\nMemFree: 1 kB\nMemAvailable:   31250000 kB\n"}
V2, V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "5:cpu:/x\n4:memory:/a/b\n0::/\n"}
UNLIMITED = 9223372036854771712  # version 1's value for no limit


@pytest.mark.parametrize(
    ("files", "expected", "limit"),
    [
        ({}, 64 * GB, "physical memory"),
        (MEMINFO, 32 * GB, "free memory"),
        (V2 | at("a/b/", group(8 * GB, 3 * GB, GB)), 6 * GB, "the control group's limit"),
        (
            V2 | at("a/b/", group("max", 3 * GB)) | at("a/", group(9 * GB, 4 * GB)),
            5 * GB,
            "the control group's limit",
        ),
        (V2 | at("", group(7 * GB, GB)), 6 * GB, "the control group's limit"),  # a container's view
        (V2 | at("a/b/", group(GB, 2 * GB)), 0, "the control group's limit"),
        (V2 | at("unified/a/", group(8 * GB, 3 * GB)), 5 * GB, "the control group's limit"),
        (V1 | at("memory/a/b/", group(8 * GB, 3 * GB, GB, version=1)), 6 * GB, "the control group's limit"),
        (V1 | at("memory/a/b/", group(UNLIMITED, 3 * GB, version=1)), 64 * GB, "physical memory"),
        (V1 | at("memory/", group(4 * GB, GB, version=1)), 3 * GB, "the control group's limit"),
        ({"proc/self/cgroup": "9:memory,pids:/x\n"} | at("memory/x/", group(4 * GB, 0, version=1)), 4 * GB, "the co"),
        ({"proc/self/cgroup": "0::/../../c\n"} | at("c/", group(3 * GB, GB)), 2 * GB, "the control group's limit"),
        (V2 | at("a/b/", {"memory.max": "8", "memory.current": "?"}), 64 * GB, "physical memory"),
        ({"proc/self/cgroup": "garbage\n::\n0:\n", "proc/meminfo": "MemAvailable: lots"}, 64 * GB, "physical memory"),
    ],
)
def test_what_is_available(system, files, expected, limit):
    found = available(system(files))
    assert found.bytes - mx.get_cache_memory() * (limit != "physical memory" and expected > 0) == expected
    assert found.limit.startswith(limit)


def test_control_groups_outside_the_mount_are_ignored(system, tmp_path):
    root = system({"proc/self/cgroup": "0::/../..\n", "memory.max": "5", "memory.current": "1"})
    assert list(cgroup_rooms(root / "sys/..")) == []


def test_free_memory_on_macos(monkeypatch):
    """Physical memory without wired, anonymous and compressed pages."""
    physical = 16 * 2**30
    expected = physical - 16384 * (150_000 + 395_000 + 120_000)
    assert free_in_vm_stat(VM_STAT, physical) == expected
    assert free_in_vm_stat(VM_STAT, 2**30) == 0
    for line in ("Anonymous", "wired", "occupied", "page size"):
        assert free_in_vm_stat("\n".join(x for x in VM_STAT.splitlines() if line not in x), physical) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory, "_physical", lambda: physical)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=VM_STAT))
    assert free_memory() == expected
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert free_memory() is None


def test_the_gpus_working_set_is_a_limit(system, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 10 * GB})
    found = available(system({}))
    assert found.bytes == 10 * GB - mx.get_active_memory()
    assert "GPU" in found.limit


def test_a_limit_on_virtual_memory(system, monkeypatch):
    root = system({"proc/self/status": "VmPeak:\t 9000000 kB\nVmSize:\t 4000000 kB\n"})
    limits = {resource.RLIMIT_AS: (5 * GB, 6 * GB)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert available(root).bytes == 5 * GB - 4_000_000 * 1024 + mx.get_cache_memory()
    assert "virtual" in available(root).limit
    limits[resource.RLIMIT_AS] = (resource.RLIM_INFINITY,) * 2
    assert available(root).bytes == 64 * GB


def test_the_cache_limit_is_restored():
    before = mx.set_cache_limit(12345)
    try:
        for limit, inside in ((777, 777), (0, 0), (None, 12345)):
            with contextlib.suppress(KeyboardInterrupt), cache_limit(limit):
                assert mx.set_cache_limit(inside) == inside
                raise KeyboardInterrupt
            assert mx.set_cache_limit(12345) == 12345
    finally:
        mx.set_cache_limit(before)
