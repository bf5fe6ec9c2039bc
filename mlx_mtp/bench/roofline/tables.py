"""Predicted cost of a pass of M rows, stock MLX and ours, on each chip: T(1) and T(M)/T(1). Nothing here is measured.

    python bench/roofline.py [--chip "M3 Ultra"] [--model GLM-4.5] [--context 4096] [--forms]

An operation takes t = max(a, b) + min(a, b) / 3, with a = bytes / (GB/s x share) and b = instructions / (fp32 TFLOPS
/ 2 x share); a pass is the sum over all layers' operations plus launches x 1.6 us. A chip's two shares are fitted to
published times of one and two rows; published times of three to eight are then predicted and the errors shown. Exits
with 1 if one is off by more than 25% without a named reason.

Bytes: stock MLX reads an expert once for each token that visits it, ours each visited expert once. Weights and KV
come from memory once a pass on either side: caches serve what a launch requests again. Launches are those counted by
`bench/launches.py --out bench/results/launches.json`. Ours is a plan until a Mac has timed it.
"""

from collections.abc import Sequence
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table
from roofline_cost import CHIPS, FORM, FORMS, LAUNCH, Chip, Pass, of_model, of_op, phases, seconds, step_times
from roofline_fit import Prediction, Row, errors, fit, predict, read_rows, read_unused, split
from roofline_models import MODELS, Attention, Model

ROWS = (2, 4, 8)
SIDES = {
    "stock MLX": {"ours": False},
    "ours, independent routing": {"ours": True},
    "ours, observed routing": {"ours": True, "shared": True},
}
# Plain steps, from shares of 692 GB/s published by omlx#2238; not fitted.
PLAIN = (
    ("M3 Ultra", "Qwen3.6-35B-A3B", 0.338, ""),
    ("M3 Ultra", "Qwen3.6-27B", 0.939, "; avlp12, which is fitted, has 29.7 ms"),
)
# GB/s of the cache that stock MLX's attention reached: query heads, KV heads, width, context, rows; not fitted.
ATTENTION = (
    ("mlx#4076", "M5 Pro", (8, 1, 128), 8192, 1, 190),
    ("mlx#4380", "M5 Pro", (12, 1, 128), 8192, 1, 124),
    ("mlx#4380", "M5 Pro", (16, 1, 128), 8192, 1, 99),
    ("MTPLX", "M5 Max 40c", (24, 4, 256), 131072, 1, 387),
    ("MTPLX", "M5 Max 40c", (24, 4, 256), 131072, 4, 160),
    ("mlx#3837", "M1 Ultra", (32, 4, 256), 100000, 1, 178),
    ("mlx#3837", "M1 Ultra", (32, 4, 256), 100000, 2, 76),
)


