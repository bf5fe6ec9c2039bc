"""What a result's pictures show, as plain numbers: panels of lines, bars, ranges and grids, in the order drawn."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rows import Row, categories, rows, settings
from .timing import Measured, measured, ratio

Found = dict[str, Any]
PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"
FLOOR = 2  # a theme's colours of what pictures of the model show, whatever else they show
COLOURS = {"ours": 0, "stock MLX": 1}


@dataclass(frozen=True)
class Series:
    """Points of one line. low, high: the interval of each; empty where there is none. level: a line across all x.

    colour: the number of one of a theme's; None: the next.
    """

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    dashed: bool = False
    level: bool = False
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


def panels(found: Found) -> list[Panel]:
    """The pictures of one result, of whatever command; empty where there is nothing to draw."""
    makers = {
        "decode": (speed, acceptance),
        "verify": (verify_curves,),
        "profile": (lambda found: phase_bars([found]),),
        "kernels": (kernel_grid,),
        "model": (model_curve, model_cycles, documents),
    }
    return [panel for maker in makers[found["bench"]] for panel in maker(found)]


def panels_of(results: Sequence[Found]) -> list[Panel]:
    """Of several results: profiles side by side in one panel, else one result after the other."""
    profiles = [found for found in results if found["bench"] == "profile"]
    others = [panel for found in results if found["bench"] != "profile" for panel in panels(found)]
    return others + (list(phase_bars(profiles)) if profiles else [])


def subject(found: Found) -> str:
    """What was measured, and where, as titles say it."""
    chip = found.get("chip", {}).get("name") or found["environment"]["chip"]
    label = found["model"].get("synthetic")
    return f"{found['model']['name']}{f' ({label})' if label else ''}, {chip}"


# decode


def speed(found: Found) -> Iterator[Lines]:
    """tok/s against k: a line per setting, with mlx-lm and adaptive drafting as levels where there is one setting."""
    series: list[Series] = []
    sets = settings(found)
    for setting in sets:
        made = {row.contender: row for row in rows(found, setting) if row.speed}
        fixed = {_drafts(name): row for name, row in made.items() if _drafts(name) is not None}
        name = _setting(setting) if len(sets) > 1 else "k drafts in every cycle"
        series.append(_series(name, {float(k or 0): row.speed for k, row in sorted(fixed.items())}))
        for level in (ADAPTIVE, MLX_LM):
            if level in made:
                row = made[level]
                label = level if len(sets) == 1 else f"{level}, {_setting(setting)}"
                series.append(_level(label, row, [s for s in series if not s.level][-1].x))
    most = int(max((x for s in series for x in s.x), default=0))
    ticks = {float(k): "plain" if k == 0 else str(k) for k in range(most + 1)}
    title = f"decoding speed: {subject(found)}"
    yield Lines(title, "drafts per cycle, k", "tokens/s, all prompts", series, ticks)


def _drafts(contender: str) -> int | None:
    if contender == PLAIN:
        return 0
    return int(contender[2:]) if contender.startswith("k=") else None


def _setting(setting: tuple[int, int | None, int | None]) -> str:
    context, bits, head_bits = setting
    kinds = [f"{context} tokens" if context else "short", f"KV {bits} bits" if bits else ""]
    return ", ".join(filter(None, [*kinds, f"heads' KV {head_bits} bits" if head_bits else ""]))


def _series(label: str, values: dict[float, Measured | None], *, dashed: bool = False) -> Series:
    kept = {x: m for x, m in values.items() if m is not None}
    label = _honest(label, kept.values())
    lists = [[m.median for m in kept.values()], [m.low for m in kept.values()], [m.high for m in kept.values()]]
    return Series(label, list(kept), *lists, dashed=dashed)


def _honest(label: str, values: Iterable[Measured]) -> str:
    """A label that says where a spread is too wide."""
    return label if all(m.conclusive for m in values) else f"{label} (inconclusive)"


def _level(label: str, row: Row, x: list[float]) -> Series:
    assert row.speed
    label = _honest(label, [row.speed])
    return Series(label, [x[0], x[-1]], [row.speed.median] * 2, [row.speed.low] * 2, [row.speed.high] * 2, level=True)


def acceptance(found: Found) -> Iterator[Grid]:
    """The share of drafts kept, by depth and kind of prompt, of the most drafts; one grid per setting."""
    for setting in settings(found):
        made = {kind: _deepest(rows(found, setting, kind)) for kind in categories(found)}
        depths = max((len(row.rates) for row in made.values() if row), default=0)
        if depths:
            where = f", {_setting(setting)}" if len(settings(found)) > 1 else ""
            table = [[(row.rates if row else [])[d : d + 1] for d in range(depths)] for row in made.values()]
            values = [[100 * cell[0] if cell else None for cell in line] for line in table]
            yield Grid(
                f"drafts accepted, %{where}: {subject(found)}",
                *("depth of the draft", "kind of prompt", list(made), [str(d + 1) for d in range(depths)]),
                *(values, "{:.0f}", 0, 100, "% of drafts accepted"),
            )


def _deepest(made: Sequence[Row]) -> Row | None:
    """The row with the most drafts of a fixed number."""
    fixed = [row for row in made if (_drafts(row.contender) or 0) > 0]
    return max(fixed, key=lambda row: _drafts(row.contender) or 0, default=None)


# verify


def verify_curves(found: Found) -> Iterator[Lines]:
    """T(M)/T(1) of the whole model at each context, and of its parts; ours solid, stock dashed where both are."""
    whole = [c for c in found["curves"] if c["name"] == "whole"]
    parts = [c for c in found["curves"] if c["name"] != "whole"]
    for curves, what in ((whole, "the whole model"), (parts, "its parts")):
        series = [s for curve in curves for s in _curve(curve)]
        ticks = {x: f"{x:.0f}" for x in sorted({x for s in series for x in s.x})}
        if series:
            title = f"cost of a verify, {what}: {subject(found)}"
            yield Lines(title, "rows verified, M", "T(M) / T(1)", series, ticks)


def _curve(curve: Found) -> Iterator[Series]:
    name = curve["name"] if curve["context"] is None else f"{curve['name']} at {curve['context']}"
    both = len(curve["seconds"]) > 1
    for side, seconds in curve["seconds"].items():
        values = {float(m): ratio(times, seconds["1"]) for m, times in seconds.items()}
        yield _series(f"{name}, {side}" if both else name, values, dashed=both and side == "stock")


# profile


def phase_bars(results: Sequence[Found]) -> Iterator[Bars]:
    """Milliseconds of a cycle by phase, a bar per profile; what no phase explains is a part of its own."""
    bars, parts = [], dict[str, list[float]]()
    for i, found in enumerate(results):
        bars.append(f"{found['model']['name']}, k={found['options'].get('k', '?')}")
        for name, ms in _phases(found).items():
            parts.setdefault(name, [0.0] * len(results))[i] = ms
    shown = {name: values for name, values in parts.items() if max(values) > 0}
    yield Bars(f"where a cycle's time goes: {subject(results[0])}", "ms of a cycle", bars, shown)


def _phases(found: Found) -> dict[str, float]:
    cycles = max(1, found["cycles"])
    values = {name: measured(times).median for name, times in found["seconds"].items() if name != "prefill"}
    return {
        name: 1e3 * s / cycles
        for name, s in (values | {"unexplained": measured(found["unexplained"]).median}).items()
    }


# kernels


def kernel_grid(found: Found) -> Iterator[Grid]:
    """On a GPU stock MLX's time over ours, by case and rows; emulated, how often the largest buffer is read."""
    lines = found["found"]
    timed = bool(lines) and "seconds" in lines[0]
    names = list(dict.fromkeys(line["name" if timed else "op"] for line in lines))
    sizes = sorted({line["rows"] for line in lines})
    made = {(line["name" if timed else "op"], line["rows"]): _kernel(line) for line in lines}
    values = [[made.get((name, m)) for m in sizes] for name in names]
    if lines:
        title, unit = (
            ("stock MLX's time over ours", "x") if timed else ("bytes requested over distinct, emulated", "x")
        )
        most = max(v for line in values for v in line if v is not None)
        where = subject(found) if timed else "counts"
        axes = ("rows, M", "kernel", names, [str(m) for m in sizes])
        yield Grid(f"{title}: {where}", *axes, values, "{:.2f}", 0, max(2.0, most), unit)


