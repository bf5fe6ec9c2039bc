"""Count the launches and bytes of a profiled generation's phases, or write GPU traces of one phase."""

import io
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.make_cache import make_prompt_cache
from .profile import Timer, Workload, decode_in_phases
from .roofline.models import of_port
from .roofline.phases import SHOWN_OVERLAP, draft_floor, pass_floor

VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Full", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
VIEWS |= {"Unflatten", "StopGradient", "Depends"}
NODE = re.compile(r'\[label ="(\w+)"')


def operations(*arrays: mx.array) -> Counter:
    """Return the number of primitives by name, without views, in the graph of these arrays; nothing is computed.

    On a GPU each is at least one launch; a graph fused by mx.compile counts as one.
    """
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return Counter(name for name in NODE.findall(graph.getvalue()) if name not in VIEWS)


@dataclass
class Counted(Timer):
    """A timer that counts the operations of each phase in `found`; the numbers of the last cycle stay."""

    found: dict[str, int] = field(default_factory=dict)

    def evaluate(self, phase: str, caches: Sequence[Any], *arrays: Any) -> None:
        written: Any = tree_flatten([*arrays, [c.parts for c in caches]])
        self.found[phase] = operations(*(a for _, a in written if isinstance(a, mx.array))).total()
        super().evaluate(phase, caches, *arrays)


def launches(work: Workload) -> dict[str, int]:
    """Return the number of operations of a cycle by phase; "prefill" is one chunk of the prompt in the target.

    Views do not count; on a GPU each operation is at least one launch.
    """
    # A few cycles suffice: a phase's graph does not depend on the tokens.
    counted = decode_in_phases(replace(work, max_tokens=min(work.max_tokens, 2 * (work.k + 1))), Counted())
    cache = make_prompt_cache(work.model, num_draft_tokens=0)
    hidden = work.model.hidden(mx.array(list(work.prompt[: work.step]))[None], cache.layers)
    chunk = operations(work.model.logits(hidden[:, -1:]), *cache.arrays).total()
    return {"prefill": chunk, **counted.found}


def bytes_read(work: Workload) -> dict[str, float]:
    """Return the bytes that a cycle must read by phase, as `bench model` counts them; "prefill" is a total.

    Caches have their length in the middle of the text, and experts overlap as published; in "prefill" caches are
    excluded. Of drafters, only MTP heads have an entry.
    """
    model, prompt, k = of_port(work.model), len(work.prompt), work.k
    chunks, context = -(-prompt // work.step), prompt + work.max_tokens // 2
    found = {"prefill": chunks * pass_floor(model, min(work.step, prompt), 0, SHOWN_OVERLAP).total}
    if 0 < k <= model.max_drafts and work.model.drafter is None:
        found["draft"] = draft_floor(model, k, context, SHOWN_OVERLAP).total
    return found | {"verify": pass_floor(model, k + 1, context, SHOWN_OVERLAP).total}


def stream_rate(size: int = 1 << 28, runs: int = 5) -> float:
    """Measure bytes per second, read and written, of adding one to an array of `size` bytes: the best of `runs`."""
    x, seconds = mx.zeros(size // 4), []
    mx.eval(x)
    for _ in range(runs):
        tic = time.perf_counter()
        mx.eval(x + 1)
        seconds.append(time.perf_counter() - tic)
    return 2 * size / min(seconds)


WARM = 3  # cycles before the first capture
VARIABLE = "MTL_CAPTURE_ENABLED"


@dataclass
class Captured(Timer):
    """A timer that makes Metal write a trace of a run of `phase` to each of `paths`, and removes it from that list.

    Runs in the first WARM cycles are left out, except the prefill.
    """

    phase: str = "verify"
    paths: list[Path] = field(default_factory=list)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        due = name == self.phase and self.paths and (name == "prefill" or self.cycles >= WARM)
        if due:
            mx.synchronize()
            mx.metal.start_capture(str(self.paths.pop(0)))
        try:
            with super().during(name):
                yield
                if due:
                    mx.synchronize()
        finally:
            if due:
                mx.metal.stop_capture()


def trace_paths(path: Path, cycles: int) -> list[Path]:
    """Return `path` for one cycle; for several cycles one path each, with a number before the suffix."""
    return [path] if cycles == 1 else [path.with_stem(f"{path.stem}-{i + 1}") for i in range(cycles)]


def check_capture(phase: str, path: Path, cycles: int) -> None:
    """Raise ValueError if Metal cannot write traces: no GPU, not enabled, another suffix, or a file that exists.

    ValueError also for more than one cycle of the phase "prefill", which runs once.
    """
    if not mx.metal.is_available():
        raise ValueError(f"capture={phase}: needs a Metal GPU, and this machine has none; capture on a Mac")
    if os.environ.get(VARIABLE) != "1":
        raise ValueError(f"capture={phase}: Metal captures only if the environment has {VARIABLE}=1; set it")
    if path.suffix != ".gputrace":
        raise ValueError(f"capture_path={path}: must end in .gputrace")
    if cycles > 1 and phase == "prefill":
        raise ValueError(f"capture_cycles={cycles}: a prefill runs once; allowed is 1 with --capture prefill")
    if existing := [file for file in trace_paths(path, cycles) if file.exists()]:
        raise ValueError(f"capture_path={existing[0]}: exists, and Metal does not overwrite traces; name a new file")


def capture(work: Workload, phase: str, path: Path, cycles: int) -> list[Path]:
    """Write one trace of `phase` per cycle, for `cycles` cycles; return the traces' paths, those of `trace_paths`.

    Fewer if the text ends before. The first WARM cycles are not traced, except for "prefill".
    """
    paths = trace_paths(path, cycles)
    decode_in_phases(work, Captured(phase=phase, paths=list(paths)))
    return [file for file in paths if file.exists()]
