"""Count the launches of a cycle of four texts, three drafts each, beside those of one text's, with the kernels.

    python bench/launches_together.py [--model GLM-4.5 --operations]

Counted as `launches.py` does, in the same graphs. The texts are greedy and share a pool of four slots.
"""

from collections import Counter
from typing import Any
from unittest import mock

import click
import mlx.core as mx
from launches import CYCLE, Behind, at_rest, of_cycles, with_kernels
from launches_graph import launches
from launches_models import MODELS, WIDTH
from rich.console import Console
from rich.table import Table

from mlx_mtp.cache.pool import Pool
from mlx_mtp.cache.slots import Span
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.step import step
from mlx_mtp.tuning.plan import Plan

TEXTS, ROWS = 4, 4
MOST = 1.6  # times the launches of one text's cycle, what all may have


class Together:
    """A pool of texts behind a prompt and a cycle, to be stepped from again and again."""

    def __init__(self, model: Any):
        with mock.patch.object(mx, "eval"):  # of what is in the caches only shapes are looked at
            cache = at_rest(model, ROWS)
            pool, texts = Pool(cache), [(slot, cache.copy()) for slot in range(TEXTS)]
            pool.regroup(Span(range(TEXTS), TEXTS), range(TEXTS), texts)
            pool.wake(texts)
            pool.live, plan = True, Plan(k=ROWS - 1)
            self.frame = Frame(model, pool, plan, drafter_of(model), [Single(Picker())] * TEXTS, ROWS)
            _, reached = step(self.frame, Run(*self.rows()), pool.unload())
        blank = {id(part): mx.zeros_like(part) for parts in reached.parts for part in parts}  # some share positions
        parts, kept = [tuple(blank[id(part)] for part in each) for each in reached.parts], reached.kept
        ends = mx.full(TEXTS, ROWS), mx.full(TEXTS, ROWS)
        self.arrays = reached._replace(ends=ends, parts=parts, kept=[mx.zeros_like(each) for each in kept])
        mx.eval(self.arrays)

    def rows(self) -> list[mx.array]:
        """Make the rows of a run before."""
        shape = TEXTS, ROWS
        arrays = [mx.zeros((*shape, WIDTH), mx.bfloat16), mx.zeros(shape, mx.int32), mx.zeros(TEXTS, mx.int32)]
        mx.eval(arrays)
        return arrays

    def cycle(self, *rows: mx.array) -> list[mx.array]:
        """Step on from there; all that is computed."""
        run, arrays = step(self.frame, Run(*rows), self.arrays)
        return [run.packed, *(part for parts in arrays.parts for part in parts), *arrays.kept]


def of_texts(model: Any) -> Counter:
    """Count the launches of a cycle of all texts, by primitive."""
    together = Together(model)
    return launches(together.cycle, together.rows)


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only this one.")
@click.option("--operations", is_flag=True, help="Also those of each operation.")
def main(names: tuple[str, ...], operations: bool) -> None:
    table = Table(title=f"launches of a cycle, {ROWS} rows a text")
    for column in ("model", "one text", f"{TEXTS} texts", "times"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in names or MODELS:
        model = with_kernels(name)
        _, one = of_cycles(Behind(model, ROWS), ROWS)[CYCLE]
        found = of_texts(model)
        table.add_row(name, str(one), str(found.total()), f"{found.total() / one:.2f}")
        for op, count in sorted(found.items()) if operations else ():
            table.add_row(f"  {op}", "", str(count), "")
    Console().print(table)


if __name__ == "__main__":
    main()
