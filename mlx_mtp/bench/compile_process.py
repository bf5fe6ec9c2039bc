"""Run the compiling process (`compile_child.py`) and kill it if it hangs."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .compile_jobs import CompileJob

HUNG, CRASHED = "hung", "crashed"
POLL = 1.0  # seconds between two calls of `wait`
MESSAGE = 4000  # maximum characters of a message
Result = dict[str, Any]


class Child:
    """A compiling process: `ask` sends it a job. It leads a process group, which `end` kills."""

    def __init__(self, command: Sequence[str]):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, job: CompileJob | None, limit: float, wait: Callable[[], None]) -> Result:
        """Send a job (None: nothing) and return the next answer; call `wait` about every second until it arrives.

        If none arrives within `limit` seconds, or the process ends, a dict with "status" HUNG or CRASHED and a
        "message" is returned instead. A hung process is not killed: call `end`.
        """
        end = time.monotonic() + limit
        with contextlib.suppress(OSError):  # the process has ended, which is detected below
            if job is not None:
                assert self.process.stdin
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.answers.get(timeout=min(left, POLL))
            except queue.Empty:
                wait()
                continue
            if line:
                return json.loads(line)
            code = self.process.wait()
            ending = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return {"status": CRASHED, "message": f"ended {ending}; {self._last_line()}"}
        return {"status": HUNG, "message": f"killed after {limit:g} s"}

    def _last_line(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1][:MESSAGE] if lines else "no message"

    def end(self) -> None:
        """Kill the process and its children, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()
