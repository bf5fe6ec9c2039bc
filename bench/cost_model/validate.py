"""Print predictions of the cost model next to all published figures, with large errors, and a model's parts by chip.

    python -m bench.cost_model.validate [--chip "M3 Ultra"] [--model GLM-4.5] [--context 4096]

Run it at the checkout's root; it fits the constants again. Exit code 1 if a prediction is off by more than 25%
without
a named reason.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.result import new_table
from mlx_mtp.bench.roofline.assemble import MODEL, find_chip, find_model
from mlx_mtp.bench.roofline.chips import Chip
from mlx_mtp.bench.roofline.cost import ALL, PassShape, of_model, op_seconds, seconds
from mlx_mtp.bench.roofline.ops import ModelOps

from .documents import documents, documents_table, same_work_table
from .fit import fit, forms
from .published import PublishedPass, read_rows
from .tables import summary, tables
from .validation import Found, validation

SIDES = {
    "stock MLX": (frozenset(), "independent"),
    "ours, independent routing": (ALL, "independent"),
    "ours, published routing": (ALL, "published"),
}
ROWS = (2, 4, 8)


def sides(model: ModelOps, chip: Chip, context: int) -> dict[str, dict[int, float]]:
    """Return predicted seconds of 1 to 8 rows for each of SIDES."""
    return {
        name: {m: seconds(of_model(model, PassShape(m, on, context, overlap), chip), chip) for m in range(1, 9)}
        for name, (on, overlap) in SIDES.items()
    }


def overview(name: str, model: ModelOps, context: int, chips: dict[str, Chip]) -> Table:
    """Return a table of T(1) and the relative cost of more rows on every chip."""
    caption = "each over its own T(1); two figures of ours: independent / published routing"
    columns = "chip", "T(1) ms, stock → ours", *(f"T({m})/T(1), stock → ours" for m in ROWS)
    title = f"predicted: {name}, {context} tokens of context"
    table = new_table(title, *columns, caption=caption + "; * too little memory for the weights")
    for chip in chips.values():
        stock, free, near = sides(model, chip, context).values()
        cells = [f"{stock[1] * 1e3:.1f} → {free[1] * 1e3:.1f}"]
        for m in ROWS:
            ours = [f"{side[m] / side[1]:.2f}" for side in (free, near)]
            shown = " / ".join(ours if model.routed_bytes else ours[:1])
            cells.append(f"{stock[m] / stock[1]:.2f} → {shown}")
        small = chip.memory * 0.75e9 < model.total_bytes  # macOS's default limit for the GPU
        table.add_row(chip.name + " *" * small, *cells)
    return table


def parts(name: str, model: ModelOps, chip: Chip, context: int) -> Table:
    """Return a table of bytes, instructions and times of a pass of 4 rows on one chip, by operation."""
    columns = "side", "part", "GB", "GB requested", "ms of bytes", "10^9 instructions", "ms of these", "ms"
    table = new_table(f"predicted parts of {name} at M = 4 on {chip.name}", *columns, left=2)
    for side, (on, overlap) in SIDES.items():
        costs = of_model(model, PassShape(4, on, context, overlap), chip)
        for part in dict.fromkeys(costs.names):
            here = [i for i, found in enumerate(costs.names) if found == part]
            totals = (costs.count * x for x in (costs.nbytes, costs.requested, costs.instructions))
            nbytes, requested, counted = (x[here].sum() / 1e9 for x in totals)
            alone = nbytes / chip.bandwidth * 1e12, counted / chip.rate * 1e12
            figures = (nbytes, requested, alone[0], counted, alone[1], op_seconds(costs, chip)[here].sum() * 1e3)
            table.add_row(side, part, *(f"{x:.2f}" for x in figures))
        table.add_row(
            side,
            f"{costs.launches:.0f} launches, {costs.independent:.0f} of them independent",
            *[""] * 5,
            f"{costs.launch_seconds(chip) * 1e3:.2f}",
        )
        table.add_section()
    return table


def shown(
    rows: Sequence[PublishedPass], chips: dict[str, Chip], checked: Found, name: str, chip: str | None, context: int
) -> Iterator[Table]:
    """Yield constants and published rows as `chips` predict them, all documents, and a model on every chip or one."""
    if name == MODEL:
        lines = documents(chips)
        yield documents_table(lines)
        yield same_work_table(lines)
    yield from tables(chips, rows, checked, forms(rows))
    model = find_model(name, on_chip=True).model
    yield parts(name, model, chips[chip], context) if chip else overview(name, model, context, chips)


def main(args: Sequence[str], rows: Sequence[PublishedPass]) -> int:
    """Print everything; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.cost_model.validate")
    parser.add_argument("--chip")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--context", type=int, default=4096)
    asked = parser.parse_args(args)
    chip, chips = find_chip(asked.chip), fit(rows)
    checked = validation(rows, chips)
    console = Console(width=160)
    console.print(*shown(rows, chips, checked, asked.model, chip and chip.name, asked.context))
    console.print(*summary(checked), sep="\n", highlight=False)
    return int(any(row["verdict"] == "FAIL" for row in checked["rows"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], read_rows()))