def _kernel(line: Found) -> float | None:
    if "seconds" not in line:
        return line["reread"]
    return None if line["wrong"] else ratio(line["seconds"]["stock"], line["seconds"]["ours"]).median


# model


def model_curve(found: Found) -> Iterator[Lines]:
    """T(M)/T(1) of the floor at each overlap, of what is predicted, and of what was measured."""
    from .roofline.predict import SHOWN_OVERLAP

    series = []
    overlaps = dict.fromkeys(line["overlap"] for line in found["floors"])
    for overlap in overlaps:
        points = {
            line["rows"]: line["bytes"]["total"] for line in _passes(found["floors"]) if line["overlap"] == overlap
        }
        series.append(_ratios(f"floor, {overlap} routing", points, FLOOR, dashed=overlap != SHOWN_OVERLAP))
    if len({tuple(s.y) for s in series}) == 1:
        series = [Series("floor", series[0].x, series[0].y, colour=FLOOR)]
    for kind in ("predicted", "measured"):
        lines = [line for line in _passes(found.get(kind, [])) if line.get("overlap", SHOWN_OVERLAP) == SHOWN_OVERLAP]
        for side in dict.fromkeys(line["side"] for line in lines):
            points = {line["rows"]: line["seconds"] for line in lines if line["side"] == side}
            if 1 in points and len(points) > 1:
                series.append(_ratios(f"{side}, {kind}", points, COLOURS.get(side) if kind == "predicted" else None))
    ticks = {x: f"{x:.0f}" for x in sorted({x for s in series for x in s.x})}
    title = f"cost of a verify: {subject(found)}, {found['options']['context']} tokens of context"
    yield Lines(title, "rows verified, M", "T(M) / T(1)", series, ticks)


