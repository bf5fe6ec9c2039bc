"""Count the launches of a layer's verify, a cycle and a plain step, before and after the kernels.

    python bench/launches.py [--rows 4] [--out mlx_mtp/bench/roofline/launches.csv]

Counted in the graphs of the families at their real depth, in tiny widths, quantized to 4 bits: nothing is computed,
no GPU is needed (`launches_graph.py` says how). What mlx-lm compiles counts as mx.compile fuses it; views are not
counted, the copies that they cost are; MLX's fused norms, RoPE and attention count one each. A layer is what it adds
to the one before it. mlx-lm: its own model and caches, at one row, as it decodes; stock: our loop with its modules.
A cycle drafts rows - 1 tokens and verifies them.
What is written is what `mlx-mtp bench model` reads: with no kernels, those of each kind alone, and all of them. Its
constants are fitted to that file: after another one, run `python -m bench.cost_model.fit` and look at what it says.
"""

import copy
import csv
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import mlx.core as mx
import mlx.nn as nn
from launches_graph import launches
from launches_models import KINDS, MODELS, WIDTH
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_make_prompt_cache
from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.decode import twin
from mlx_mtp.bench.roofline.cost import KERNELS
from mlx_mtp.cache.prompt_cache import PromptCache, make_prompt_cache
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.step import step
from mlx_mtp.layers import gated_delta
from mlx_mtp.tuning import kernel_switch as switch
from mlx_mtp.tuning.plan import Plan


def make(build: Callable[[], Any]) -> Any:
    model = build()
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def at_rest(model: Any, rows: int) -> PromptCache:
    """Caches after a prompt, of which the heads have read all but the last row."""
    cache, tokens = make_prompt_cache(model), [1] * rows
    cache.reserve(64)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    cache.tokens = tokens
    cache.push(hidden)
    if drafter := drafter_of(model):
        drafter.read(model, cache, tokens, 0, rows - 1, step=rows)
    return cache


def reached(model: Any, rows: int) -> PromptCache:
    """Caches after a prompt and a verify whose last drafts were rejected; the heads have read it all.

    Recurrent ones hold a tape, as on a Mac, and not the states that a CPU keeps.
    """
    cache, tokens = at_rest(model, rows), [1] * rows
    cache.to_device()
    if cache.heads:
        cache.wake(rows - 1)
    _seek(cache.layers, rows, rows)
    with mock.patch.object(gated_delta, "KEPT", 0):
        model.hidden(mx.array(tokens)[None], cache.layers)
    _seek(cache.layers, rows + 1, 2 * rows)
    mx.eval(cache.arrays)
    return cache


def _seek(caches: list[Any], offset: int, limit: int) -> None:
    at = mx.array([offset])
    for cache in caches:
        cache.seek(at, limit)


class Behind:
    """A model's caches behind a prompt and a verify of so many rows, to be stepped from again and again."""

    def __init__(self, model: Any, rows: int):
        with mock.patch.object(mx, "eval"):  # of what is in the caches only shapes are looked at
            cache = reached(model, rows)
        blank = {id(part): mx.zeros_like(part) for c in cache.caches for part in c.parts}  # layers share positions
        for c in cache.caches:
            c.parts = tuple(blank[id(part)] for part in c.parts)
        mx.eval(cache.arrays)
        self.model, self.rows, self.cache, self.mark = model, rows, cache, cache.mark()

    def again(self) -> PromptCache:
        self.cache.restore(self.mark)
        return self.cache

    def up_to(self, last: int) -> int:
        """Count the verify of all layers up to `last`."""
        return launches(partial(self._run, last), self._zeros).total()

    def _zeros(self) -> list[mx.array]:
        self.again()
        x = mx.zeros((1, self.rows, WIDTH), mx.bfloat16)
        mx.eval(x)
        return [x]

    def _run(self, last: int, x: mx.array) -> list[mx.array]:
        masks: dict[Any, Any] = {}
        caches = self.cache.layers[: last + 1]
        for layer, kv in zip(self.model.layers[: last + 1], caches, strict=True):
            if kv.window not in masks:
                masks[kv.window] = kv.make_mask(self.rows, return_array=True)
            x = layer(x, mask=masks[kv.window], cache=kv)
        return [x, *(part for kv in caches for part in kv.parts)]


def cycle_of(model: Any, rows: int) -> tuple[Callable[..., list[mx.array]], list[mx.array]]:
    """Make a cycle that drafts rows - 1 tokens, and what it is called with; rows = 1: a plain step, without heads."""
    return partial(built, model, Behind(model, 4).cache), _before(rows)


def _before(rows: int) -> list[mx.array]:
    arrays = [mx.zeros((1, rows, WIDTH), mx.bfloat16), mx.zeros((1, rows), mx.int32), mx.zeros(1, mx.int32)]
    mx.eval(arrays)
    return arrays


def built(model: Any, cache: PromptCache, hidden: mx.array, tokens: mx.array, accepted: mx.array) -> list[mx.array]:
    """A cycle on top of rows that ended at position 4, as many drafts as theirs; all that it computes."""
    plan, drafter = Plan(k=tokens.size - 1), drafter_of(model)
    frame = Frame(model, cache, plan, drafter if plan.k else None, (Single(Picker()),), base=4)
    run, _ = step(frame, Run(hidden, tokens, accepted), cache.unload())
    return [run.packed, *cache.arrays]


