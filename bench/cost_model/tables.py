"""Format the validation of the cost model as lines of text and as tables."""

from collections.abc import Iterable, Sequence
from statistics import median

from rich.table import Table

from mlx_mtp.bench.result import new_table
from mlx_mtp.bench.roofline.chips import Chip
from mlx_mtp.bench.roofline.tables import published_table

from .published import PublishedPass, read_unused
from .validation import Found, attention, fitted_to


def tables(
    chips: dict[str, Chip], rows: Sequence[PublishedPass], checked: Found, forms: Sequence[Found]
) -> list[Table]:
    """Yield tables of the constants, and of predictions next to published figures."""
    return [
        constants(chips, rows),
        comparison(checked),
        published_table(checked["passes"]),
        attention_table(chips),
        unused(),
        forms_table(forms),
    ]


def summary(checked: Found) -> list[str]:
    """Return the errors of all rows of M >= 3 by kind, and the rows with large errors."""
    lines = []
    for name, e in checked["errors"].items():
        figures = f"{e['within']} of {e['rows']} within 25%, median error {e['median']:.1%}"
        lines.append(f"predicted, not fitted (M = 3..8), {name}: {figures}, greatest {e['greatest']:.1%}")
    for row in checked["rows"]:
        if row["verdict"] not in ("ok", "fitted"):
            lines.append(f"predicted badly, {row['source']} M = {row['m']}: {row['error']:+.1%}, {row['verdict']}")
    ratios = [step["predicted"] / step["published"] for step in checked["passes"] if not step["fitted"]]
    spread = f"median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    lines.append(f"predicted over published ms of {len(ratios)} whole passes, not fitted: {spread}")
    return lines


def _table(title: str, columns: Sequence[str], *sections: Iterable[Sequence[str]], **form) -> Table:
    """Return a table with these rows; form: arguments of `new_table`."""
    table = new_table(title, *columns, **form)
    for section in sections:
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def constants(chips: dict[str, Chip], rows: Sequence[PublishedPass]) -> Table:
    """Return a table of the two constants of each chip and the number of times they were fitted to."""
    lines = []
    for name, chip in chips.items():
        figures = f"{chip.gbps:g}", f"{chip.usable:.2f}", f"{chip.tflops:g}", f"{chip.issue:.2f}"
        lines.append((name, *figures, str(fitted_to(name, rows) or "none: prior")))
    return _table(
        "constants behind what is predicted: two of each chip, fitted to published times of M <= 2",
        ("chip", "GB/s", "share", "fp32 TF", "share of its issue rate", "fitted to times of M <= 2"),
        lines,
        caption="M5 Ultra and M6 are left out: no figures of their compute",
    )


def comparison(checked: Found) -> Table:
    """Return a table of predicted and published ratios, fitted ones first."""
    columns = "source", "chip", "what", "M", "over M", "published", "predicted", "error", ""
    rows = sorted(checked["rows"], key=lambda row: (row["kind"], row["chip"], row["source"], row["m"]))
    sections = [[_compared(row) for row in rows if row["fitted"] == fitted] for fitted in (True, False)]
    return _table("predicted and published T(M)/T(1)", columns, *sections, left=3)


def _compared(row: Found) -> Sequence[str]:
    size = row["source"], row["chip"], row["what"], str(row["m"]), str(row["base"])
    return *size, f"{row['published']:.2f}", f"{row['predicted']:.2f}", f"{row['error']:+.1%}", row["verdict"]


def attention_table(chips: dict[str, Chip]) -> Table:
    """Return a table of predicted and published GB/s of attention."""
    columns = "source", "chip", "query heads/KV heads, width", "context", "M", "published", "predicted", "error"
    lines = []
    for row in attention(chips):
        figures = f"{row['published']}", f"{row['predicted']:.0f}", f"{row['error']:+.1%}"
        lines.append((row["source"], row["chip"], row["shape"], str(row["context"]), str(row["m"]), *figures))
    title = "predicted and published GB/s of stock MLX's attention; neither fitted nor a test"
    return _table(title, columns, lines)


def unused() -> Table:
    """Return a table of published figures that are not predicted."""
    lines = [(row["source"], row["what"], row["why"]) for row in read_unused()]
    return _table("published but not predicted, and why", ("source", "what", "why"), lines, left=3)


def forms_table(forms: Sequence[Found]) -> Table:
    """Return a table of the errors of other forms of the cost model."""
    columns = "form", "caches serve", "median error, M <= 2", "greatest", "median, M = 3..8", "greatest", "within 25%"
    lines = []
    for made in forms:
        near, far = made["fitted"], made["tested"]
        name, served = made["form"] + " *" * made["used"], "repeated requests" if made["caches"] else "none"
        figures = *(f"{x:.1%}" for x in (*near[:2], *far[:2])), f"{far[2]} of {far[3]}"
        lines.append((name, served, *figures))
    title = "predicted with other forms of t(a, b), each fitted to M <= 2"
    return _table(title, columns, lines, left=2)
