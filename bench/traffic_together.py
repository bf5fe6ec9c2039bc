"""Count in the emulator the weights that a pass of four texts, four rows each, asks for beside four passes of one.

    python bench/traffic_together.py [--model GLM-4.5]

The first layers of the models of `launches.py`, up to one of each kind, with all kernels. Times: bytes requested over
the distinct ones, of products and of the experts that random rows visit; of 13 to 16 rows a product reads its weights
twice, and an expert that more than 8 visit its own. Counts of an emulator, no times.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import mlx.core as mx
from launches import Behind, with_kernels
from launches_models import MODELS, WIDTH
from launches_together import ROWS, TEXTS, Together
from rich.console import Console
from rich.table import Table

from mlx_mtp import emulator

WEIGHTS = ("w", "gate", "up")  # the kernels' buffers of packed weights
KINDS = {"verify_qmm": "products", "verify_qmm_heads": "products", "verify_glu": "products"}
KINDS |= {"moe_glu": "experts", "moe_down": "experts"}


def passed(model: Any, caches: Sequence[Any], texts: int, last: int) -> tuple[Counter, Counter]:
    """Let rows of so many texts pass the layers up to `last`: bytes of weights asked for and distinct, by kind."""
    x = mx.random.normal((texts, ROWS, WIDTH), key=mx.random.key(0)).astype(mx.bfloat16)
    masks: dict[Any, Any] = {}
    with emulator.emulated() as launches:
        for layer, kv in zip(model.layers[: last + 1], caches, strict=False):
            if kv.window not in masks:
                masks[kv.window] = kv.make_mask(ROWS, return_array=True)
            x = layer(x, mask=masks[kv.window], cache=kv)
        mx.eval(x)
    asked, distinct = Counter(), Counter()
    for launch in launches:
        kind = KINDS.get(launch.kernel)
        for name in WEIGHTS if kind else ():
            if found := launch.buffers.get(name):
                asked[kind] += found.bytes_read
                distinct[kind] += found.distinct_read
    return asked, distinct


def counts(name: str) -> list[str]:
    """Count for a model: KiB of four passes and of one, their share, and how often the one reads what it needs."""
    model, last = with_kernels(name), max(MODELS[name][1].values())
    alone, _ = passed(model, Behind(model, ROWS).again().layers, 1, last)
    together = Together(model)
    together.frame.pool.load(together.arrays)
    asked, distinct = passed(model, together.frame.pool.layers, TEXTS, last)
    each, all_texts = TEXTS * alone.total(), asked.total()
    times = [f"{asked[kind] / distinct[kind]:.2f}" if distinct[kind] else "" for kind in ("products", "experts")]
    return [f"{each / 1024:.0f}", f"{all_texts / 1024:.0f}", f"{all_texts / each:.2f}", *times]


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only this one.")
def main(names: tuple[str, ...]) -> None:
    table = Table(title=f"weights that {TEXTS} texts of {ROWS} rows ask for, emulated")
    columns = "model", f"KiB, {TEXTS} passes", "one pass", "share", "products, times", "experts, times"
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in names or MODELS:
        table.add_row(name, *counts(name))
    Console().print(table)


if __name__ == "__main__":
    main()
