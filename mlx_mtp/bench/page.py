"""Results as one HTML page for sharing: pictures in both colour schemes, tables, environment and command; nothing is
fetched from anywhere."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from . import plots
from .page_tables import tables_of
from .panels import Bars, Found, Grid, Lines, Panel, Ranges, subject
from .plot_data import panels_of

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1a1a1a; --faint: #d4d7dc; --quiet: #5a6270; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e8eaed; --faint: #3b414a; --quiet: #a3abb8; }
  figure svg.light { display: none; }
}
@media not all and (prefers-color-scheme: dark) { figure svg.dark { display: none; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th.left, td.left { text-align: left; }
p.note, dd, dt { color: var(--quiet); font-size: .86rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; color: var(--ink); }
code, pre { font: .86rem ui-monospace, monospace; } pre { overflow-x: auto; white-space: pre-wrap; }
"""


def page(results: Sequence[Found]) -> str:
    """A complete document; raises ValueError where matplotlib is missing."""
    title = "mlx-mtp bench: " + ", ".join(dict.fromkeys(f"{found['bench']} {subject(found)}" for found in results))
    body = [f"<h1>{escape(title)}</h1>", *_figures(panels_of(results))]
    for found in results:
        body += _details(found)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head>{head}<style>{STYLE}</style></head><body>',
            *body,
            "</body></html>\n",
        ]
    )


def _figures(panels: Sequence[Panel]) -> Iterator[str]:
    """Every picture twice, of which one is shown; behind it, to be opened, its numbers."""
    for i, panel in enumerate(panels):
        drawn = [
            plots.svg(panel, dark=dark, name=f"panel-{i}-{scheme}").replace(
                "<svg ", f'<svg class="{scheme}" role="img" aria-label="{escape(panel.title, quote=True)}" ', 1
            )
            for dark, scheme in ((False, "light"), (True, "dark"))
        ]
        numbers = "".join(html_table(numbers_of(panel)))
        yield f"<figure>{''.join(drawn)}<details><summary>numbers</summary>{numbers}</details></figure>"


def _details(found: Found) -> Iterator[str]:
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


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)


def html_table(table: Table) -> Iterator[str]:
    """A rich table as HTML, in a box that scrolls sideways."""
    left = [' class="left"' if column.justify == "left" else "" for column in table.columns]
    heads = "".join(f"<th{kind}>{_text(c.header)}</th>" for kind, c in zip(left, table.columns, strict=True))
    lines = zip(*(column.cells for column in table.columns), strict=True)
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{_text(cell)}</td>' for kind, cell in zip(left, line, strict=True))}</tr>"
        for line in lines
    )
    title = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    yield f'<div class="scroll"><table>{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    if table.caption:
        yield f'<p class="note">{_text(table.caption)}</p>'


def _text(cell: Any) -> str:
    return escape(cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain)


def numbers_of(panel: Panel) -> Table:
    """What a picture shows, as a table."""
    match panel:
        case Lines():
            lines = [(s.label, dict(zip(s.x, s.y, strict=True))) for s in panel.series]
            cells = [(label, [_number(y.get(x)) for x in panel.ticks]) for label, y in lines]
            return _numbers(panel.y_label, list(panel.ticks.values()), cells)
        case Bars():
            columns = zip(*panel.parts.values(), strict=True)
            cells = [
                (bar, [*map(_number, line), _number(sum(line))])
                for bar, line in zip(panel.bars, columns, strict=True)
            ]
            return _numbers(panel.x_label, [*panel.parts, "sum"], cells)
        case Grid():
            cells = [(row, [*map(_number, line)]) for row, line in zip(panel.rows, panel.values, strict=True)]
            return _numbers(f"{panel.unit}, by {panel.x_label}", panel.columns, cells)
        case Ranges():
            spans = [f"{low:.4g} to {high:.4g}" for low, high in panel.spans]
            marks = zip(*panel.marks.values(), strict=True)
            lines = zip(panel.rows, spans, marks, strict=True)
            cells = [(row, [span, *map(_number, line)]) for row, span, line in lines]
            return _numbers(panel.x_label, [panel.span_label, *panel.marks], cells)


def _numbers(corner: str, columns: Sequence[str], lines: Sequence[tuple[str, list[str]]]) -> Table:
    table = Table()
    table.add_column(corner)
    for name in columns:
        table.add_column(name, justify="right")
    for label, cells in lines:
        table.add_row(label, *cells)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
