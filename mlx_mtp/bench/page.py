"""Format results as one HTML page: pictures in both colour schemes, tables, environment and command.

The page loads nothing from the network.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import plots
from .decode_tables import by_category, categories, overall, settings
from .kernels import speed_table, traffic_table
from .panels import Result, panels, subject
from .parallel import table as parallel_table
from .profile_report import phase_table
from .result import named
from .roofline.tables import tables as model_tables
from .verify import curve_table

STYLE = Path(__file__).with_name("page.css")
WIDTH = 160  # columns of the tables


def page(results: Sequence[Result]) -> str:
    """Return results as a complete HTML document."""
    names = dict.fromkeys(f"{found['bench']} {subject(found)}" for found in results)
    title = escape("mlx-mtp bench: " + ", ".join(names))
    start = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>\n{STYLE.read_text()}</style></head><body>\n<h1>{title}</h1>"
    )
    figures = []
    for i, panel in enumerate(panels(*results)):  # drawn twice; CSS shows one of them
        label, drawn = escape(panel.title, quote=True), ""
        for scheme in ("light", "dark"):
            svg = plots.svg(panel, dark=scheme == "dark", name=f"panel-{i}-{scheme}")
            drawn += svg.replace("<svg ", f'<svg class="{scheme}" role="img" aria-label="{label}" ', 1)
        figures.append(f"<figure>{drawn}</figure>")
    details = [line for found in results for line in _details(found)]
    return "\n".join([start, *figures, *details, "</body></html>\n"])


def _details(found: Result) -> Iterator[str]:
    """Yield a result's tables, its command, and its model, options and environment."""
    yield f"<h2>bench {escape(found['bench'])}: {escape(subject(found))}</h2>"
    if label := found["model"].get("synthetic"):
        yield f'<p class="note">Synthetic: {escape(label)}.</p>'
    yield html_of(tables_of(found))
    if command := found.get("command"):
        yield f"<pre>{escape(command)}</pre>"
    for name in ("model", "options", "environment"):
        cells = "".join(f"<dt>{escape(k)}</dt><dd>{escape(_shown(v))}</dd>" for k, v in found[name].items())
        yield f"<details open><summary>{name}</summary><dl>{cells}</dl></details>"


def tables_of(found: Result) -> Iterator[Table]:
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


def html_of(tables: Iterable[Table]) -> str:
    """Return rich tables as preformatted text in a box that scrolls sideways."""
    console = Console(width=WIDTH, record=True, file=StringIO(), highlight=False)
    console.print(*tables)
    return console.export_html(inline_styles=True, code_format='<pre class="scroll">{code}</pre>')
