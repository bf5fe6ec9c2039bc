"""Simulate a Mac's first and later loads of released models: seconds to the first token, and kernels on by then.

    python bench/first_load.py [--model step-3.5-flash] [--chip "M3 Ultra"] [--compile 0.3] [--typing 20]

Decisions are made by the product's own code: sites, trials, budget, stored verdicts, launches of cycles. Only the
clock
and the device are simulated. A pipeline takes `--compile` seconds, or `--reload` if an earlier start left it in the
system's shader cache. A call takes its bytes over the chip's bandwidth, plus a constant per launch. Arrays have
shapes
but no values. Reading weights and the prompt's own products are not included.
"""

import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from launches.steps import built, reached
from published import read_config

from mlx_mtp.bench.random_model import shaped_model
from mlx_mtp.bench.roofline.chips import CHIPS
from mlx_mtp.bench.roofline.ops import distinct
from mlx_mtp.kernels._matrix import FORWARD
from mlx_mtp.layers import gated_delta
from mlx_mtp.layers.kernel_site import Site
from mlx_mtp.tuning import kernel_switch, lane_costs, lane_sites
from mlx_mtp.tuning.kernel_switch import FIRST_ROWS
from mlx_mtp.tuning.lane_sites import in_matrix

CONFIGS = Path(__file__).parents[1] / "tests" / "support" / "fixtures"
MODELS = ("step-3.5-flash", "glm-4.5-air", "qwen3.5-35b-a3b", "deepseek-v3")
CYCLES = (4, 2, 1)  # rows of the first cycles
NARROW = 8  # columns of a trial's x, which is never read
Launch = tuple[tuple, tuple]  # a pipeline's name and template, and the rest of its source's signature

# Approximate number of MLX's own launches for an op.
STOCK_LAUNCHES = {
    **{"verify_qmm": 2, "verify_glu": 5, "verify_moe": 20, "verify_attention": 3, "verify_latent_attention": 6},
    **{"norm_rope": 4, "add_norm": 2, "verify_head": 3, "gated_delta_verify": 40, "verify_qmm_heads": 2},
}


@dataclass(frozen=True)
class Mac:
    """Seconds of a compilation, a pipeline in the shader cache, a launch on the GPU, building a call, and a wait.

    bandwidth: bytes per second.
    """

    compile: float = 0.3
    reload: float = 0.02
    launch: float = 5e-6
    host: float = 3e-5
    wait: float = 2e-4
    bandwidth: float = CHIPS["M3 Ultra"].bandwidth


