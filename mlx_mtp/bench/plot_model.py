"""The pictures of a result of `bench model`: floors beside what is predicted, measured, and published."""

from collections.abc import Iterator, Sequence

from .panels import DASHED, SOLID, Bars, Found, Lines, Ranges, Series, subject
from .roofline.floor import CYCLE, DRAFT, PLAIN, VERIFY
from .roofline.predict import OURS, SHOWN_OVERLAP, STOCK

FLOOR = 2  # a theme's colours of what pictures of the model show, whatever else they show
COLOURS = {OURS: 0, STOCK: 1}


def model_curve(found: Found) -> Iterator[Lines]:
    """T(M)/T(1) of the floor at each overlap, of what is predicted, and of what was measured."""
    series = []
    overlaps = dict.fromkeys(line["overlap"] for line in found["floors"])
    for overlap in overlaps:
        points = {
            line["rows"]: line["bytes"]["total"] for line in _passes(found["floors"]) if line["overlap"] == overlap
        }
        line = SOLID if overlap == SHOWN_OVERLAP else DASHED
        series.append(_ratios(f"floor, {overlap} routing", points, FLOOR, line))
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
    return [line for line in lines if line["phase"] in (PLAIN, VERIFY)]


def _ratios(label: str, points: dict[int, float], colour: int | None, line: str = SOLID) -> Series:
    rows = sorted(points)
    return Series(label, [float(m) for m in rows], [points[m] / points[1] for m in rows], line=line, colour=colour)


def model_cycles(found: Found) -> Iterator[Bars]:
    """Draft and verify of a cycle for each number of drafts, behind a plain step: the floor, stock MLX and ours."""
    if "predicted" not in found:
        return
    floors = [line for line in found["floors"] if line["overlap"] == SHOWN_OVERLAP]
    times = {"floor": {(f["phase"], f["rows"]): f["bytes"]["total"] / found["chip"]["bandwidth"] for f in floors}}
    for side in (STOCK, OURS):
        lines = [p for p in found["predicted"] if (p["side"], p["overlap"]) == (side, SHOWN_OVERLAP)]
        times[side] = {(p["phase"], p["rows"]): p["seconds"] for p in lines}
    rows = [1, *sorted({m for phase, m in times["floor"] if phase == CYCLE})]
    bars = [(m, side) for m in rows for side in times]
    parts = {
        PLAIN: [1e3 * times[side].get((PLAIN, m), 0) for m, side in bars],
        DRAFT: [1e3 * times[side].get((DRAFT, m), 0) for m, side in bars],
        VERIFY: [1e3 * times[side].get((VERIFY, m), 0) for m, side in bars],
    }
    names = [f"{'plain' if m == 1 else f'k={m - 1}'}, {side}" for m, side in bars]
    title = f"predicted cycles: {subject(found)}, {found['options']['context']} tokens of context"
    yield Bars(title, "ms of a plain step, or of a cycle", names, parts, group=len(times))


def documents(found: Found, machine: str = "Mac Studio") -> Iterator[Ranges]:
    """The published engine's cycles over their floors, from all experts shared to independent routing."""
    lines = [line for line in found["documents"] if line["machine"] == machine]
    if not lines:
        return
    names, spans = [], []
    marks: dict[str, list[float | None]] = {
        name: [] for name in ("published", "floor, routed as published", "ours, predicted, 4 bits")
    }
    for line, k in _with_plain(lines):
        names.append(f"{line['weights']} {line['context'] // 1024}k {'plain' if k == 0 else f'k={k}'}")
        floors = {o: floor if k else line["plain_floor"] for o, floor in line["cycle_floor"].items()}
        spans.append((1e3 * min(floors.values()), 1e3 * max(floors.values())))
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
