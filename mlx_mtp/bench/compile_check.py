"""Compile the text of every kernel of the released models under a time limit, and report each result.

A child process compiles. If a text exceeds the limit (a heavy kernel can hang Apple's compiler), the child is killed
and a new one continues with the next text. On a Metal GPU MLX compiles each text and runs it on zeros of small
shapes;
elsewhere clang's front end checks it (`emulator/front_end.py`), which is not Apple's compiler.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..emulator.opencl import zig
from ..kernels import on_metal
from ..machine.atomic import write_whole
from ..machine.errors import first_line
from . import result
from .compile_jobs import TYPES, CompileJob, probe, reason, types_of
from .compile_process import CRASHED, HUNG, MESSAGE, Child

FORMAT = 1
LIMIT = 60.0  # seconds per text
START = 300.0  # seconds for a child to start on a busy machine
EVERY = 1.0  # seconds between writes of the report
COMPILERS = {"metal": "Apple's, by MLX", "front end": "clang's front end for C++ for OpenCL, not Apple's compiler"}
NOT_REACHED, COMPILED, REFUSED = "not reached", "compiled", "refused"
NO_TYPE = "type not supported"
FAILED = (REFUSED, HUNG, CRASHED)
Result = dict[str, Any]


def _not_reached(job: CompileJob) -> Result:
    arguments, group = dict(job["call"]["template"]), math.prod(job["call"]["threadgroup"])
    line = {"kernel": job["name"], "arguments": arguments, "types": types_of(job), "threads": group}
    return {**line, "status": NOT_REACHED}


class CompileCheck:
    """A compile check of the texts of `jobs`, and its report in `file`, written at the start and about every second.

    limit: seconds per text. found: the report. command: starts the compiling process. lacking: types that the device
    lacks, with the reason.
    """

    def __init__(self, jobs: Sequence[CompileJob], file: Path, limit: float = LIMIT, command: Sequence[str] = ()):
        way = "metal" if on_metal() else "front end"
        self.jobs, self.file, self.limit, self.metal = jobs, file, limit, way == "metal"
        self.command = [*command] or [sys.executable, "-m", "mlx_mtp.bench.compile_child", way]
        self.child: Child | None = None
        self.written = 0.0
        self.texts: list[Result] = [_not_reached(job) for job in jobs]
        self.lacking: Result = {}
        self.found: Result = {
            **{"doctor": FORMAT, "compile_only": True, "environment": result.environment(), "metal": self.metal},
            **{"compiler": COMPILERS[way], "limit_seconds": limit, "finished": False, "running": None},
            **{"not_checked": None, "types_not_supported": self.lacking, "counts": {}, "texts": self.texts},
        }

    def run(self, progress: Callable[[str, int, int], None]) -> Result:
        """Compile the texts, except those with types that the device lacks; return the report, ready for JSON.

        The report is written to `file` even after an error. progress: called before each text with its kernel, the
        number done and the total. Raises ValueError if a child does not start or there is no compiler.
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
                progress(job["name"], done, len(self.jobs))
                self.found["running"] = text
                missing = [each for each in text["types"] if each in self.lacking]
                lacking = {"status": NO_TYPE, "message": f"the device has no {', '.join(missing)}"}
                text |= lacking if missing else self._answer(job)
                self._write_sometimes()
            self.found |= {"finished": True, "running": None}
        except ValueError as e:
            self.found["not_checked"] = first_line(e)
            raise
        finally:
            self.end_child()
            self.write()
        return self.found

    def _answer(self, job: CompileJob) -> Result:
        """Compile one text in the child, started if there is none; return a dict of its status and seconds.

        The dict also has the message of a failure, and `most_threads` if known. A hung or crashed child is ended.
        """
        child = self.child or self._start()
        tic = time.monotonic()
        answer = child.ask(job, self.limit, self._write_sometimes)
        seconds = round(time.monotonic() - tic, 3)
        if "status" in answer:
            self.end_child()
            return {**answer, "seconds": seconds}
        if refused := answer["refused"]:
            return {"status": REFUSED, "seconds": seconds, "message": refused[:MESSAGE]}
        most = answer.get("most_threads")
        return {"status": COMPILED, "seconds": seconds} | ({"most_threads": most} if most else {})

    def _start(self) -> Child:
        self.child = Child(self.command)
        answer = self.child.ask(None, START, self._write_sometimes)
        if "ready" not in answer:
            raise ValueError(f"the compiling process does not start: {answer['message']}")
        return self.child

    def end_child(self) -> None:
        """Kill the compiling process, if there is one."""
        child, self.child = self.child, None
        if child:
            child.end()

    def _write_sometimes(self) -> None:
        if time.monotonic() > self.written + EVERY:
            self.write()

    def write(self) -> None:
        """Write the current report to the file."""
        self.found["counts"] = dict(Counter(text["status"] for text in self.texts))
        write_whole(self.file, json.dumps(self.found, indent=1) + "\n")
        self.written = time.monotonic()


def lines(found: Result) -> Iterator[str]:
    """Yield a report as lines: one per kernel, one per failed text, then types, compiler and what was not checked.

    If an error ended the check, yield only one line, with the error.
    """
    if found["not_checked"]:
        yield f"not checked: {found['not_checked']}"
        return
    texts = found["texts"]
    names = {text["kernel"]: [t for t in texts if t["kernel"] == text["kernel"]] for text in texts}
    for name, own in names.items():
        counts = Counter(text["status"] for text in own)
        seconds = sum(text.get("seconds", 0.0) for text in own)
        most = min((text["most_threads"] for text in own if "most_threads" in text), default=None)
        line = f"{name:22} {', '.join(f'{n} {status}' for status, n in counts.items())}; {seconds:.1f} s"
        yield line + (f"; groups of up to {most} threads" if most else "")
    for text in texts:
        if text["status"] in FAILED:
            arguments = ", ".join(f"{key}={value}" for key, value in text["arguments"].items())
            yield f"{text['status'].upper()}: {text['kernel']} <{arguments}>: {reason(text['message'])}"
    for dtype, why in found["types_not_supported"].items():
        yield f"not supported by this device: {dtype} ({reason(why)})"
    yield f"compiler: {found['compiler']}"
    if not found["metal"]:
        yield "not checked without a Metal GPU: Apple's compiler, pipelines, registers, results"


def is_good(found: Result) -> bool:
    """Return whether the check finished and each text was compiled or uses a type that the device lacks."""
    return found["finished"] and not any(text["status"] in FAILED for text in found["texts"])
