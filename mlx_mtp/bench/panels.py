"""Describe pictures as plain numbers: panels of lines, bars, grids and ranges."""

from dataclasses import dataclass, field
from typing import Any

Found = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """Points of one line. low, high: the interval of each; empty where there is none. level: a line across all x.

    line: how it is drawn, as matplotlib writes it. colour: the number of one of a theme's; None: the next.
    """

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    level: bool = False
    line: str = "-"
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    """Title and x-axis of a picture."""

    title: str
    x_label: str


@dataclass(frozen=True)
class LinePanel(Panel):
    """y against x, from zero; `ticks` names the places on the x-axis."""

    y_label: str
    series: list[Series]
    ticks: dict[float, str]


@dataclass(frozen=True)
class BarPanel(Panel):
    """Stacked horizontal bars: of each bar, a length per part. group: so many bars stand together; 0: all."""

    bars: list[str]
    parts: dict[str, list[float]]
    group: int = 0


@dataclass(frozen=True)
class GridPanel(Panel):
    """A number per row and column, None where there is none; `form` writes it, and colours span 0 to `high`.

    unit: what the numbers are.
    """

    y_label: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    form: str
    high: float
    unit: str


@dataclass(frozen=True)
class RangePanel(Panel):
    """Of each row, a range, and marks by name, in a theme's colours by number; None where a row lacks one."""

    rows: list[str]
    spans: list[tuple[float, float]]
    span_label: str
    marks: dict[str, list[float | None]]
    colours: list[int]


def verify_panel(title: str, series: list[Series]) -> LinePanel:
    """Draw what verifies of M rows take over a plain step, with a tick at every M that a line has."""
    ticks = {x: f"{x:.0f}" for x in sorted({x for s in series for x in s.x})}
    return LinePanel(title, "rows verified, M", "T(M) / T(1)", series, ticks)


def subject(found: Found) -> str:
    """Say what was measured, and where, as titles do."""
    chip = found.get("chip", {}).get("name") or found["environment"]["chip"]
    label = found["model"].get("synthetic")
    return f"{found['model']['name']}{f' (synthetic: {label})' if label else ''}, {chip}"
