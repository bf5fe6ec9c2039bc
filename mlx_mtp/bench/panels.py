"""Convert results to the contents of their pictures, as plain numbers: panels of lines, bars and grids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .decode_tables import Setting, categories, rows, settings
from .result import curve_title
from .roofline.phases import CYCLE, DRAFT, OURS, SHOWN_OVERLAP, STOCK, VERIFY, shown_times
from .roofline.phases import PLAIN as PLAIN_STEP
from .timing import Measured, measured, ratio

Result = dict[str, Any]
PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"
FLOOR = 2  # index of the theme's colour for floors, in all pictures
COLOURS = {OURS: 0, STOCK: 1}


@dataclass(frozen=True)
class Series:
    """Points of one line. low, high: the interval of each point, or empty. level: a line across all x.

    line: a line style of matplotlib. colour: index of a theme's colour; None: the next one.
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
    """One picture as plain numbers; subclasses add its contents to the title and the label of the x-axis."""

    title: str
    x_label: str


@dataclass(frozen=True)
class LinePanel(Panel):
    """y against x, from zero; `ticks` names positions on the x-axis."""

    y_label: str
    series: list[Series]
    ticks: dict[float, str]


@dataclass(frozen=True)
class BarPanel(Panel):
    """Stacked horizontal bars with a length per part. group: number of adjacent bars in a group; 0: all."""

    bars: list[str]
    parts: dict[str, list[float]]
    group: int = 0


@dataclass(frozen=True)
class GridPanel(Panel):
    """A number with a unit per row and column, or None; `form` formats it, and colours span 0 to `high`."""

    y_label: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    form: str
    high: float
    unit: str


def panels(*results: Result) -> list[Panel]:
    """Return the panels of results, in their order; one for all profiles is last. `bench parallel` has none."""
    makers = {"decode": (speed, acceptance), "verify": (verify_curves,), "kernels": (kernel_grid,)}
    makers["model"] = model_curve, model_cycles
    profiles = [found for found in results if found["bench"] == "profile"]
    made = [panel for found in results for maker in makers.get(found["bench"], ()) for panel in maker(found)]
    return [*made, phase_bars(profiles)] if profiles else made


def subject(found: Result) -> str:
    """Return "model, chip" of a result, for titles; of `bench model` the chip that it predicts for."""
    chip = found.get("chip", {}).get("name") or found["environment"]["chip"]
    label = found["model"].get("synthetic")
    return f"{found['model']['name']}{f' (synthetic: {label})' if label else ''}, {chip}"


def speed(found: Result) -> Iterator[Panel]:
    """Yield `bench decode`'s tok/s against k: a line per setting, mlx-lm and adaptive drafting as levels."""
    series: list[Series] = []
    sets = settings(found)
    for i, setting in enumerate(sets):
        several, name = len(sets) > 1, _setting(setting)
        colour = i if several else None
        made = {row.contender: row.speed for row in rows(found, setting) if row.speed}
        fixed = sorted((float(k), speed) for loop, speed in made.items() if (k := _drafts(loop)) is not None)
        series.append(_series(name if several else "k drafts in every cycle", fixed, colour=colour))
        for loop, line in ((ADAPTIVE, "-."), (MLX_LM, ":")):
            if loop in made and fixed:
                level = [(fixed[0][0], made[loop]), (fixed[-1][0], made[loop])]
                label = f"{loop}, {name}" if several else loop
                series.append(_series(label, level, level=True, line=line, colour=colour))
    largest = int(max((x for s in series for x in s.x), default=0))
    ticks = {float(k): "plain" if k == 0 else str(k) for k in range(largest + 1)}
    title = f"decoding speed: {subject(found)}"
    yield LinePanel(title, "drafts per cycle, k", "tokens/s, all prompts", series, ticks)


def _drafts(contender: str) -> int | None:
    """Return k from a loop's name; None if it is not fixed."""
    return 0 if contender == PLAIN else int(contender[2:]) if contender.startswith("k=") else None


