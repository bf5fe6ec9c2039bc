"""Time the host's work per cycle: our loop at k = 0, 1 and 3, and mlx-lm's plain and speculative loops.

    python bench/host.py [--runs 3] [--cycles 40] [--families GLM-4.5] [--out FILE]

Families have their real depth in tiny widths, 4-bit, so that there is little to compute. mlx-lm's models have the
same
weights; its draft model is the target's first layer with the target's embedding and LM head. Contenders take turns,
and
medians are over cycles. `submit` is the time in mx.async_eval, `wait` that in mx.eval, item and tolist, and `build`
the
rest of a cycle. `CPU` is the CPU time of the Python thread (time.thread_time), which excludes waits, MLX's threads
and
mostly other processes. On a CPU mx.async_eval returns only when nearly all operations are done, and its CPU time is
that of waking up; only `build` is then the host's. Weights are random, so acceptance has no meaning.

On a CPU both sides use MLX's CPU forms of norms, RoPE, attention and gated delta, tens of operations each.

The second and third tables are thread time of graphs as on a Mac, where each of these is one operation; nothing is
computed. The second replays recorded cycles (`mx.compile`; launches are replaced by plain operations, so that
mlx-lm's
step, built for comparison, writes no kernel sources). The third builds cycles without and with kernels (mx.compile is
off, sources are written). The last line is one JSON object.
"""

import copy
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import mlx.core as mx
import mlx.nn as nn
from launches.graph import as_on_a_mac
from launches.models import MODELS, WIDTH
from launches.steps import at_rest, make, reached
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import deepseek_v3, glm4_moe, qwen3_5, qwen3_5_moe, step3p5
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench.result import environment
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.replay import Compiled, Recorder
from mlx_mtp.decoding.run import NO_DRAFTS, Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.decoding.step import step
from mlx_mtp.layers.expert_rows import number_rows
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.plan import Plan
from mlx_mtp.tuning.replay_choice import CompileChoice

THEIRS = {
    "Step-3.5-Flash": step3p5.Model,
    "GLM-4.5": glm4_moe.Model,
    "Qwen3.6-27B": qwen3_5.Model,
    "Qwen3.6-35B-A3B": qwen3_5_moe.Model,
    "DeepSeek-V3": deepseek_v3.Model,
}
DRAFTS = (0, 1, 3)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
RECORDED = 3  # cycles of a kind before it is replayed
WARM = 4  # warm-up cycles: heads are prefilled, buffers grow
PARTS = ("build", "submit", "wait", "total", "CPU build", "CPU total")


Moment = tuple[float, float, float, float, float]


