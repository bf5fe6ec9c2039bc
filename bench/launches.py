"""Count the operations of a layer's verify, a cycle and a plain step, before and after the kernels.

    python bench/launches.py [--rows 4] [--out mlx_mtp/bench/roofline/launches.csv]

Counted in recorded graphs of the families at their real depth, in tiny widths, quantized to 4 bits: nothing is
computed, no GPU is needed. An operation is a launch or more on a GPU. Views are not counted; elementwise operations
count singly, though mx.compile fuses some (SwiGLU, gates, routing weights); MLX's fused norms, RoPE and attention
count one each. A layer is what it adds to the one before it. A cycle drafts rows - 1 tokens and verifies them.
What is written is what `mlx-mtp bench model` reads: with no kernels, those of each kind alone, and all of them.
"""

import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import mlx.core as mx
import mlx.nn as nn

with mock.patch.object(mx.metal, "is_available", return_value=True):
    from mlx_lm.models import gated_delta  # noqa: F401 makes its kernels when it is imported

from launches_models import KINDS, MODELS, WIDTH
from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.census import VIEWS
from mlx_mtp.bench.roofline.cost import KERNELS
from mlx_mtp.cache.prompt_cache import PromptCache, make_prompt_cache
from mlx_mtp.decoding.draft import Run, prime
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.step import Frame, step
from mlx_mtp.tuning import kernel_switch as switch
from mlx_mtp.tuning.plan import Plan

ATTENTION = mx.fast.metal_kernel(name="attention", input_names=["q", "k", "v"], output_names=["out"], source=";")


def attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
    shape = (*q.shape[:-1], v.shape[-1])
    (out,) = ATTENTION(
        inputs=[q, k, v], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[shape], output_dtypes=[q.dtype]
    )
    return out


DEQUANTIZE = mx.fast.metal_kernel(name="dequantize", input_names=["w", "scales"], output_names=["out"], source=";")


def dequantize(w: mx.array, scales: mx.array, *_: Any, group_size: int, **__: Any) -> mx.array:
    shape = (*scales.shape[:-1], scales.shape[-1] * group_size)
    (out,) = DEQUANTIZE(
        inputs=[w, scales], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[shape], output_dtypes=[scales.dtype]
    )
    return out


