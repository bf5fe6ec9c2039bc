"""A server to attack: `mlx-mtp serve` in a process of its own, its memory, its CPU time and its log, from /proc."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from hostile_wire import Outcome, attempt, post

CEILING = 8 << 30  # bytes of address space of a server
MB = 1 << 20
PR_SET_PDEATHSIG = 1  # of Linux
TICK = os.sysconf("SC_CLK_TCK")
# Memory that one request has freed returns to the system; otherwise the next one reuses it, which no figure shows.
FREED = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
IDLE = 0.1  # share of a core below which a server is idle
WINDOW, WINDOWS = 0.2, 3  # seconds over which that share is measured, and the number of idle windows in succession


def status(pid: int, name: str) -> int:
    """Return a figure in bytes of /proc/PID/status; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, those that have ended included."""
    total = 0
    for each in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15] if each == pid else fields[11:13]))
    return total / TICK


class Peak:
    """While the block runs, `bytes` grows to the memory that a process and its descendants took in addition."""

    def __init__(self, pid: int):
        self.pid, self.bytes, self._stop = pid, 0, threading.Event()
        self._base: dict[int, int] = {}
        self._peaks: dict[int, int] = {}

    def __enter__(self) -> "Peak":
        for each in family(self.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{each}/clear_refs").write_text("5")  # VmHWM begins again at VmRSS
            self._base[each] = status(each, "VmRSS")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self._read()

    def _read(self) -> None:
        for each in family(self.pid):
            self._peaks[each] = max(self._peaks.get(each, 0), status(each, "VmHWM"))
        self.bytes = sum(max(0, peak - self._base.get(each, 0)) for each, peak in self._peaks.items())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()


class Server:
    """A server that `start` starts, and starts again after it has ended; `stop` kills it.

    model: of `mlx-mtp serve`. port, pid: of the present process.
    """

    def __init__(self, model: str):
        self.model, self.port, self.pid = model, 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self.log = Path(self._folder.name, "log")

    @staticmethod
    def free_port() -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]

    def start(self, seconds: float = 120) -> None:
        """Start the server and wait until it answers; raises RuntimeError with its log if it does not."""
        self.port = self.free_port()
        command = [
            sys.executable,
            "-m",
            "mlx_mtp",
            "serve",
            "--model",
            self.model,
            "--port",
            str(self.port),
            "--quiet",
        ]
        environment = {**os.environ, **FREED, "MLX_MTP_CACHE": self._folder.name}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=_limit
            )
        self.pid, until = self._process.pid, time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < until:
            if self.answers(5):
                return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")

    def answers(self, seconds: float) -> bool:
        """Return whether the server answers /health within a number of seconds."""
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        with contextlib.suppress(OSError):
            return attempt(self.port, post("/", b"")._replace(pieces=((0.0, head),)), seconds).status == 200
        return False

    def stop(self) -> str:
        """Kill the server; return its code and the end of its log if it had already ended, else ""."""
        process, self._process = self._process, None
        if process is None:
            return ""
        code = process.poll()
        process.kill()
        process.wait()
        return "" if code is None else f"code {code}, {self.log.read_text(errors='replace')[-500:]!r}"

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CEILING, CEILING))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a server must not outlive the program that attacks it


class Load:
    """The time for which a process computes, from now on."""

    def __init__(self, pid: int):
        self.pid, self._begun, self._spent = pid, time.monotonic(), cpu(pid)

    def until_idle(self, most: float) -> float:
        """Return the seconds until the process is idle, or `most` seconds from this call; of wall and CPU the lesser.

        On a busy machine the wall time is long, with several threads the CPU time.
        """
        until, idle, found = time.monotonic() + most, 0, 0.0
        while idle < WINDOWS and time.monotonic() < until:
            now, before = time.monotonic(), cpu(self.pid)
            time.sleep(WINDOW)
            idle = idle + 1 if cpu(self.pid) - before <= IDLE * WINDOW + 1 / TICK else 0
            if idle < 2:  # of several idle windows in succession, the begin of the first counts
                found = min(now - self._begun, before - self._spent)
        return found


def is_refusal(outcome: Outcome) -> bool:
    """Return whether a response defers a request, 503 with a time to try again, or refuses one for its length."""
    if outcome.status == 400 and "prompt is too long" in outcome.text:
        return True
    return outcome.status == 503 and "\r\nretry-after:" in outcome.text.partition("\r\n\r\n")[0].lower()