@dataclass
class Clock:
    """Seconds so far in MLX's calls: wall time of submits and of waits, and thread CPU time of both."""

    spent: dict[str, float] = field(default_factory=lambda: {"submit": 0.0, "wait": 0.0, "CPU": 0.0})

    def timed(self, kind: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            wall, thread = time.perf_counter(), time.thread_time()
            try:
                return fn(*args)
            finally:
                self.spent[kind] += time.perf_counter() - wall
                self.spent["CPU"] += time.thread_time() - thread

        return call

    def now(self) -> Moment:
        """Return `spent`, wall and thread seconds."""
        submit, wait, cpu = self.spent.values()
        return submit, wait, cpu, time.perf_counter(), time.thread_time()


@contextmanager
def watched() -> Iterator[Clock]:
    """Time the submits and waits of any loop inside the block."""
    clock = Clock()
    places = [(mx, "async_eval", "submit"), (mx, "eval", "wait"), (mx.array, "item", "wait")]
    with ExitStack() as stack:
        for owner, name, kind in [*places, (mx.array, "tolist", "wait")]:
            stack.enter_context(mock.patch.object(owner, name, clock.timed(kind, getattr(owner, name))))
        yield clock


def differences(moments: list[Moment]) -> dict[str, list[float]]:
    """Return milliseconds of each cycle by part, from the clock's readings at the cycles' ends."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for before, after in itertools.pairwise(moments):
        submit, wait, evaluating, total, cpu = (1000 * (b - a) for a, b in zip(before, after, strict=True))
        spent = (total - submit - wait, submit, wait, total, cpu - evaluating, cpu)
        for part, ms in zip(PARTS, spent, strict=True):
            found[part].append(ms)
    return found


def cycles_of(drafted: Iterator[bool], clock: Clock, cycles: int) -> tuple[dict[str, list[float]], float]:
    """Return milliseconds by part of `cycles` cycles, and tokens per cycle; a cycle ends with a non-draft token."""
    moments, tokens = [], 0
    for from_draft in drafted:
        if len(moments) > WARM:
            tokens += 1
        if not from_draft:
            moments.append(clock.now())
        if len(moments) == WARM + cycles + 1:
            break
    return differences(moments[WARM:]), tokens / cycles


def ours(model: Any, k: int) -> Iterator[bool]:
    steps: Any = mlx_mtp.generate_step(PROMPT, model, max_tokens=4096, num_draft_tokens=k, adaptive=False)
    return (step[2] for step in steps)


def plain(model: Any) -> Iterator[bool]:
    return (False for _ in mlx_lm_generate_step(mx.array(PROMPT), model, max_tokens=4096))


def speculative(model: Any, draft: Any, k: int) -> Iterator[bool]:
    steps = speculative_generate_step(mx.array(PROMPT), model, draft, num_draft_tokens=k, max_tokens=4096)
    return (step[2] for step in steps)


def ours_of(name: str) -> Any:
    """Return our model of a family, as loaded."""
    model = make(MODELS[name][0])
    number_rows(model.modules())
    return model


def mlx_lm_model(name: str, model: Any, layers: int | None = None) -> Any:
    """Return mlx-lm's own model with our weights, or only its first `layers` layers."""
    made = THEIRS[name](model.args if layers is None else replace(model.args, num_hidden_layers=layers))
    nn.quantize(made, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    weights = dict(tree_flatten(model.parameters()))
    made.load_weights([(path, weights[path]) for path, _ in tree_flatten(made.parameters())])
    made.eval()  # as loaded by mlx-lm: in training mode gated delta has no kernel
    return made


def contenders(name: str, model: Any) -> tuple[dict[str, Callable[[], Iterator[bool]]], dict[str, str]]:
    """Return the loops, and why others do not run or run differently."""
    target = mlx_lm_model(name, model)
    runs: dict[str, Callable[[], Iterator[bool]]] = {"mlx-lm": lambda: plain(target)}
    remarks: dict[str, str] = {}
    caches = make_prompt_cache(target)
    if can_trim_prompt_cache(caches):
        draft = mlx_lm_model(name, model, layers=1)
        for k in DRAFTS[1:]:
            runs[f"mlx-lm, draft model k={k}"] = lambda k=k: speculative(target, draft, k)
        windows = {c.max_size for c in caches if hasattr(c, "max_size")}
        if windows:
            remarks["mlx-lm, draft model"] = f"what is rejected beyond the window ({windows}) is not taken back"
    else:
        kinds = sorted({type(c).__name__ for c in caches if not c.is_trimmable()})
        remarks["mlx-lm, draft model"] = f"refused: {', '.join(kinds)} cannot be trimmed"
    for k in DRAFTS:
        runs[f"k={k}"] = lambda k=k: ours(model, k)
    return runs, remarks


def measure(runs: dict[str, Callable[[], Iterator[bool]]], times: int, cycles: int) -> dict[str, Any]:
    """Return milliseconds of all cycles by part, and tokens per cycle, by contender."""
    found: dict[str, Any] = {name: {"ms": {part: [] for part in PARTS}, "tokens_per_cycle": []} for name in runs}
    for time_ in range(-1, times):  # the first run is a warm-up
        for name, run in runs.items():
            with watched() as clock:
                ms, tokens = cycles_of(run(), clock, cycles if time_ >= 0 else 1)
            if time_ >= 0:
                found[name]["tokens_per_cycle"].append(tokens)
                for part in PARTS:
                    found[name]["ms"][part] += ms[part]
    return found


def _answer(value: Any, **_: Any) -> Any:
    return value


@dataclass
class Build:
    """Builds or replays the graph of a step; `reset` restores its caches."""

    reset: Callable[[], None]
    run: Callable[[], list[mx.array]]
    ms: list[float] = field(default_factory=list)

    def timed(self) -> list[mx.array]:
        """Record the thread milliseconds of a run."""
        self.reset()
        tic = time.thread_time()
        outputs = self.run()
        self.ms.append(1000 * (time.thread_time() - tic))
        return outputs


def traced(build: Build, times: int) -> list[float]:
    """Return milliseconds of building a graph as on a Mac; it is traced, because it cannot run here."""
    with as_on_a_mac(), ExitStack() as stack:
        mx.disable_compile()  # compiled functions cannot be traced
        stack.callback(mx.enable_compile)
        for _ in range(times + 1):
            mx.export_function(lambda _: None, lambda _: build.timed(), mx.array(0))
    return build.ms[1:]


def plain_step(target: Any) -> Build:
    """Return a build of a plain step of mlx-lm's loop."""
    caches, newest = make_prompt_cache(target), mx.array([1])
    target(mx.array(PROMPT)[None], cache=caches)
    mx.eval([c.state for c in caches], newest)
    held = copy.deepcopy([vars(c) for c in caches])

    def reset() -> None:
        for cache, state in zip(caches, copy.deepcopy(held), strict=True):
            vars(cache).update(state)

    def run() -> list[mx.array]:
        logits = target(newest[None], cache=caches)[:, -1]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)]

    return Build(reset, run)