@dataclass
class Device:
    """A simulated GPU. on_disk: pipelines in the shader cache; compiled: those of this process, by name."""

    mac: Mac
    on_disk: set[Launch]
    now: float = 0.0
    due: float = 0.0  # seconds of pending work
    trying: bool = True  # whether sites' ops are replaced
    compiled: dict[tuple, tuple] = field(default_factory=dict)
    launches: list[tuple[Launch, Sequence[Any], int]] = field(default_factory=list)
    calls: dict[tuple, tuple[list[Launch], float]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def metal_kernel(self, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        """Replace mx.fast.metal_kernel."""
        return partial(self.launch, name)

    def launch(
        self, name: str, *, inputs: Any, template: Any, output_shapes: Any, output_dtypes: Any, **_: Any
    ) -> Any:
        """Compile a launch's pipeline and, during trials, record its reads; its outputs have no values."""
        signature = tuple((a.dtype, a.size < 8) if isinstance(a, mx.array) else type(a) for a in inputs)
        outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        pipeline = (name, *template), signature
        self.compile([pipeline])
        if self.trying:
            self.launches.append((pipeline, inputs, sum(y.nbytes for y in outputs)))
        return outputs

    def compile(self, pipelines: list[Launch]) -> None:
        """Compile a missing pipeline; MLX compiles again if the same name has another source."""
        for name, signature in pipelines:
            if self.compiled.get(name) != signature:
                self.compiled[name] = signature
                self.now += self.mac.reload if (name, signature) in self.on_disk else self.mac.compile
                self.on_disk.add((name, signature))

    def wait(self, *_: Any) -> None:
        """Replace mx.eval: small values are computed, weights have none."""
        self.now, self.due = self.now + self.due + self.mac.wait, 0.0

    def takes(self, x: mx.array, seconds: float) -> list[mx.array]:
        """Add a call's seconds; return one column of x."""
        self.now, self.due = self.now + self.mac.host, self.due + seconds
        return [x[:, :1]]

    def in_matrix(self, site: Any) -> Site | None:
        """Return a stand-in for a site's counterpart in the lane `matrix`, None if there is none."""
        real = copy.copy(site)
        real.width = site.ours.__self__.width
        for name in ("ours", "computed", "stock", "alone", "truth"):
            vars(real).pop(name, None)
        own = in_matrix(real)
        return own and StandIn(self, own).site

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Act as the machine's GPU and clock inside the block."""
        place = kernel_switch.place
        with ExitStack() as stack:
            for owner, name, stand_in in (
                (mx.metal, "is_available", lambda: True),
                (mx, "default_device", lambda: mx.Device(mx.gpu)),
                (mx, "eval", self.wait),
                (mx, "synchronize", lambda *_: None),
                (mx.fast, "metal_kernel", self.metal_kernel),
                (time, "perf_counter", self.clock),
                (time, "monotonic", self.clock),
                (gated_delta, "gated_delta_kernel", one_state),
                (
                    kernel_switch,
                    "place",
                    lambda model, **lane: [StandIn(self, site).site for site in place(model, **lane)],
                ),
                (lane_costs, "in_matrix", self.in_matrix),
                (lane_sites, "in_matrix", self.in_matrix),
                (lane_sites, "matrix_orders", lambda: {"float32": FORWARD}),
            ):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            yield


class StandIn:
    """A site's ops, which take time on the device and, in trials, compute almost nothing."""

    def __init__(self, device: Device, site: Any):
        self.device, self.site, self.width = device, site, site.width
        self.real, self.real_computed, self.real_stock = site.ours, site.computed, site.stock
        site.width, site.ours, site.computed, site.stock = NARROW, self.ours, self.computed, self.stock
        for name, op in (("alone", self.stock), ("truth", self.truth)):
            if hasattr(site, name):
                setattr(site, name, op)

    def ours(self, x: mx.array) -> list[mx.array]:
        return self._tried(x) if self.device.trying else self.real(x)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return self._tried(x, split) if self.device.trying else self.real_computed(x, split)

    def _tried(self, x: mx.array, split: bool = False) -> list[mx.array]:
        pipelines, seconds = self._cost(len(x), split)
        self.device.compile(pipelines)
        return self.device.takes(x, seconds + self.device.mac.launch * len(pipelines))

    def stock(self, x: mx.array) -> list[mx.array]:
        if not self.device.trying:
            return self.real_stock(x)
        op, rows = self.site.op, len(x)
        # From M3 on, chips request the weights of up to five rows once; keys and values are requested per row.
        reads = rows if "attention" in op else 2 if rows > 5 and "moe" not in op else 1
        return self.device.takes(x, reads * self._cost(rows)[1] + self.device.mac.launch * STOCK_LAUNCHES.get(op, 1))

    def truth(self, x: mx.array) -> list[mx.array]:
        return [y.astype(mx.float32) for y in self.device.takes(x, 16 * self._cost(len(x))[1])]

    def _cost(self, rows: int, split: bool = False) -> tuple[list[Launch], float]:
        """Return a call's pipelines and seconds of bytes, from the launches of the first call of that shape."""
        device, key = self.device, (self.site.op, self.site.shape, rows, split)
        if key not in device.calls:
            device.launches.clear()
            self.site.width = self.width
            x = mx.zeros((rows, self.width), mx.bfloat16)
            self.real_computed(x, split) if type(self.site).ours is Site.ours else self.real(x)
            self.site.width = NARROW
            device.calls[key] = (
                [pipeline for pipeline, *_ in device.launches],
                self._bytes(rows) / device.mac.bandwidth,
            )
        return device.calls[key]

    def _bytes(self, rows: int) -> float:
        """Return the bytes that recorded launches read and write; of experts only those that rows visit."""
        launches = self.device.launches
        inputs = {id(a): a for _, arrays, _ in launches for a in arrays if isinstance(a, mx.array)}
        read = sum(a.nbytes for a in inputs.values())
        if routing := getattr(self.site, "routing", None):
            experts = self.site.block.switch_mlp.gate_proj.num_experts
            read *= distinct(experts, routing.top_k, rows) / experts
        return read + sum(written for *_, written in launches)


def one_state(q: mx.array, k: mx.array, v: mx.array, *_: Any) -> tuple[mx.array, mx.array]:
    """Replace mlx-lm's recurrence, whose kernel needs Metal, by outputs and a state of the right shapes."""
    return mx.zeros_like(v), mx.zeros((1, *v.shape[2:], k.shape[-1]))


@dataclass(frozen=True)
class Start:
    """The result of one start of a model."""

    model: str
    pipelines: int  # before the first token
    decisions: int
    in_cycles: int  # pipelines compiled in the first cycles
    seconds: float  # to the first token
    on: int  # pairs of a kernel and a row count that are on, of `of` up to FIRST_ROWS
    of: int
    on_later: int  # at any row count, after a while of typing
    of_all: int
    pipelines_later: int


def start(name: str, mac: Mac, on_disk: set[Launch], typing: float) -> Start:
    """Load a model, run its first cycles, and simulate typing; files are in MLX_MTP_CACHE."""
    device = Device(mac, on_disk)
    with tempfile.TemporaryDirectory() as folder, device.installed():
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(read_config(CONFIGS / f"{name}.txt")))
        model, _ = shaped_model(file)
        known = timed()
        kernel_switch.switch_on(model, None)
        trials, decided = model.runtime.trials, timed() - known
        before, device.trying = len(device.compiled), False
        cycles(model)
        seconds, pipelines, device.trying = device.now, len(device.compiled), True
        first = [
            verdict for key, verdict in trials.verdicts.items() if key[2] <= FIRST_ROWS and "caches" not in key[0]
        ]
        on = sum(verdict.on for verdict in first)
        trials.try_rest(lambda: device.now > seconds + typing)
        trials.apply()
        later = [verdict.on for key, verdict in trials.verdicts.items() if "caches" not in key[0]]
    rest = (on, len(first), sum(later), len(later), len(device.compiled))
    return Start(name, pipelines, decided, pipelines - before, seconds, *rest)


def timed() -> int:
    """Return the number of stored verdicts that were timed."""
    files = Path(os.environ["MLX_MTP_CACHE"]).glob("*.json")
    return sum(ratio is not None for file in files for *_, ratio, _ in json.loads(file.read_text())["found"])


def cycles(model: Any) -> None:
    """Build cycles after a prompt, for their launches."""
    cache, width = reached(model, CYCLES[0]), model.no_hidden().shape[-1]
    for rows in CYCLES:
        built(
            model,
            cache,
            mx.zeros((1, rows, width), mx.bfloat16),
            mx.zeros((1, rows), mx.int32),
            mx.zeros(1, mx.int32),
        )


def simulated(name: str, mac: Mac, typing: float = 20.0) -> tuple[Start, Start]:
    """Start a model twice on one machine: with nothing compiled or stored, then with the first start's results."""
    on_disk: set[Launch] = set()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MLX_MTP_CACHE=folder):
        return start(name, mac, on_disk, typing), start(name, mac, on_disk, typing)


def show(starts: Sequence[Start]) -> None:
    """Print a line for each start of a model."""
    table = Table(*(column.name.replace("_", " ") for column in fields(Start)))
    for found in starts:
        values = (getattr(found, column.name) for column in fields(Start))
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values))
    Console(width=120).print(table)


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice(MODELS), help="Only this one.")
@click.option("--chip", type=click.Choice(list(CHIPS)), default="M3 Ultra", help="Whose bandwidth it is.")
@click.option("--compile", "compilation", default=Mac.compile, help="Seconds of a compilation.")
@click.option("--reload", default=Mac.reload, help="Seconds of a pipeline from the shader cache.")
@click.option("--typing", default=20.0, help="Seconds that the user types behind the first answer.")
def main(names: tuple[str, ...], chip: str, compilation: float, reload: float, typing: float) -> None:
    mac = Mac(compile=compilation, reload=reload, bandwidth=CHIPS[chip].bandwidth)
    for name in names or MODELS:
        show(simulated(name, mac, typing))


if __name__ == "__main__":
    main()
