"""Show what the cost model gets right and wrong, for `mlx-mtp bench model` and its `--validate`."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from .chips import Chip
from .cost import LAUNCH, PassShape, of_model, op_seconds, seconds
from .fitted import fitted_chips, read_fitted
from .launches import ALL
from .ops import ModelOps
from .tables import documents_table, new_table

SIDES = {
    "stock MLX": (frozenset(), "independent"),
    "ours, independent routing": (ALL, "independent"),
    "ours, published routing": (ALL, "published"),
}
ROWS = (2, 4, 8)


def summary(found: dict[str, Any]) -> list[str]:
    """Say the constants of the chip, errors of all rows of M >= 3 by kind, and those that are badly off."""
    stored, chip = read_fitted()["summary"], found.get("chip")
    if chip is None:
        return stored
    times = chip["fitted_to"]
    fitted = f"fitted to {times} published times of M <= 2" if times else "a prior: nothing published"
    shares = f"{chip['usable']:.2f} of {chip['gbps']:g} GB/s, {chip['issue']:.2f} of its issue rate"
    return [f"constants of {chip['name']}: {shares}, {fitted}", *stored]


def failed(found: dict[str, Any]) -> bool:
    """Tell whether a prediction is off by more than 25% without a named reason."""
    return any(row["verdict"] == "FAIL" for row in found["validation"]["rows"])


def validation_tables(found: dict[str, Any], model: ModelOps, chip: Chip | None) -> Iterator[Table]:
    """Show all documents, constants and published rows as the fit left them, and the model on every chip or in parts.

    In parts on `chip`, if there is one.
    """
    name, context = found["model"]["name"], found["options"]["context"]
    if found["documents"]:
        yield documents_table(found, None)
    for stored in read_fitted()["tables"]:
        table = new_table(stored["title"], *stored["columns"], left=stored["left"], caption=stored["caption"])
        for section in stored["sections"]:
            for row in section:
                table.add_row(*row)
            table.add_section()
        yield table
    yield overview(name, model, context) if chip is None else parts(name, model, chip, context)


def sides(model: ModelOps, chip: Chip, context: int) -> dict[str, dict[int, float]]:
    """Predict seconds of 1 to 8 rows for each of SIDES."""
    return {
        name: {m: seconds(of_model(model, PassShape(m, on, context, overlap), chip), chip) for m in range(1, 9)}
        for name, (on, overlap) in SIDES.items()
    }


def overview(name: str, model: ModelOps, context: int) -> Table:
    """Show T(1) and what rows cost over it, on every chip."""
    caption = "each over its own T(1); two figures of ours: independent / published routing"
    columns = "chip", "T(1) ms, stock → ours", *(f"T({m})/T(1), stock → ours" for m in ROWS)
    title = f"predicted: {name}, {context} tokens of context"
    table = new_table(title, *columns, caption=caption + "; * too little memory for the weights")
    for chip in fitted_chips().values():
        stock, free, near = sides(model, chip, context).values()
        cells = [f"{stock[1] * 1e3:.1f} → {free[1] * 1e3:.1f}"]
        for m in ROWS:
            ours = [f"{side[m] / side[1]:.2f}" for side in (free, near)]
            shown = " / ".join(ours if model.routed_bytes else ours[:1])
            cells.append(f"{stock[m] / stock[1]:.2f} → {shown}")
        small = chip.memory * 0.75e9 < model.total_bytes  # what macOS gives the GPU unasked
        table.add_row(chip.name + " *" * small, *cells)
    return table


def parts(name: str, model: ModelOps, chip: Chip, context: int) -> Table:
    """Show bytes, instructions and times of a pass of 4 rows on one chip, by operation."""
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
        table.add_row(side, f"{costs.launches:.0f} launches", *[""] * 5, f"{costs.launches * LAUNCH * 1e3:.2f}")
        table.add_section()
    return table