def _setting(setting: Setting) -> str:
    context, bits, mtp_bits = setting
    shown = f"{context} tokens" if context else "short"
    return shown + (f", KV {bits} bits" if bits else "") + (f", heads' KV {mtp_bits} bits" if mtp_bits else "")


def _series(label: str, points: Sequence[tuple[float, Measured]], **drawn: Any) -> Series:
    """Return (x, value) points as a Series with intervals; the label marks a spread that is too wide."""
    y, low, high = ([getattr(m, name) for _, m in points] for name in ("median", "low", "high"))
    marked = label if all(m.conclusive for _, m in points) else f"{label} (inconclusive)"
    return Series(marked, [x for x, _ in points], y, low, high, **drawn)


def acceptance(found: Result) -> Iterator[Panel]:
    """Yield a grid per setting: the share of accepted drafts by depth and kind of prompt.

    The share is that of the loop with the largest fixed number of drafts above 0; a setting without such a loop has
    no grid.
    """
    for setting in (sets := settings(found)):
        made: dict[str, Sequence[float | None]] = {}
        for kind in categories(found):
            most = max(rows(found, setting, kind), key=lambda row: _drafts(row.contender) or 0, default=None)
            made[kind] = most.rates if most and _drafts(most.contender) else []
        if depths := max(map(len, made.values()), default=0):
            where = f", {_setting(setting)}" if len(sets) > 1 else ""
            padded = [[*rates, *[None] * (depths - len(rates))] for rates in made.values()]
            yield GridPanel(
                f"drafts accepted, %{where}: {subject(found)}",
                *("depth of the draft", "kind of prompt", list(made), [str(d + 1) for d in range(depths)]),
                *([[None if rate is None else 100 * rate for rate in rates] for rates in padded], "{:.0f}", 100),
                "% of drafts accepted",
            )


def verify_curves(found: Result) -> Iterator[Panel]:
    """Yield T(M)/T(1) of the whole model at each context, and of its parts; stock MLX is dashed if both are shown."""
    for whole, what in ((True, "the whole model"), (False, "its parts")):
        series = []
        for colour, curve in enumerate(c for c in found["curves"] if (c["name"] == "whole") == whole):
            name, both = curve_title(curve), len(curve["seconds"]) > 1
            for side, seconds in curve["seconds"].items():
                points = [(float(m), ratio(times, seconds["1"])) for m, times in seconds.items()]
                line = "--" if both and side == "stock" else "-"
                series.append(_series(f"{name}, {side}" if both else name, points, line=line, colour=colour))
        if series:
            yield verify_panel(f"cost of a verify, {what}: {subject(found)}", series)


def verify_panel(title: str, series: list[Series]) -> LinePanel:
    """Return a panel of verify costs relative to a plain step, with a tick at every M of a line."""
    ticks = {x: f"{x:.0f}" for x in sorted({x for s in series for x in s.x})}
    return LinePanel(title, "rows verified, M", "T(M) / T(1)", series, ticks)


def phase_bars(results: Sequence[Result]) -> BarPanel:
    """Return milliseconds of a cycle by phase, without the prefill, a bar per profile; unexplained time is a part."""
    bars = [f"{found['model']['name']}, k={found['options'].get('k', '?')}" for found in results]
    parts: dict[str, list[float]] = {}
    for found in results:
        for name, seconds in (found["seconds"] | {"unexplained": found["unexplained"]}).items():
            parts.setdefault(name, []).append(1e3 * measured(seconds).median / max(1, found["cycles"]))
    shown = {name: ms for name, ms in parts.items() if name != "prefill" and max(ms) > 0}
    return BarPanel(f"where a cycle's time goes: {subject(results[0])}", "ms of a cycle", bars, shown)


