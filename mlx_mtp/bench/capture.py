"""Write GPU traces for Xcode of one phase in a few cycles: those of a whole generation are too large to open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from .profile import Timer, Workload, decode_in_phases

WARM = 3  # cycles before the first that is captured
VARIABLE = "MTL_CAPTURE_ENABLED"


@dataclass
class Captured(Timer):
    """A watch that has Metal write one trace for each of the first `paths` of a phase, warm cycles left out."""

    phase: str = "verify"
    paths: list[Path] = field(default_factory=list)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        due = name == self.phase and self.paths and (name == "prefill" or self.cycles >= WARM)
        with _trace(self.paths.pop(0)) if due else nullcontext(), super().during(name):
            yield
            if due:
                mx.synchronize()


@contextmanager
def _trace(path: Path) -> Iterator[None]:
    mx.synchronize()
    mx.metal.start_capture(str(path))
    try:
        yield
    finally:
        mx.metal.stop_capture()


def trace_paths(path: Path, cycles: int) -> list[Path]:
    """Name `path` for one cycle; for several, with a number before its suffix."""
    return [path] if cycles == 1 else [path.with_stem(f"{path.stem}-{i + 1}") for i in range(cycles)]


def check_capture(phase: str, path: Path, cycles: int) -> None:
    """Raise ValueError where Metal would write no trace."""
    if not mx.metal.is_available():
        raise ValueError(f"capture={phase}: needs a Metal GPU, and there is none here")
    if os.environ.get(VARIABLE) != "1":
        raise ValueError(f"capture={phase}: Metal captures only in a process started with {VARIABLE}=1 in front")
    if path.suffix != ".gputrace":
        raise ValueError(f"capture_path={path}: must end in .gputrace")
    if cycles > 1 and phase == "prefill":
        raise ValueError(f"capture_cycles={cycles}: a prompt is read once; allowed is 1 with --capture prefill")
    if there := [file for file in trace_paths(path, cycles) if file.exists()]:
        raise ValueError(f"capture_path={there[0]}: exists, and Metal does not overwrite a trace")


def capture(work: Workload, phase: str, path: Path, cycles: int) -> list[Path]:
    """Write traces of `phase` in so many cycles of the workload, a file each; fewer where its text ends before."""
    wanted = trace_paths(path, cycles)
    decode_in_phases(work, Captured(phase=phase, paths=list(wanted)))
    return [file for file in wanted if file.exists()]
