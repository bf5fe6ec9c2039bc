"""What pictures are made of, as plain numbers: lines, bars, grids and ranges."""

from dataclasses import dataclass, field
from typing import Any

Found = dict[str, Any]
SOLID, DASHED, DASH_DOT, DOTTED = "-", "--", "-.", ":"


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
    line: str = SOLID
    colour: int | None = None


@dataclass(frozen=True)
class Lines:
    """y against x, from zero; `ticks` names the places on the x-axis."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    ticks: dict[float, str]


@dataclass(frozen=True)
class Bars:
    """Stacked horizontal bars: of each bar, a length per part. group: so many bars stand together; 0: all."""

    title: str
    x_label: str
    bars: list[str]
    parts: dict[str, list[float]]
    group: int = 0


@dataclass(frozen=True)
class Grid:
    """A number per row and column, None where there is none; `form` writes it, `low` and `high` span the colours.

    unit: what the numbers are.
    """

    title: str
    x_label: str
    y_label: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    form: str
    low: float
    high: float
    unit: str


@dataclass(frozen=True)
class Ranges:
    """Of each row, a range, and marks by name, in a theme's colours by number; None where a row lacks one."""

    title: str
    x_label: str
    rows: list[str]
    spans: list[tuple[float, float]]
    span_label: str
    marks: dict[str, list[float | None]]
    colours: list[int]


Panel = Lines | Bars | Grid | Ranges


def subject(found: Found) -> str:
    """What was measured, and where, as titles say it."""
    chip = found.get("chip", {}).get("name") or found["environment"]["chip"]
    label = found["model"].get("synthetic")
    return f"{found['model']['name']}{f' (synthetic: {label})' if label else ''}, {chip}"
