"""Format results as one HTML page: pictures in both colour schemes, tables, environment and command.

The page loads nothing from the network.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from . import plots
from .decode_tables import by_category, categories, overall, settings
from .kernels import speed_table, traffic_table
from .panels import BarPanel, Found, GridPanel, LinePanel, Panel, panels, subject
from .parallel import table as parallel_table
from .profile_report import phase_table
from .result import named, new_table
from .roofline.tables import tables as model_tables
from .verify import curve_table

STYLE = Path(__file__).with_name("page.css")


def page(results: Sequence[Found]) -> str:
    """Return results as a complete HTML document."""
    names = dict.fromkeys(f"{found['bench']} {subject(found)}" for found in results)
    title = escape("mlx-mtp bench: " + ", ".join(names))
    start = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>\n{STYLE.read_text()}</style></head><body>\n<h1>{title}</h1>"
    )
    figures = []
    for i, panel in enumerate(panels(*results)):  # drawn twice; CSS shows one of them, with its numbers
        label, drawn = escape(panel.title, quote=True), ""
        for scheme in ("light", "dark"):
            svg = plots.svg(panel, dark=scheme == "dark", name=f"panel-{i}-{scheme}")
            drawn += svg.replace("<svg ", f'<svg class="{scheme}" role="img" aria-label="{label}" ', 1)
        numbers = "".join(html_table(numbers_of(panel)))
        figures.append(f"<figure>{drawn}<details><summary>numbers</summary>{numbers}</details></figure>")
    details = [line for found in results for line in _details(found)]
    return "\n".join([start, *figures, *details, "</body></html>\n"])


def _details(found: Found) -> Iterator[str]:
    """Yield a result's tables, its command, and its model, options and environment."""
    yield f"<h2>bench {escape(found['bench'])}: {escape(subject(found))}</h2>"
    if label := found["model"].get("synthetic"):
        yield f'<p class="note">Synthetic: {escape(label)}.</p>'
    for table in tables_of(found):
        yield from html_table(table)
    if command := found.get("command"):
        yield f"<pre>{escape(command)}</pre>"
    for name in ("model", "options", "environment"):
        cells = "".join(f"<dt>{escape(k)}</dt><dd>{escape(_shown(v))}</dd>" for k, v in found[name].items())
        yield f"<details open><summary>{name}</summary><dl>{cells}</dl></details>"


def tables_of(found: Found) -> Iterator[Table]:
    """Yield a result's own tables as the command printed them, without comparisons with other figures."""
    match found["bench"]:
        case "decode":
            for setting in settings(found):
                yield overall(found, setting)
                if len(categories(found)) > 1:
                    yield by_category(found, setting)
        case "verify":
            for side in found["curves"][0]["seconds"]:
                yield curve_table(found["curves"], side, f"T(M)/T(1), {named(found['model'])}, {side}")
        case "kernels":
            yield (traffic_table if found["options"]["emulate"] else speed_table)(found["found"])
        case "profile":
            yield phase_table(found)
        case "parallel":
            yield parallel_table(found)
        case "model":
            yield from model_tables(found)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)


def html_table(table: Table) -> Iterator[str]:
    """Yield a rich table as HTML, in a box that scrolls sideways."""
    kinds = [' class="left"' if column.justify == "left" else "" for column in table.columns]
    heads = _cells("th", kinds, [column.header for column in table.columns])
    rows = "".join(_cells("td", kinds, line) for line in zip(*(c.cells for c in table.columns), strict=True))
    title = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    yield f'<div class="scroll"><table>{title}<thead>{heads}</thead><tbody>{rows}</tbody></table></div>'
    if table.caption:
        yield f'<p class="note">{_text(table.caption)}</p>'


def _cells(tag: str, kinds: Sequence[str], cells: Sequence[Any]) -> str:
    made = (f"<{tag}{kind}>{_text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def _text(cell: Any) -> str:
    return escape(cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain)


def numbers_of(panel: Panel) -> Table:
    """Return the numbers that a panel draws, without intervals, as a table."""
    corner, columns, rows = panel.x_label, [], []
    match panel:
        case LinePanel():
            corner, columns = panel.y_label, panel.ticks.values()
            points = [dict(zip(s.x, s.y, strict=True)) for s in panel.series]
            rows = [(s.label, *map(y.get, panel.ticks)) for s, y in zip(panel.series, points, strict=True)]
        case BarPanel():
            columns, lengths = [*panel.parts, "sum"], zip(*panel.parts.values(), strict=True)
            rows = [(bar, *line, sum(line)) for bar, line in zip(panel.bars, lengths, strict=True)]
        case GridPanel():
            corner, columns = f"{panel.unit}, by {panel.x_label}", panel.columns
            rows = [(row, *line) for row, line in zip(panel.rows, panel.values, strict=True)]
    table = new_table(None, corner, *columns)
    for row in rows:
        table.add_row(*(x if isinstance(x, str) else "" if x is None else f"{x:.4g}" for x in row))
    return table
