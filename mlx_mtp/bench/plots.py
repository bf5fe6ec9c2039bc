"""Draw results as light or dark pictures with matplotlib (the extra `plot`)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..machine.atomic import write_whole
from ..machine.errors import install
from .panels import BarPanel, GridPanel, LinePanel, Panel, Result, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
WIDTH = 9.0  # inches of a panel
TEXT = 10.0  # points
ROW = 0.3  # inches of a row of a grid, or a bar


@dataclass(frozen=True)
class Theme:
    """Colours of background, text, lines and series.

    Dichromats can distinguish the first five series by colour, and the others by their markers.
    """

    paper: str
    ink: str
    faint: str
    series: tuple[str, ...]


ON_LIGHT = "#0072b2", "#d55e00", "#009e73", "#785ef0", "#00525b", "#999933", "#4a4f57", "#9aa1ab"
ON_DARK = "#56b4e9", "#d55e00", "#c8f08f", "#785ef0", "#cc6677", "#f0e442", "#f4f5f7", "#7c8592"
LIGHT = Theme(paper="#ffffff", ink="#1a1a1a", faint="#d4d7dc", series=ON_LIGHT)
DARK = Theme(paper="#14171c", ink="#e8eaed", faint="#3b414a", series=ON_DARK)
MARKERS = "osD^vP*X"
# Horizontal shift between overlapping intervals: as a share of the x-axis, and the maximum of one position for all.
DODGE, SPREAD = 0.018, 0.7


def check(path: Path) -> None:
    """Raise ValueError if a path has no .png or .svg suffix, or matplotlib is missing; nothing is written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"plot={path}: a picture ends in {' or '.join(SUFFIXES)}, not in {path.suffix or 'nothing'}")
    need_matplotlib()


def need_matplotlib() -> None:
    """Raise ValueError with the install command if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"pictures need matplotlib: {install('plot')}") from None


def save(results: Sequence[Result], path: Path, *, dark: bool = False) -> None:
    """Draw the results' pictures, one below the other, into a .png or .svg file.

    Raises ValueError if the results have no pictures; call `check` first for the suffix and matplotlib.
    """
    drawn = panels(*results)
    if not drawn:
        raise ValueError(f"plot={path}: nothing in these results can be drawn")
    write_whole(path, _rendered(drawn, path.suffix.lower().removeprefix("."), dark))


def svg(panel: Panel, *, dark: bool, name: str) -> str:
    """Return one picture as an <svg> element for a page; its ids are unique per name."""
    text = _rendered([panel], "svg", dark, salt=name).decode()
    return text[text.index("<svg") :]


def _rendered(panels: Sequence[Panel], kind: str, dark: bool, salt: str = "mlx-mtp") -> bytes:
    out, theme = BytesIO(), DARK if dark else LIGHT
    with style(theme, salt):
        figure(panels, theme).savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def style(theme: Theme, salt: str = "mlx-mtp") -> AbstractContextManager[None]:
    """Return a context that configures matplotlib while a picture is drawn and written; salt: of an SVG's ids."""
    import matplotlib

    return matplotlib.rc_context(
        {
            **{"figure.facecolor": theme.paper, "axes.facecolor": theme.paper, "savefig.facecolor": theme.paper},
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.ink),
            **{"axes.edgecolor": theme.faint, "grid.color": theme.faint, "grid.linewidth": 0.6},
            **{"font.size": TEXT, "axes.titlesize": TEXT + 1, "axes.titlelocation": "left", "axes.titlepad": 10},
            **{"lines.linewidth": 1.8, "lines.markersize": 5, "legend.frameon": False},
            **{"axes.spines.top": False, "axes.spines.right": False},
            **{"figure.constrained_layout.h_pad": 0.15, "svg.fonttype": "none", "svg.hashsalt": salt},
        }
    )