def kernel_grid(found: Result) -> Iterator[Panel]:
    """Yield a grid of stock MLX's time over ours by case and rows; of an emulated result, of memory traffic."""
    made: dict[tuple[str, int], float | None]
    if found["options"]["emulate"]:
        title = "largest buffer, bytes requested over distinct, emulated: counts, not times"
        made = {(line["op"], line["rows"]): line["reread"] for line in found["found"]}
    else:
        title = f"stock MLX's time over ours: {subject(found)}"
        right = [line for line in found["found"] if not line["wrong"]]
        made = dict.fromkeys((line["name"], line["rows"]) for line in found["found"])
        made |= {(k["name"], k["rows"]): ratio(k["seconds"]["stock"], k["seconds"]["ours"]).median for k in right}
    if made:
        yield _grid_of(title, made)


def _grid_of(title: str, made: dict[tuple[str, int], Any]) -> GridPanel:
    """Arrange ratios by (case or op, rows) as a grid, None if wrong or missing; its colours span at least 0 to 2."""
    names, sizes = list(dict.fromkeys(name for name, _ in made)), sorted({m for _, m in made})
    values = [[made.get((name, m)) for m in sizes] for name in names]
    axes = "rows, M", "kernel", names, [str(m) for m in sizes]
    return GridPanel(title, *axes, values, "{:.2f}", max(2.0, *(value or 0.0 for value in made.values())), "x")


def model_curve(found: Result) -> Iterator[Panel]:
    """Yield a verify's cost T(M)/T(1), of a `bench model` result: floor at each overlap, predicted, measured."""
    series = []
    for overlap in dict.fromkeys(line["overlap"] for line in found["floors"]):
        points = {f["rows"]: f["bytes"]["total"] for f in _passes(found["floors"]) if f["overlap"] == overlap}
        line = "-" if overlap == SHOWN_OVERLAP else "--"
        series.append(_ratios(f"floor, {overlap} routing", points, FLOOR, line))
    if len({tuple(s.y) for s in series}) == 1:
        series = [Series("floor", series[0].x, series[0].y, colour=FLOOR)]
    for kind, colours in (("predicted", COLOURS), ("measured", {})):
        lines = [line for line in _passes(found.get(kind, [])) if line.get("overlap", SHOWN_OVERLAP) == SHOWN_OVERLAP]
        for side in dict.fromkeys(line["side"] for line in lines):
            points = {line["rows"]: line["seconds"] for line in lines if line["side"] == side}
            if 1 in points and len(points) > 1:
                series.append(_ratios(f"{side}, {kind}", points, colours.get(side)))
    yield verify_panel(f"cost of a verify: {subject(found)}, {found['options']['context']} tokens of context", series)


def _passes(lines: Sequence[Result]) -> list[Result]:
    return [line for line in lines if line["phase"] in (PLAIN_STEP, VERIFY)]


def _ratios(label: str, points: dict[int, float], colour: int | None, line: str = "-") -> Series:
    made = sorted(points)
    return Series(label, [float(m) for m in made], [points[m] / points[1] for m in made], line=line, colour=colour)


def model_cycles(found: Result) -> Iterator[Panel]:
    """Yield the ms of draft and verify of a cycle, per number of drafts, and of a plain step.

    Bars are the floor and predictions for stock MLX and ours; nothing without predictions.
    """
    if "predicted" not in found:
        return
    bandwidth, lines = found["chip"]["bandwidth"], found["floors"]
    floors = [line | {"side": "floor", "seconds": line["bytes"]["total"] / bandwidth} for line in lines]
    times = shown_times([*floors, *found["predicted"]])
    sides = "floor", STOCK, OURS
    bars = [(side, m) for m in [1, *sorted({m for _, phase, m in times if phase == CYCLE})] for side in sides]
    phases = PLAIN_STEP, DRAFT, VERIFY
    parts = {phase: [1e3 * times.get((side, phase, m), 0) for side, m in bars] for phase in phases}
    names = [f"{'plain' if m == 1 else f'k={m - 1}'}, {side}" for side, m in bars]
    title = f"predicted cycles: {subject(found)}, {found['options']['context']} tokens of context"
    yield BarPanel(title, "ms of a plain step, or of a cycle", names, parts, group=len(sides))
