"""What `mlx-mtp bench model --validate` shows: constants, every published row, and what other forms would give."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from .chips import Chip
from .cost import LAUNCH, Pass, of_model, phases, step_times
from .fit import Row, read_unused
from .launches import ALL
from .ops import Model
from .tables import new_table
from .validation import attention, fitted_to, forms

SIDES = {
    "stock MLX": (frozenset(), "independent"),
    "ours, independent routing": (ALL, "independent"),
    "ours, published routing": (ALL, "published"),
}
ROWS = (2, 4, 8)


def summary(found: dict[str, Any]) -> list[str]:
    """The constants of the chip, errors of all rows of M >= 3 by kind, and those that are badly off."""
    lines, checked = [], found["validation"]
    if chip := found.get("chip"):
        fitted = (
            f"fitted to {n} published times of M <= 2" if (n := chip["fitted_to"]) else "a prior: nothing published"
        )
        shares = f"{chip['usable']:.2f} of {chip['gbps']:g} GB/s, {chip['issue']:.2f} of its issue rate"
        lines.append(f"constants of {chip['name']}: {shares}, {fitted}")
    for name, e in checked["errors"].items():
        figures = (
            f"{e['within']} of {e['rows']} within 25%, median error {e['median']:.1%}, greatest {e['greatest']:.1%}"
        )
        lines.append(f"predicted, not fitted (M = 3..8), {name}: {figures}")
    for row in checked["rows"]:
        if row["verdict"] not in ("ok", "fitted"):
            lines.append(f"predicted badly, {row['source']} M = {row['m']}: {row['error']:+.1%}, {row['verdict']}")
    for step in checked["plain"]:
        error = f"{step['predicted'] / step['published'] - 1:+.1%}" + (f"; {step['note']}" if step["note"] else "")
        times = f"{step['predicted'] * 1e3:.1f} ms, omlx#2238 {step['published'] * 1e3:.1f} ms"
        lines.append(f"predicted plain step, {step['chip']} {step['model']}: {times}, {error}")
    return lines


def failed(found: dict[str, Any]) -> bool:
    """Whether a prediction is off by more than 25% without a named reason."""
    return any(row["verdict"] == "FAIL" for row in found["validation"]["rows"])


def validation_tables(
    found: dict[str, Any], rows: Sequence[Row], chips: dict[str, Chip], name: str, model: Model, chip: Chip | None
) -> Iterator[Table]:
    """Constants, published beside predicted, other forms, and the model on every chip, or in parts on the one."""
    yield constants(chips, rows)
    yield comparison(found)
    yield attention_table(chips)
    yield unused()
    yield forms_table(rows)
    context = found["options"]["context"]
    yield overview(name, model, chips, context) if chip is None else parts(name, model, chip, context)


def constants(chips: dict[str, Chip], rows: Sequence[Row]) -> Table:
    table = new_table(
        "constants behind what is predicted: two of each chip, fitted to published times of M <= 2",
        *("chip", "GB/s", "share", "fp32 TF", "share of its issue rate", "fitted to times of M <= 2"),
        caption="M5 Ultra and M6 are left out: no figures of their compute",
    )
    for name, chip in chips.items():
        figures = f"{chip.gbps:g}", f"{chip.usable:.2f}", f"{chip.tflops:g}", f"{chip.issue:.2f}"
        table.add_row(name, *figures, str(fitted_to(name, rows) or "none: prior"))
    return table


def comparison(found: dict[str, Any]) -> Table:
    columns = "source", "chip", "what", "M", "over M", "published", "predicted", "error", ""
    table = new_table("predicted T(M)/T(1) beside published", *columns, left=3)
    for fitted in (True, False):
        lines = [row for row in found["validation"]["rows"] if row["fitted"] == fitted]
        for row in sorted(lines, key=lambda row: (row["kind"], row["chip"], row["source"], row["m"])):
            ratios = f"{row['published']:.2f}", f"{row['predicted']:.2f}", f"{row['error']:+.1%}"
            size = str(row["m"]), str(row["base"])
            table.add_row(row["source"], row["chip"], row["what"], *size, *ratios, row["verdict"])
        table.add_section()
    return table


def attention_table(chips: dict[str, Chip]) -> Table:
    columns = "source", "chip", "query heads/KV heads, width", "context", "M", "published", "predicted", "error"
    table = new_table("predicted GB/s of stock MLX's attention beside published; neither fitted nor a test", *columns)
    for row in attention(chips):
        figures = f"{row['published']}", f"{row['predicted']:.0f}", f"{row['error']:+.1%}"
        table.add_row(row["source"], row["chip"], row["shape"], str(row["context"]), str(row["m"]), *figures)
    return table


def unused() -> Table:
    table = new_table("published but not predicted, and why", "source", "what", "why", left=3)
    for row in read_unused():
        table.add_row(row["source"], row["what"], row["why"])
    return table


def forms_table(rows: Sequence[Row]) -> Table:
    columns = "form", "caches serve", "median error, M <= 2", "greatest", "median, M = 3..8", "greatest", "within 25%"
    table = new_table("predicted with other forms of t(a, b), each fitted anew to M <= 2", *columns, left=2)
    for made in forms(rows):
        near, far = made["fitted"], made["tested"]
        figures = *(f"{x:.1%}" for x in (*near[:2], *far[:2])), f"{far[2]} of {far[3]}"
        table.add_row(made["form"] + " *" * made["used"], "repeated requests" if made["caches"] else "none", *figures)
    return table


def sides(model: Model, chip: Chip, context: int) -> dict[str, dict[int, float]]:
    """Seconds of 1 to 8 rows for each of SIDES."""
    at = Pass(1, context=context)
    passes = {name: replace(at, on=on, overlap=overlap) for name, (on, overlap) in SIDES.items()}
    return {name: step_times(model, chip, side, range(1, 9)) for name, side in passes.items()}


def overview(name: str, model: Model, chips: dict[str, Chip], context: int) -> Table:
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
        small = chip.memory * 0.75e9 < model.total_bytes  # what macOS gives the GPU unasked
        table.add_row(chip.name + " *" * small, *cells)
    return table


def parts(name: str, model: Model, chip: Chip, context: int) -> Table:
    columns = "side", "part", "GB", "GB requested", "ms of bytes", "10^9 instructions", "ms of these", "ms"
    table = new_table(f"predicted parts of {name} at M = 4 on {chip.name}", *columns, left=2)
    for side, (on, overlap) in SIDES.items():
        costs = of_model(model, Pass(4, on, context, overlap), chip)
        for part in dict.fromkeys(costs.names):
            here = [i for i, found in enumerate(costs.names) if found == part]
            totals = (costs.count * x for x in (costs.nbytes, costs.requested, costs.instructions))
            nbytes, requested, counted = (x[here].sum() / 1e9 for x in totals)
            alone = nbytes / chip.bandwidth * 1e12, counted / chip.rate * 1e12
            figures = (nbytes, requested, alone[0], counted, alone[1], phases(costs, chip)[here].sum() * 1e3)
            table.add_row(side, part, *(f"{x:.2f}" for x in figures))
        table.add_row(side, f"{costs.launches:.0f} launches", *[""] * 5, f"{costs.launches * LAUNCH * 1e3:.2f}")
        table.add_section()
    return table