def one(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return mx.negative(x)


@contextmanager
def as_on_a_mac() -> Iterator[None]:
    """Kernels are chosen, and what is one launch on a GPU (on a CPU a graph of its own) is one operation."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx.metal, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(mx, "default_device", return_value=mx.Device(mx.gpu)))
        for name, stand_in in (("rms_norm", one), ("rope", one), ("scaled_dot_product_attention", attention)):
            stack.enter_context(mock.patch.object(mx.fast, name, stand_in))
        stack.enter_context(mock.patch.object(mx, "dequantize", dequantize))
        yield


def operations(fn: Callable[..., Any], *arrays: mx.array) -> Counter:
    """The primitives of a graph that are no views, by name."""
    names: list[str] = []
    mx.export_function(
        lambda event: names.append(event["name"]) if event["type"] == "primitive" else None, fn, *arrays
    )
    return Counter(name for name in names if name not in VIEWS)


def make(build: Callable[[], Any]) -> Any:
    model = build()
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def reached(model: Any, rows: int) -> PromptCache:
    """Caches after a prompt and a verify whose last drafts were rejected; the heads have read it all."""
    cache, tokens = make_prompt_cache(model), [1] * rows
    cache.reserve(64)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    cache.tokens = tokens
    cache.push(hidden)
    prime(model, cache, tokens, 0, rows - 1, step=rows)
    cache.to_device()
    if cache.heads:
        cache.wake(rows - 1)
    _seek(cache.layers, rows, rows)
    model.hidden(mx.array(tokens)[None], cache.layers)
    _seek(cache.layers, rows + 1, 2 * rows)
    mx.eval(cache.arrays)
    return cache


def _seek(caches: list[Any], offset: int, limit: int) -> None:
    at = mx.array([offset])
    for cache in caches:
        cache.seek(at, limit)


def up_to(model: Any, last: int, rows: int) -> Counter:
    """The verify of all layers up to `last`."""
    cache, x = reached(model, rows).layers, mx.zeros((1, rows, WIDTH), mx.bfloat16)

    def run(x: mx.array) -> list[mx.array]:
        masks: dict[Any, Any] = {}
        for layer, kv in zip(model.layers[: last + 1], cache, strict=False):
            if kv.window not in masks:
                masks[kv.window] = kv.make_mask(rows, return_array=True)
            x = layer(x, mask=masks[kv.window], cache=kv)
        return [x, *(part for kv in cache[: last + 1] for part in kv.parts)]

    with as_on_a_mac():
        return operations(run, x)


def of_cycle(model: Any, rows: int) -> Counter:
    """Count those of a cycle."""
    cycle, arrays = cycle_of(model, rows)
    with as_on_a_mac():
        return operations(cycle, *arrays)


def cycle_of(model: Any, rows: int) -> tuple[Callable[..., Any], list[mx.array]]:
    """Make a cycle that drafts rows - 1 tokens, and what it is called with; rows = 1: a plain step, without heads."""
    cache = reached(model, 4)
    arrays = [mx.zeros((1, rows, WIDTH), mx.bfloat16), mx.zeros(rows, mx.int32), mx.zeros(1, mx.int32)]
    mx.eval(arrays)
    return partial(built, model, cache), arrays


def built(model: Any, cache: PromptCache, hidden: mx.array, tokens: mx.array, accepted: mx.array) -> list[mx.array]:
    """A cycle on top of rows that ended at position 4, as many drafts as theirs; all that it computes."""
    frame = Frame(model, cache, Plan("heads", tokens.size - 1), Picker(), base=4)
    run, _ = step(frame, Run(hidden, tokens, accepted), cache.unload())
    return [run.packed, *cache.arrays]


EVERY_OP = [op for ops in KERNELS.values() for op in ops]
CYCLE = "a plain step, a cycle"
Pair = tuple[int, int]


def of_layers(model: Any, layers: dict[str, int], rows: int) -> dict[str, Pair]:
    """Operations of a layer of each kind: at one row, and at `rows`."""
    return {kind: _pair(lambda m, i=i: _added(model, i, m), rows) for kind, i in layers.items()}


def of_cycles(model: Any, rows: int) -> dict[str, Pair]:
    """Operations of a plain step, and of a cycle that verifies `rows`."""
    return {CYCLE: _pair(lambda m: of_cycle(model, m).total(), rows)}


def _added(model: Any, i: int, rows: int) -> int:
    return up_to(model, i, rows).total() - up_to(model, i - 1, rows).total()


def _pair(count: Callable[[int], int], rows: int) -> Pair:
    return count(1), count(rows)


def of_model(name: str, rows: int) -> dict[str, dict[str, Pair]]:
    """Counts by what kernels are on: "none", each kind of KERNELS alone (layers only), and "all"."""
    build, layers = MODELS[name]
    model = make(build)
    found = {"none": of_layers(model, layers, rows) | of_cycles(model, rows)}
    sites = switch.place(model)
    for kind, ops in KERNELS.items():
        _switch(sites, ops)
        found[kind] = of_layers(model, layers, rows)
    _switch(sites, EVERY_OP)
    return found | {"all": of_layers(model, layers, rows) | of_cycles(model, rows)}


def with_kernels(name: str) -> Any:
    """Build a model whose kernels are all on."""
    model = make(MODELS[name][0])
    _switch(switch.place(model), EVERY_OP)
    return model


def _switch(sites: Any, ops: Collection[str]) -> None:
    for site in sites:
        site.rows = frozenset(site.candidates if site.op in ops else ())


def write(file: Path, found: dict[str, dict[str, dict[str, Pair]]], rows: int) -> None:
    with file.open("w", newline="") as out:
        out.write(f"# python bench/launches.py --rows {rows} --out {file}\n")
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(("model", "of", "kind", "kernels", "one_row", "more_rows"))
        for name, states in found.items():
            counted = [(of, on, pair) for on, counts in states.items() for of, pair in counts.items()]
            lines.writerows((name, of, KINDS.get((name, of), ""), on, *pair) for of, on, pair in counted)


@click.command(help=__doc__)
@click.option("--rows", type=click.IntRange(2, 8), default=4, help="Rows M of the verify.")
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only this one.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the counts to this file, as CSV.")
def main(rows: int, names: tuple[str, ...], out: Path | None) -> None:
    table = Table(title=f"operations at one row, and at {rows}")
    for column in ("model", "of", "stock MLX", "with the kernels"):
        table.add_column(column, justify="right" if "MLX" in column or "kernels" in column else "left")
    mx.disable_compile()
    found = {}
    for name in names or MODELS:
        found[name] = of_model(name, rows)
        before, after = found[name]["none"], found[name]["all"]
        for i, of in enumerate(before):
            cells = ("{}, {}".format(*side[of]) for side in (before, after))
            table.add_row("" if i else name, of, *cells, end_section=of == CYCLE)
    Console().print(table)
    if out:
        write(out, found, rows)


if __name__ == "__main__":
    main()