EVERY_OP = [op for ops in KERNELS.values() for op in ops]
CYCLE = "a plain step, a cycle"
MLX_LM = "mlx-lm"
Pair = tuple[int, int]


class MlxLm:
    """mlx-lm's own model and caches, behind a prompt, to be stepped from at one row again and again."""

    def __init__(self, model: Any):
        self.model = twin(model)
        self.caches = mlx_lm_make_prompt_cache(self.model)
        self.model(mx.array([[1, 1, 1, 1]]), cache=self.caches)
        mx.eval(self._written())
        self.held = copy.deepcopy([vars(c) for c in self.caches])

    def up_to(self, last: int) -> int:
        """Count a step of all layers up to `last`."""

        def run(x: mx.array) -> list[Any]:
            for layer, cache in zip(self.model.layers[: last + 1], self.caches, strict=False):
                x = layer(x, mask=None, cache=cache)
            return [x, *self._written()]

        return launches(run, lambda: self._again(mx.zeros((1, 1, WIDTH), mx.bfloat16))).total()

    def step(self) -> int:
        """Count a greedy step of mlx-lm's loop."""

        def run(newest: mx.array) -> list[Any]:
            logits = self.model(newest[None], cache=self.caches)[:, -1]
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0), *self._written()]

        return launches(run, lambda: self._again(mx.array([1]))).total()

    def _again(self, x: mx.array) -> list[mx.array]:
        for cache, state in zip(self.caches, copy.deepcopy(self.held), strict=True):
            vars(cache).update(state)
        mx.eval(x, self._written())
        return [x]

    def _written(self) -> list[Any]:
        return [a for _, a in tree_flatten([list(vars(c).values()) for c in self.caches]) if isinstance(a, mx.array)]


def of_layers(steps: Sequence[Behind | MlxLm], layers: dict[str, int]) -> dict[str, Pair]:
    """Count the launches of a layer of each kind, in two kinds of steps."""
    one, more = steps
    return {kind: (one.up_to(i) - one.up_to(i - 1), more.up_to(i) - more.up_to(i - 1)) for kind, i in layers.items()}


def of_cycles(behind: Behind, rows: int) -> dict[str, Pair]:
    """Count the launches of a plain step, and of a cycle that verifies `rows`."""

    def run(*arrays: mx.array) -> list[mx.array]:
        return built(behind.model, behind.again(), *arrays)

    one, more = (launches(run, partial(_before, m)).total() for m in (1, rows))
    return {CYCLE: (one, more)}


def of_model(name: str, rows: int, alone: bool = False) -> dict[str, dict[str, Pair]]:
    """Count by who runs it: mlx-lm at one row, our loop with no kernels, with all, and with each kind of KERNELS.

    alone: with each kind alone, too, whose cycles are not counted.
    """
    build, layers = MODELS[name]
    model = make(build)
    theirs = MlxLm(model)
    found = {MLX_LM: {**of_layers([theirs, theirs], layers), CYCLE: (theirs.step(),) * 2}}
    sites = switch.place(model)
    behind = [Behind(model, m) for m in (1, rows)]
    cycles = behind[1] if rows == 4 else Behind(model, 4)
    kinds = {"none": (), **(KERNELS if alone else {}), "all": EVERY_OP}
    for on, ops in kinds.items():
        _switch(sites, ops)
        found[on] = of_layers(behind, layers) | ({} if on in KERNELS else of_cycles(cycles, rows))
    return found


def with_kernels(name: str) -> Any:
    """Build a model whose kernels are all on."""
    model = make(MODELS[name][0])
    _switch(switch.place(model), EVERY_OP)
    return model


def _switch(sites: Any, ops: Collection[str]) -> None:
    for site in sites:
        site.rows = frozenset((*site.candidates, *site.together) if site.op in ops else ())


def write(file: Path, found: dict[str, dict[str, dict[str, Pair]]], rows: int) -> None:
    with file.open("w", newline="") as out:
        out.write(f"# python bench/launches.py --rows {rows} --out {file}\n")
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(("model", "of", "kind", "kernels", "one_row", "more_rows"))
        for name, states in found.items():
            counted = [(of, on, pair) for on, counts in states.items() if on != MLX_LM for of, pair in counts.items()]
            lines.writerows((name, of, KINDS.get((name, of), ""), on, *pair) for of, on, pair in counted)


@click.command(help=__doc__)
@click.option("--rows", type=click.IntRange(2, 8), default=4, help="Rows M of the verify.")
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only this one.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the counts to this file, as CSV.")
def main(rows: int, names: tuple[str, ...], out: Path | None) -> None:
    table = Table(title=f"launches at one row, and at {rows}")
    columns = {"mlx-lm, one row": MLX_LM, "our loop, stock modules": "none", "with the kernels": "all"}
    for column in ("model", "of", *columns):
        table.add_column(column, justify="right" if column in columns else "left")
    found = {}
    for name in names or MODELS:
        found[name] = of_model(name, rows, alone=out is not None)
        own, before, after = (found[name][on] for on in columns.values())
        for i, of in enumerate(own):
            cells = (str(own[of][0]), *("{}, {}".format(*side[of]) for side in (before, after)))
            table.add_row("" if i else name, of, *cells, end_section=of == CYCLE)
    Console().print(table)
    if out:
        write(out, found, rows)


if __name__ == "__main__":
    main()