def figure(panels: Sequence[Panel], theme: Theme) -> "Figure":
    """Return a figure with panels one below the other, each with the height it needs; call it within `style`."""
    from matplotlib.figure import Figure

    drawers: dict[type, Any] = {LinePanel: _lines, BarPanel: _bars, GridPanel: _grid}
    heights = [height(panel) for panel in panels]
    made = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    places = made.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for ax, panel in zip(places[:, 0], panels, strict=True):
        ax.set_title(panel.title, wrap=True)
        ax.set_xlabel(panel.x_label)
        drawers[type(panel)](panel, ax, theme)
    return made


def height(panel: Panel) -> float:
    """Return the height of a panel in inches, with title, axis and legend."""
    match panel:
        case BarPanel():
            return 1.3 + ROW * max(len(panel.bars), 0.55 * len(panel.parts))
        case GridPanel():
            return 1.8 + ROW * len(panel.rows)
    return 4.6


def _finish(ax: "Axes", grid: Literal["x", "y", "both"], x: float | None = None, y: float | None = None) -> None:
    ax.margins(x=x, y=y)
    ax.grid(axis=grid)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _lines(panel: LinePanel, ax: "Axes", theme: Theme) -> None:
    measured = [series for series in panel.series if series.low and not series.level]
    apart = min(DODGE * len(panel.ticks), SPREAD / max(1, len(measured)))
    for i, series in enumerate(panel.series):
        shift = apart * (measured.index(series) - (len(measured) - 1) / 2) if series in measured else 0
        x = [x + shift for x in series.x]
        colour = theme.series[(i if series.colour is None else series.colour) % len(theme.series)]
        marker = "" if series.level else MARKERS[i % len(MARKERS)]
        ax.plot(x, series.y, series.line, marker=marker, color=colour, label=series.label)
        if series.low and series.level:
            ax.fill_between(x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
        elif series.low:
            interval = [np.subtract(series.y, series.low), np.subtract(series.high, series.y)]
            ax.errorbar(x, series.y, interval, fmt="none", ecolor=colour, elinewidth=1.4)
    ax.set_xticks(list(panel.ticks), list(panel.ticks.values()))
    ax.set_ylabel(panel.y_label)
    ax.set_ylim(bottom=0)
    _finish(ax, "y", y=0.1)


def _bars(panel: BarPanel, ax: "Axes", theme: Theme) -> None:
    places = [i + (i // panel.group * 0.6 if panel.group else 0) for i in range(len(panel.bars))]
    lengths = np.array(list(panel.parts.values()))
    bars = [
        ax.barh(places, length, left=end - length, color=theme.series[i % len(theme.series)], label=name)
        for i, (name, length, end) in enumerate(zip(panel.parts, lengths, lengths.cumsum(0), strict=True))
    ]
    ax.bar_label(bars[-1], [f"{total:.3g}" for total in lengths.sum(0)], padding=4)
    ax.set_yticks(places, panel.bars)
    ax.set_ylim(max(places[-1] + 0.7, 0.3 * len(panel.parts)), -0.7)  # a legend may be higher than the bars
    ax.set_axisbelow(True)
    _finish(ax, "x", x=0.1)


def _grid(panel: GridPanel, ax: "Axes", theme: Theme) -> None:
    """Draw numbers on colours between the background and the first series."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("grid", [theme.paper, theme.series[0]])
    values = np.array(panel.values, float)
    edges = (np.arange(n + 1) - 0.5 for n in reversed(values.shape))
    ax.pcolormesh(*edges, values, cmap=colours, vmin=0, vmax=panel.high, edgecolors=theme.paper)
    ax.invert_yaxis()
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            ink = max("#000000", "#ffffff", key=partial(contrast, colours(value / panel.high)))
            ax.text(j, i, panel.form.format(value), ha="center", va="center", color=ink)
    ax.set_xticks(range(len(panel.columns)), panel.columns)
    ax.set_yticks(range(len(panel.rows)), panel.rows)
    ax.set_ylabel(panel.y_label)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def contrast(a: Any, b: Any) -> float:
    """Return the contrast of two colours, from 1 to 21. Source: WCAG 2.2, relative luminance."""
    from matplotlib.colors import to_rgb

    colours = np.array([to_rgb(a), to_rgb(b)])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ (0.2126, 0.7152, 0.0722))
    return (high + 0.05) / (low + 0.05)
