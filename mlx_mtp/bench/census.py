"""Count the launches and bytes of a profiled generation's phases, or write GPU traces of one phase."""

import io
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..cache.prompt_cache import make_prompt_cache
from .profile import Timer, Workload, decode_in_phases

VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Full", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
VIEWS |= {"Unflatten", "StopGradient", "Depends"}
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
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


class Noted(nn.Module):
    """Wraps a module; each call first calls `note(module, *arguments)`."""

    def __init__(self, inner: Any, note: Callable[..., None]):
        super().__init__()
        self.inner, self._note = inner, note

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._note(self.inner, *args)
        return self.inner(*args, **options)


@contextmanager
def calls_noted(modules: Iterable[Any], chosen: Callable[[Any], bool], note: Callable[..., None]) -> Iterator[None]:
    """Call `note(child, *arguments)` before each call, in the block, of modules' direct children that are `chosen`.

    Keyword arguments of the call are not passed to `note`.
    """
    places = [(m, name) for m in modules for name, child in m.items() if chosen(child)]
    for module, name in places:
        module[name] = Noted(module[name], note)
    try:
        yield
    finally:
        for module, name in places:
            module[name] = module[name].inner


@contextmanager
def visits_noted(model: Any) -> Iterator[list[tuple[float, mx.array]]]:
    """Yield a list of (bytes of an expert's matrix, indices of chosen experts), one for every product with experts.

    Products in the block are added to it when their graph is built; those that a kernel replaces are missing.
    """
    visits: list[tuple[float, mx.array]] = []

    def note(experts: Any, _x: mx.array, indices: mx.array) -> None:
        visits.append((own_bytes(experts) / experts.num_experts, indices))

    with calls_noted(model.modules(), lambda child: isinstance(child, EXPERTS), note):
        yield visits


@dataclass
class Weighed(Timer):
    """A timer that sums the bytes of experts and of caches that each phase reads, over all cycles.

    visits: the list that `visits_noted` fills.
    """

    visits: list[tuple[float, mx.array]] = field(default_factory=list)
    experts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    caches: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def evaluate(self, phase: str, caches: Sequence[Any], *arrays: Any) -> None:
        super().evaluate(phase, caches, *arrays)
        self.caches[phase] += sum(cache_bytes(c) for c in caches)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Time the block as part of `name`; then add the bytes of the distinct experts of each product in `visits`.

        `visits` is then cleared. For a name that begins with "build" the block is only timed: the products that are
        built in it count for the phase that evaluates them.
        """
        with super().during(name):
            yield
        if not name.startswith("build"):
            self.experts[name] += sum(size * np.unique(np.array(chosen)).size for size, chosen in self.visits)
            self.visits.clear()


def bytes_read(work: Workload) -> dict[str, float]:
    """Return the bytes of weights, keys, values and states that a cycle reads by phase; "prefill" is a total.

    Each array counts once per pass. Experts are those that the generation's rows visited. A recycled head, except its
    input projection, and an LM head count once per draft. Embedding rows, activations and writes are excluded, and in
    "prefill" caches and the heads' weights but for their experts.
    """
    with visits_noted(work.model) as visits:
        seen = decode_in_phases(work, Weighed(visits=visits))
    target, heads = dense_bytes(work.model, work.k)
    chunks, cycles = -(-len(work.prompt) // work.step), max(1, seen.cycles)
    calls = work.k if work.k > len(work.model.mtp) else 1  # a recycled head reads its cache in each draft
    found: dict[str, float] = {"prefill": chunks * target + seen.experts["prefill"]}
    for phase, dense, times in (("draft", heads, calls), ("verify", target, 1)):
        if phase in seen.caches:
            found[phase] = dense + (seen.experts[phase] + times * seen.caches[phase]) / cycles
    return found


def dense_bytes(model: Any, k: int) -> tuple[int, int]:
    """Return the bytes of weights that a pass of the target reads, and that k drafts of its heads read.

    Experts and embedding rows are excluded. The second number is 0 if the model's `drafter` is not None.
    """
    modules = [(name, m) for name, m in model.named_modules() if not isinstance(m, (*EXPERTS, *EMBEDDINGS))]
    unembedding = model.unembedding()
    target = sum(own_bytes(m) for name, m in modules if not name.startswith(("mtp.", "drafter.")))
    target += own_bytes(unembedding) if isinstance(unembedding, EMBEDDINGS) else 0
    heads, drafts = 0, k if len(model.mtp) == 1 else 1
    for depth, head in enumerate(model.mtp[:k] if model.drafter is None else ()):
        inside = [m for name, m in modules if name.startswith(f"mtp.{depth}.") and name != f"mtp.{depth}.head"]
        heads += drafts * sum(map(own_bytes, (head, *inside, model.unembedding(depth))))
        heads -= (drafts - 1) * (own_bytes(head.fc) if "fc" in head else 0)  # reads the target's rows, once a cycle
    return target, heads


def own_bytes(module: Any) -> int:
    """Return the bytes of a module's own arrays, without those of its submodules."""
    return sum(array.nbytes for array in module.values() if isinstance(array, mx.array))


def cache_bytes(cache: Any) -> float:
    """Return the bytes of a layer's cache that a pass reads: its filled rows, or a whole recurrent state."""
    if cache.is_state:
        return sum(part.nbytes for part in cache.parts)
    return sum(part.nbytes * min(1.0, cache.limit / part.shape[2]) for part in cache.parts)


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
