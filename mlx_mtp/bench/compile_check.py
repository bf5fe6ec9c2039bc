"""Compile the text of every kernel of the released models under a time limit, and report what happens to each.

A child process compiles. One that exceeds the limit is killed, since a heavy kernel can hang Apple's compiler, and a
new one goes on with the next text. On a Metal GPU MLX compiles and runs each text, on zeros of small shapes; elsewhere
clang's front end checks it (`emulator/front_end.py`), which is not Apple's compiler.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..emulator.opencl import zig
from ..emulator.texts import LaunchText, RecordedLaunch, recorded
from ..kernels import on_metal
from ..kernels._source import DIRECTORY, DTYPES
from ..machine.atomic import write_whole
from ..machine.errors import first_line
from . import result
from .kernel_launches import FORMATS, RELEASED, groups

FORMAT = 1
LIMIT = 60.0  # seconds for a text
START = 300.0  # seconds for a child to start, on a busy machine
EVERY = 1.0  # seconds between two writes of the report
COMPILERS = {"metal": "Apple's, by MLX", "front end": "clang's front end for C++ for OpenCL, not Apple's compiler"}
NOT_REACHED, COMPILED, REFUSED = "not reached", "compiled", "refused"
HUNG, CRASHED, NO_TYPE = "hung", "crashed", "type not supported"
FAILED = (REFUSED, HUNG, CRASHED)
OPS = tuple(sorted(path.stem for path in DIRECTORY.glob("*.metal")))
TYPES = tuple(str(dtype).removeprefix("mlx.core.") for dtype in DTYPES)
MESSAGE = 4000  # characters of a compiler's message that are kept

Found = dict[str, Any]
Job = dict[str, Any]


def launches(ops: Sequence[str] = (), sample: int | None = None, every_format: bool = False) -> list[RecordedLaunch]:
    """List a launch of each different text, kernel by kernel.

    ops: only these kernels. sample: so many of each, from the first to the last in even steps. every_format: in all
    formats that the kernels support, not only in those of RELEASED.
    """
    with recorded() as found:
        for make in groups(FORMATS if every_format else RELEASED).values():
            for launch in make():
                launch()
    different: dict[LaunchText, RecordedLaunch] = {}
    for each in found:
        if each.text.kernel in (ops or OPS):
            different.setdefault(each.text, each)
    by_kernel = sorted(different.values(), key=lambda each: each.text.kernel)
    parts = [list(part) for _, part in itertools.groupby(by_kernel, key=lambda each: each.text.kernel)]
    return [each for part in parts for each in _in_steps(part, sample or len(part))]


def _in_steps(part: list[RecordedLaunch], count: int) -> list[RecordedLaunch]:
    count = min(count, len(part))
    return [part[i * (len(part) - 1) // max(1, count - 1)] for i in range(count)]


def job_of(launch: RecordedLaunch) -> Job:
    """Write a launch as JSON: arrays by shape and dtype, dtypes by name."""
    call, name = dict(launch.call), _name
    call["inputs"] = [
        {"shape": x.shape, "dtype": name(x.dtype)} if isinstance(x, mx.array) else x for x in call["inputs"]
    ]
    call["template"] = [(key, name(v) if isinstance(v, mx.Dtype) else v) for key, v in call["template"]]
    call["output_dtypes"] = [name(dtype) for dtype in call["output_dtypes"]]
    return {"name": launch.text.kernel, "text": launch.text.text, "kernel": launch.kernel, "call": call}


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def types_of(job: Job) -> list[str]:
    """List the floating-point types that a job's text uses."""
    call = job["call"]
    named = {given["dtype"] for given in call["inputs"] if isinstance(given, dict)} | {*call["output_dtypes"]}
    named |= {value for _, value in call["template"] if isinstance(value, str)}
    return [each for each in TYPES if each in named]


def probe(dtype: str) -> Job:
    """Make a job of the smallest kernel that computes in a type."""
    names = {"name": "probe", "input_names": ["x"], "output_names": ["y"]}
    kernel = {**names, "source": "uint i = thread_position_in_grid.x; y[i] = T(float(x[i]) + 1);"}
    sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [dtype]}
    call = {"inputs": [{"shape": (8,), "dtype": dtype}], "template": [("T", dtype)], **sizes}
    return {"name": "probe", "text": "", "kernel": kernel, "call": call}