def new_table(title: str, *columns: str, left: int = 1, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def constants(chips: dict[str, Chip], rows: Sequence[Row]) -> Table:
    table = new_table(
        "constants behind what is predicted: two of each chip, fitted to published times of M <= 2",
        *("chip", "GB/s", "share", "fp32 TF", "share of its issue rate", "fitted to times of M <= 2"),
        caption="M5 Ultra and M6 are left out: no figures of their compute",
    )
    for name, chip in chips.items():
        used = sum(row.chip == name and row.m <= 2 for row in rows)
        used += len({(row.source, row.base) for row in rows if row.chip == name and row.base_ms and row.base <= 2})
        figures = f"{chip.gbps:g}", f"{chip.usable:.2f}", f"{chip.tflops:g}", f"{chip.issue:.2f}"
        table.add_row(name, *figures, str(used or "none: prior"))
    return table


def comparison(fitted: Sequence[Prediction], tested: Sequence[Prediction]) -> Table:
    columns = "source", "chip", "what", "M", "over M", "published", "predicted", "error", ""
    table = new_table("predicted T(M)/T(1) beside published", *columns, left=3)
    for made, note in ((fitted, "fitted"), (tested, None)):
        for p in sorted(made, key=lambda p: (p.row.kind, p.row.chip, p.row.source, p.row.m)):
            row, ratios = p.row, (f"{p.row.ratio:.2f}", f"{p.ratio:.2f}", f"{p.error:+.1%}")
            table.add_row(row.source, row.chip, row.what, str(row.m), str(row.base), *ratios, note or p.verdict)
        table.add_section()
    return table


def summary(tested: Sequence[Prediction]) -> list[str]:
    """Of all rows of M >= 3, then by kind."""
    lines = []
    for name in ("all", "projection", "forward"):
        middle, most, within, number = errors(p for p in tested if name in ("all", p.row.kind))
        figures = f"{within} of {number} within 25%, median error {middle:.1%}, greatest {most:.1%}"
        lines.append(f"predicted, not fitted (M = 3..8), {name}: {figures}")
    beyond = [p for p in tested if p.verdict != "ok"]
    return lines + [f"predicted badly, {p.row.source} M = {p.row.m}: {p.error:+.1%}, {p.verdict}" for p in beyond]


def unused() -> Table:
    table = new_table("published but not predicted, and why", "source", "what", "why", left=3)
    for row in read_unused():
        table.add_row(row["source"], row["what"], row["why"])
    return table


def plain_checks(chips: dict[str, Chip]) -> list[str]:
    lines = []
    for chip, model, share, note in PLAIN:
        step = MODELS[model]
        published = (step.shared_bytes + step.routed_bytes) / (share * 692e9) * 1e3
        predicted = step_times(step, chips[chip], Pass(1, context=512), (1,))[1] * 1e3
        error = f"{predicted / published - 1:+.1%}{note}"
        lines.append(
            f"predicted plain step, {chip} {model}: {predicted:.1f} ms, omlx#2238 {published:.1f} ms, {error}"
        )
    return lines


def attention_checks(chips: dict[str, Chip]) -> Table:
    columns = "source", "chip", "query heads/KV heads, width", "context", "M", "published", "predicted", "error"
    table = new_table("predicted GB/s of stock MLX's attention beside published; neither fitted nor a test", *columns)
    for source, chip, (heads, kv, width), context, m, published in ATTENTION:
        costs = of_op(Attention(heads, kv, width), Pass(m, context=context), chips[chip])
        predicted = costs.nbytes.sum() / seconds(costs, chips[chip]) / 1e9
        figures = f"{published}", f"{predicted:.0f}", f"{predicted / published - 1:+.1%}"
        table.add_row(source, chip, f"{heads}/{kv}, {width}", str(context), str(m), *figures)
    return table


def ratios(model: Model, chip: Chip, context: int) -> dict[str, dict[int, float]]:
    """Seconds of M rows for each of SIDES."""
    at = Pass(1, context=context)
    return {name: step_times(model, chip, replace(at, **side), range(1, 9)) for name, side in SIDES.items()}


def overview(name: str, chips: dict[str, Chip], context: int) -> Table:
    model, caption = MODELS[name], "each over its own T(1); two figures of ours: independent / observed routing"
    columns = "chip", "T(1) ms, stock → ours", *(f"T({m})/T(1), stock → ours" for m in ROWS)
    title = f"predicted: {name}, 4 bits, {context} tokens of context"
    table = new_table(title, *columns, caption=caption + "; * too little memory for the weights")
    for chip in chips.values():
        stock, free, near = ratios(model, chip, context).values()
        cells = [f"{stock[1] * 1e3:.1f} → {free[1] * 1e3:.1f}"]
        for m in ROWS:
            ours = [f"{side[m] / side[1]:.2f}" for side in (free, near)]
            shown = " / ".join(ours if model.routed_bytes else ours[:1])
            cells.append(f"{stock[m] / stock[1]:.2f} → {shown}")
        small = chip.memory * 0.75e9 < model.total_bytes  # what macOS gives the GPU unasked
        table.add_row(chip.name + " *" * small, *cells)
    return table


def detail(name: str, chip: Chip, context: int) -> list[Table]:
    sides = ratios(MODELS[name], chip, context)
    times = new_table(f"predicted: {name} on {chip.name}, {context} tokens of context, ms", "M", *sides, left=0)
    for m in range(1, 9):
        times.add_row(str(m), *(f"{side[m] * 1e3:.1f} ({side[m] / side[1]:.2f})" for side in sides.values()))
    columns = "side", "phase", "GB", "GB requested", "ms of bytes", "10^9 instructions", "ms of these", "ms"
    parts = new_table(f"predicted phases of {name} at M = 4 on {chip.name}", *columns, left=2)
    for side, options in SIDES.items():
        costs = of_model(MODELS[name], Pass(4, context=context, **options), chip)
        for phase in dict.fromkeys(costs.names):
            here = [i for i, found in enumerate(costs.names) if found == phase]
            columns = (costs.count * x for x in (costs.nbytes, costs.requested, costs.instructions))
            nbytes, requested, counted = (x[here].sum() / 1e9 for x in columns)
            alone = nbytes / chip.bandwidth * 1e12, counted / chip.rate * 1e12
            figures = (nbytes, requested, alone[0], counted, alone[1], phases(costs, chip)[here].sum() * 1e3)
            parts.add_row(side, phase, *(f"{x:.2f}" for x in figures))
        parts.add_row(side, f"{costs.launches:.0f} launches", *[""] * 5, f"{costs.launches * LAUNCH * 1e3:.2f}")
        parts.add_section()
    return [times, parts]


def tried(rows: Sequence[Row]) -> Table:
    columns = "form", "caches serve", "median error, M <= 2", "greatest", "median, M = 3..8", "greatest", "within 25%"
    table = new_table("predicted with other forms of t(a, b), each fitted anew to M <= 2", *columns, left=2)
    for caches in (True, False):
        for form in FORMS:
            fitted, tested = split(predict(rows, fit(rows, form, caches), form, caches))
            near, far = errors(fitted), errors(tested)
            figures = *(f"{x:.1%}" for x in (*near[:2], *far[:2])), f"{far[2]} of {far[3]}"
            used = " *" * (form == FORM and caches)
            table.add_row(form + used, "repeated requests" if caches else "none", *figures)
    return table


@click.command(help=__doc__)
@click.option("--chip", "only", type=click.Choice(list(CHIPS), case_sensitive=False), help="This chip, by phase.")
@click.option("--model", "models", type=click.Choice(list(MODELS), case_sensitive=False), multiple=True)
@click.option("--context", type=click.IntRange(1), default=4096, show_default=True, help="Tokens before the rows.")
@click.option("--forms", is_flag=True, help="Also what other forms of t(a, b) give.")
def main(only: str | None, models: tuple[str, ...], context: int, forms: bool) -> None:
    console, rows = Console(width=150), read_rows()
    chips = fit(rows)
    fitted, tested = split(predict(rows, chips))
    shown = list(models) or list(MODELS)
    if only:
        console.print(comparison(*([p for p in made if p.row.chip == only] for made in (fitted, tested))))
        console.print(*(table for name in shown for table in detail(name, chips[only], context)))
    else:
        console.print(constants(chips, rows), comparison(fitted, tested), attention_checks(chips), unused())
        console.print(*(overview(name, chips, context) for name in shown))
    if forms:
        console.print(tried(rows))
    console.print("\n".join(summary(tested) + plain_checks(chips)))
    raise SystemExit(int(any(p.verdict == "FAIL" for p in tested)))


if __name__ == "__main__":
    main()
