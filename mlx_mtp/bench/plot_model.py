"""Turn a result of `bench model` into pictures: floors beside what is predicted, measured, and published."""

from collections.abc import Iterator, Sequence

from .panels import BarPanel, Found, Panel, RangePanel, Series, subject, verify_panel
from .roofline.floor import CYCLE, DRAFT, PLAIN, VERIFY
from .roofline.predict import OURS, SHOWN_OVERLAP, STOCK, shown_times

FLOOR = 2  # a theme's colours of what pictures of the model show, whatever else they show
COLOURS = {OURS: 0, STOCK: 1}


def model_curve(found: Found) -> Iterator[Panel]:
    """Draw T(M)/T(1) of the floor at each overlap, of what is predicted, and of what was measured."""
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


def _passes(lines: Sequence[Found]) -> list[Found]:
    return [line for line in lines if line["phase"] in (PLAIN, VERIFY)]


def _ratios(label: str, points: dict[int, float], colour: int | None, line: str = "-") -> Series:
    rows = sorted(points)
    return Series(label, [float(m) for m in rows], [points[m] / points[1] for m in rows], line=line, colour=colour)


def model_cycles(found: Found) -> Iterator[Panel]:
    """Draw draft and verify of a cycle for each number of drafts, behind a plain step: floor, stock MLX and ours."""
    if "predicted" not in found:
        return
    bandwidth, lines = found["chip"]["bandwidth"], found["floors"]
    floors = [line | {"side": "floor", "seconds": line["bytes"]["total"] / bandwidth} for line in lines]
    times = shown_times([*floors, *found["predicted"]])
    rows = [1, *sorted({m for _, phase, m in times if phase == CYCLE})]
    sides = "floor", STOCK, OURS
    bars = [(side, m) for m in rows for side in sides]
    parts = {phase: [1e3 * times.get((side, phase, m), 0) for side, m in bars] for phase in (PLAIN, DRAFT, VERIFY)}
    names = [f"{'plain' if m == 1 else f'k={m - 1}'}, {side}" for side, m in bars]
    title = f"predicted cycles: {subject(found)}, {found['options']['context']} tokens of context"
    yield BarPanel(title, "ms of a plain step, or of a cycle", names, parts, group=len(sides))


def documents(found: Found, machine: str = "Mac Studio") -> Iterator[Panel]:
    """Draw the published engine's cycles over their floors, from all experts shared to independent routing."""
    names, spans, marks = [], [], []
    lines = [line for line in found["documents"] if line["machine"] == machine]
    first = {(line["weights"], line["context"]): line for line in reversed(lines)}
    for line, kind in ((line, kind) for line in lines for kind in ("plain", "cycle")):
        if kind == "plain" and line is not first[line["weights"], line["context"]]:
            continue  # the same for every k of an experiment
        step = f"k={line['drafts']}" if kind == "cycle" else kind
        names.append(f"{line['weights']} {line['context'] // 1024}k {step}")
        floors = line["cycle_floor"] if kind == "cycle" else {SHOWN_OVERLAP: line["plain_floor"]}
        spans.append((1e3 * min(floors.values()), 1e3 * max(floors.values())))
        values = line[kind], floors[SHOWN_OVERLAP], line["predicted"].get(OURS, {}).get(kind)
        marks.append([None if value is None else 1e3 * value for value in values])
    labels = "published", "floor, routed as published", "ours, predicted, 4 bits"
    if names:
        yield RangePanel(
            f"another engine's {found['model']['name']} on a {machine}, and its byte floor",
            *("ms of a plain step, or of a cycle", names, spans, "floor: shared to independent routing"),
            dict(zip(labels, map(list, zip(*marks, strict=True)), strict=True)),
            [3, FLOOR, 0],
        )