def cycle(model: Any, k: int, *, replayed: bool = False) -> Build:
    """Build or replay a cycle after a verify, or a plain step after others."""
    cache, rows = reached(model, 4) if k else at_rest(model, 4), k + 1
    if replayed:
        cache.to_device()
    hidden = mx.zeros((1, rows, WIDTH), model.no_hidden().dtype)
    before = Run(hidden, mx.zeros((1, rows), mx.int32), mx.zeros(1, mx.int32)).given
    drafter = drafter_of(model) if k else None
    frame = Frame(model, cache, Plan(k=k), drafter, (Single(Picker()),), base=4)
    mx.eval(hidden, before.tokens, cache.arrays)
    compiled, mark = Compiled(Recorder(), CompileChoice(True)), cache.mark()

    def run() -> list[mx.array]:
        given, recorded = before, None
        if replayed:
            _, given, recorded = compiled.find(frame, before, Stats())
        new, arrays = (recorded or partial(step, frame))(given, cache.unload(), NO_DRAFTS)
        if recorded:
            cache.load(arrays, 5 + rows, 5)
        return [new.packed, *cache.arrays]

    return Build(lambda: cache.restore(mark), run)


def builds(name: str, times: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of building mlx-lm's step and, by k, cycles of a model without and with kernels."""
    model = ours_of(name)
    found = {"mlx-lm": {"k=0": traced(plain_step(mlx_lm_model(name, model)), times)}}
    found["stock"] = {f"k={k}": traced(cycle(model, k), times) for k in DRAFTS}
    for site in kernel_switch.place(model):
        site.rows = frozenset(site.candidates)
    return found | {"kernels": {f"k={k}": traced(cycle(model, k), times) for k in DRAFTS}}


@functools.cache
def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    made = mx.zeros(shape, dtype)
    mx.eval(made)
    return made


def launch(*, inputs: list[Any], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
    """Replace a kernel's launch by one operation per output, of these inputs."""
    arrays = [each for each in inputs if isinstance(each, mx.array)]
    outputs = [blank(tuple(shape), dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    return [mx.depends(output, arrays) for output in outputs]


def replays(name: str, times: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of building mlx-lm's step and, by k, of replaying cycles without and with kernels."""
    plain, kernels = ours_of(name), ours_of(name)
    for site in kernel_switch.place(kernels):
        site.rows = frozenset(site.candidates)
    with as_on_a_mac(partial(_answer, launch)):  # mx.compile can record these
        found = {"mlx-lm": {"k=0": repeated(plain_step(mlx_lm_model(name, plain)), times)}}
        for side, model in (("stock", plain), ("kernels", kernels)):
            found[side] = {f"k={k}": repeated(cycle(model, k, replayed=True), times) for k in DRAFTS}
    return found


def repeated(build: Build, times: int) -> list[float]:
    """Return milliseconds of a repeated build."""
    for _ in range(times + RECORDED):
        build.timed()
    return build.ms[RECORDED:]


def print_loops(console: Console, name: str, layers: int, found: dict[str, Any], remarks: dict[str, str]) -> None:
    table = Table(title=f"{name}, {layers} layers: ms per cycle")
    for column in ("loop", *PARTS, "tok/cycle", "CPU build/tok"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for loop, values in found.items():
        tokens = statistics.mean(values["tokens_per_cycle"])
        medians = [statistics.median(values["ms"][part]) for part in PARTS]
        cells = [f"{ms:.2f}" for ms in medians]
        table.add_row(loop.replace("draft model", "draft"), *cells, f"{tokens:.2f}", f"{medians[4] / tokens:.2f}")
    console.print(table)
    for loop, remark in remarks.items():
        console.print(f"{loop}: {remark}")


def print_builds(console: Console, title: str, kind: str, found: dict[str, Any]) -> None:
    table = Table(title=f"{title}: thread ms at k = 0, 1, 3")
    for column in ("family", *next(iter(found.values()))[kind]):
        table.add_column(column, justify="left" if column == "family" else "right")
    for name, family in found.items():
        sides = (map(statistics.median, side.values()) for side in family[kind].values())
        table.add_row(name, *(", ".join(f"{ms:.1f}" for ms in side) for side in sides))
    console.print(table)


@click.command(help=__doc__)
@click.option("--runs", default=3, show_default=True)
@click.option("--cycles", default=40, show_default=True, help="Of each contender in a run.")
@click.option("--families", multiple=True, type=click.Choice(list(MODELS)), help="Only these.  [default: all]")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(runs: int, cycles: int, families: tuple[str, ...], out: Path | None) -> None:
    console, found = Console(width=118), {}
    for name in families or MODELS:
        model = ours_of(name)
        model.set_dtype(mx.float32)  # a CPU has products in this type
        loops, remarks = contenders(name, model)
        measured = measure(loops, runs, cycles)
        print_loops(console, name, len(model.layers), measured, remarks)
        found[name] = {"layers": len(model.layers), "loops": measured, "remarks": remarks}
        found[name] |= {"replays": replays(name, 5 * runs), "builds": builds(name, 3 * runs)}
    print_builds(console, "replaying a cycle as on a Mac", "replays", found)
    print_builds(console, "building a cycle's graph as on a Mac", "builds", found)
    line = json.dumps({"environment": environment(), "cycles": cycles, "runs": runs, "families": found})
    print(line)
    if out:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