def _passes(lines: Sequence[Found]) -> list[Found]:
    return [line for line in lines if line["phase"] in ("plain step", "verify")]


def _ratios(label: str, points: dict[int, float], colour: int | None, *, dashed: bool = False) -> Series:
    rows = sorted(points)
    return Series(
        label, [float(m) for m in rows], [points[m] / points[1] for m in rows], dashed=dashed, colour=colour
    )


def model_cycles(found: Found) -> Iterator[Bars]:
    """Draft and verify of a cycle for each number of drafts, behind a plain step: the floor, stock MLX and ours."""
    from .roofline.predict import OURS, SHOWN_OVERLAP, STOCK

    if "predicted" not in found:
        return
    floors = [line for line in found["floors"] if line["overlap"] == SHOWN_OVERLAP]
    times = {"floor": {(f["phase"], f["rows"]): f["bytes"]["total"] / found["chip"]["bandwidth"] for f in floors}}
    for side in (STOCK, OURS):
        lines = [p for p in found["predicted"] if (p["side"], p["overlap"]) == (side, SHOWN_OVERLAP)]
        times[side] = {(p["phase"], p["rows"]): p["seconds"] for p in lines}
    rows = [1, *sorted({m for phase, m in times["floor"] if phase == "cycle"})]
    bars = [(m, side) for m in rows for side in times]
    parts = {
        "plain step": [1e3 * times[side].get(("plain step", m), 0) for m, side in bars],
        "draft": [1e3 * times[side].get(("draft", m), 0) for m, side in bars],
        "verify": [1e3 * times[side].get(("verify", m), 0) * (m > 1) for m, side in bars],
    }
    names = [f"{'plain' if m == 1 else f'k={m - 1}'}, {side}" for m, side in bars]
    title = f"predicted cycles: {subject(found)}, {found['options']['context']} tokens of context"
    yield Bars(title, "ms of a plain step, or of a cycle", names, parts, group=len(times))


def documents(found: Found, machine: str = "Mac Studio") -> Iterator[Ranges]:
    """The published engine's cycles over their floors, from all experts shared to independent routing."""
    from .roofline.predict import OURS, SHOWN_OVERLAP

    lines = [line for line in found["documents"] if line["machine"] == machine]
    if not lines:
        return
    names, spans, marks = [], [], {"published": [], "floor, routed as published": [], "ours, predicted, 4 bits": []}
    for line, k in _with_plain(lines):
        names.append(f"{line['weights']} {line['context'] // 1024}k {'plain' if k == 0 else f'k={k}'}")
        floors = line["cycle_floor"] if k else dict.fromkeys(line["cycle_floor"], line["plain_floor"])
        ms = [1e3 * floor for floor in floors.values()]
        spans.append((min(ms), max(ms)))
        kind = "cycle" if k else "plain"
        values = line[kind], floors[SHOWN_OVERLAP], line["predicted"].get(OURS, {}).get(kind)
        for name, value in zip(marks, values, strict=True):
            marks[name].append(None if value is None else 1e3 * value)
    title = f"another engine's {found['model']['name']} on a {machine}, and its byte floor"
    yield Ranges(
        title,
        "ms of a plain step, or of a cycle",
        names,
        spans,
        "floor: shared to independent routing",
        marks,
        [3, FLOOR, 0],
    )


def _with_plain(lines: Sequence[Found]) -> Iterator[tuple[Found, int]]:
    """Each line with its k, and before the first of an experiment the same with k = 0."""
    seen = set()
    for line in lines:
        work = line["weights"], line["context"]
        if work not in seen:
            seen.add(work)
            yield line, 0
        yield line, line["drafts"]