class Child:
    """A process that compiles: `ask` sends it a job. It leads a group of processes, which `end` kills."""

    def __init__(self, command: Sequence[str]):
        self.errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, job: Job | None, limit: float, wait: Callable[[], None]) -> Found:
        """Send a job, or none, and return the answer, or why there is none; `wait` is called in between.

        A child that gives no answer within `limit` seconds, or ends, is killed.
        """
        end = time.monotonic() + limit
        with contextlib.suppress(OSError):  # of a process that has ended, which its output shows
            if job is not None:
                assert self.process.stdin
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.answers.get(timeout=min(left, EVERY))
            except queue.Empty:
                wait()
                continue
            if line:
                return json.loads(line)
            code = self.process.wait()
            return {"status": CRASHED, "message": f"{_ending(code)}; {self._last_line()}"}
        return {"status": HUNG, "message": f"killed after {limit:g} s"}

    def _last_line(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1][:MESSAGE] if lines else "no message"

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def _ending(code: int) -> str:
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class CompileCheck:
    """A run over texts, and its report, which is written from the start and then about every second.

    found: the report. command: of a child. lacking: types that the device lacks, and why.
    """

    def __init__(self, jobs: Sequence[Job], file: Path, limit: float = LIMIT, command: Sequence[str] = ()):
        way = "metal" if on_metal() else "front end"
        self.jobs, self.file, self.limit, self.metal = jobs, file, limit, way == "metal"
        self.command = [*command] or [sys.executable, "-m", "mlx_mtp.bench.compile_child", way]
        self.child: Child | None = None
        self.written = 0.0
        self.texts: list[Found] = [
            {"kernel": job["name"], "arguments": dict(job["call"]["template"]), "types": types_of(job)} for job in jobs
        ]
        for text in self.texts:
            text |= {"status": NOT_REACHED}
        self.lacking: Found = {}
        self.found: Found = {
            **{"doctor": FORMAT, "compile_only": True, "environment": result.environment(), "metal": self.metal},
            **{"compiler": COMPILERS[way], "limit_seconds": limit, "finished": False, "running": None},
            **{"not_checked": None, "types_not_supported": self.lacking, "counts": {}, "texts": self.texts},
        }

    def run(self, tell: Callable[[str, int, int], None]) -> Found:
        """Compile all, and tell before each kernel's texts how many are done; returns the report, ready for JSON.

        The report is written in any case. Raises ValueError if no child starts, or there is no compiler.
        """
        try:
            self.write()
            if not self.metal:
                zig()
            for dtype in TYPES[1:] if self.metal else ():  # every Metal device has float32
                answer = self._answer(probe(dtype))
                if answer["status"] == REFUSED:
                    self.lacking[dtype] = answer["message"]
            for done, (job, text) in enumerate(zip(self.jobs, self.texts, strict=True)):
                tell(job["name"], done, len(self.jobs))
                self.found["running"] = text
                text |= self._lacking(text) or self._answer(job)
            self.found |= {"finished": True, "running": None}
        except ValueError as e:
            self.found["not_checked"] = first_line(e)
            raise
        finally:
            self.end_child()
            self.write()
        return self.found

    def _lacking(self, text: Found) -> Found | None:
        missing = [each for each in text["types"] if each in self.lacking]
        return {"status": NO_TYPE, "message": f"the device has no {', '.join(missing)}"} if missing else None

    def _answer(self, job: Job) -> Found:
        """Compile one text: its status, seconds, and a message if it was not compiled."""
        child = self.child or self._start()
        tic = time.monotonic()
        answer = child.ask(job, self.limit, self._write_sometimes)
        seconds = round(time.monotonic() - tic, 3)
        if "status" in answer:
            self.end_child()
            return {**answer, "seconds": seconds}
        self._write_sometimes()
        if refused := answer["refused"]:
            return {"status": REFUSED, "seconds": seconds, "message": refused[:MESSAGE]}
        return {"status": COMPILED, "seconds": seconds}

    def _start(self) -> Child:
        self.child = Child(self.command)
        answer = self.child.ask(None, START, self._write_sometimes)
        if "ready" not in answer:
            raise ValueError(f"the process that compiles does not start: {answer['message']}")
        return self.child

    def end_child(self) -> None:
        """Kill the child, if there is one."""
        child, self.child = self.child, None
        if child:
            child.end()

    def _write_sometimes(self) -> None:
        if time.monotonic() > self.written + EVERY:
            self.write()

    def write(self) -> None:
        """Write the report as it is."""
        self.found["counts"] = dict(Counter(text["status"] for text in self.texts))
        write_whole(self.file, json.dumps(self.found, indent=1) + "\n")
        self.written = time.monotonic()


def lines(found: Found) -> Iterator[str]:
    """Describe a report: a line for each kernel, then each text that failed, then what was not checked."""
    texts = found["texts"]
    names = {text["kernel"]: [t for t in texts if t["kernel"] == text["kernel"]] for text in texts}
    for name, own in names.items():
        counts = Counter(text["status"] for text in own)
        seconds = sum(text.get("seconds", 0.0) for text in own)
        yield f"{name:22} {', '.join(f'{n} {status}' for status, n in counts.items())}; {seconds:.1f} s"
    for text in texts:
        if text["status"] in FAILED:
            arguments = ", ".join(f"{key}={value}" for key, value in text["arguments"].items())
            yield f"{text['status'].upper()}: {text['kernel']} <{arguments}>: {reason(text['message'])}"
    for dtype, why in found["types_not_supported"].items():
        yield f"not supported by this device: {dtype} ({reason(why)})"
    yield f"compiler: {found['compiler']}"
    if not found["metal"]:
        yield "not checked here, as there is no Metal GPU: Apple's compiler, pipelines, registers, results"


def reason(message: str) -> str:
    """Return the first error of a compiler's message, else its first line."""
    all_lines = message.strip().splitlines() or [""]
    return next((line.strip() for line in all_lines if "error:" in line), all_lines[0])


def is_good(found: Found) -> bool:
    """Return whether each text was compiled, or uses a type that the device lacks."""
    return found["finished"] and not any(text["status"] in FAILED for text in found["texts"])
