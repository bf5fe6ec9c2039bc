"""Count the launches of a layer's verify, a cycle and a plain step, before and after the kernels, without a GPU.

    python -m bench.launches [--rows 4] [--out mlx_mtp/bench/roofline/launches.csv]
    python -m bench.launches --batch       a cycle of four sequences relative to one of a single sequence
    python -m bench.launches --source      MB of Metal source that the launches of a cycle carry

--out writes the counts that `mlx-mtp bench model` reads: without kernels, with each kind of them alone, and with all.
Its constants are fitted to that file: after a change run `python -m bench.cost_model.fit` and check its output.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from . import batch, source
from .graph import waits
from .models import KINDS, MODELS
from .steps import CYCLE, MLX_LM, Pair, StartState, of_cycles, of_model, with_kernels


def new_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in (*left, *right):
        table.add_column(column, justify="left" if column in left else "right")
    return table


def launches(names: Sequence[str], rows: int, out: Path | None) -> Table:
    """Return a table of launches at one row and at `rows`; write them to `out` if given."""
    columns = {"mlx-lm, one row": MLX_LM, "our loop, stock modules": "none", "with the kernels": "all"}
    table = new_table(f"launches at one row, and at {rows}", ("model", "of"), list(columns))
    found = {}
    for name in names:
        found[name] = of_model(name, rows, alone=out is not None)
        own, before, after = (found[name][on] for on in columns.values())
        for i, of in enumerate(own):
            cells = (str(own[of][0]), *("{}, {}".format(*side[of]) for side in (before, after)))
            table.add_row("" if i else name, of, *cells, end_section=of == CYCLE)
    if out:
        write(out, found, {name: of_model(name, rows, alone=True, count=waits) for name in names}, rows)
    return table


Counts = dict[str, dict[str, dict[str, Pair]]]


def write(file: Path, found: Counts, waiting: Counts, rows: int) -> None:
    with file.open("w", newline="") as out:
        out.write(f"# python -m bench.launches --rows {rows} --out {file}\n")
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(("model", "of", "kind", "kernels", "one_row", "more_rows", "one_row_waits", "more_rows_waits"))
        for name, states in found.items():
            counted = [(of, on, pair) for on, counts in states.items() if on != MLX_LM for of, pair in counts.items()]
            lines.writerows(
                (name, of, KINDS.get((name, of), ""), on, *pair, *waiting[name][on][of]) for of, on, pair in counted
            )


def launches_of_a_batch(names: Sequence[str]) -> Table:
    """Return a table of the launches of a cycle of several sequences and of one, with the kernels."""
    title = f"launches of a cycle, {batch.ROWS} rows per sequence"
    table = new_table(title, ("model",), ("one sequence", f"{batch.TEXTS} sequences", "ratio"))
    for name in names:
        model = with_kernels(name)
        _, one = of_cycles(StartState(model, batch.ROWS), batch.ROWS)[CYCLE]
        several = batch.of_texts(model).total()
        table.add_row(name, str(one), str(several), f"{several / one:.2f}")
    return table


def source_of_a_cycle(names: Sequence[str]) -> Table:
    """Return a table of the MB of Metal source in a cycle with 0, 1 and 3 drafts."""
    mx.disable_compile()
    kinds = ("ours", "all", "held")
    table = new_table("MB of source in a cycle", ("of",), ("launches", *kinds))
    for name in names:
        model = with_kernels(name)
        for k in (0, 1, 3):
            found = source.launches(source.texts(model, k + 1))
            sizes = [f"{sum(getattr(launch, kind) for launch in found) / 1e6:.2f}" for kind in kinds]
            table.add_row(f"{name}, k = {k}", str(len(found)), *sizes)
    return table


@click.command(help=__doc__)
@click.option("--rows", type=click.IntRange(2, 8), default=4, help="Rows M of the verify.")
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only this model; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the launches to this CSV file.")
@click.option("--batch", "in_batch", is_flag=True, help="Count a cycle of four sequences instead.")
@click.option("--source", "of_source", is_flag=True, help="Measure the Metal source of a cycle instead.")
def main(rows: int, names: tuple[str, ...], out: Path | None, in_batch: bool, of_source: bool) -> None:
    chosen = names or tuple(MODELS)
    if in_batch:
        table = launches_of_a_batch(chosen)
    else:
        table = source_of_a_cycle(chosen) if of_source else launches(chosen, rows, out)
    Console().print(table)


if __name__ == "__main__":
    main()
