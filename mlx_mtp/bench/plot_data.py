"""What a result's pictures show, as plain numbers: panels of lines, bars, ranges and grids, in the order drawn."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .panels import DASH_DOT, DASHED, DOTTED, SOLID, Bars, Found, Grid, Lines, Panel, Series, subject
from .plot_model import documents, model_curve, model_cycles
from .rows import Row, categories, rows, settings
from .timing import Measured, measured, ratio

PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"


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


# decode


def speed(found: Found) -> Iterator[Lines]:
    """tok/s against k: a line per setting, with mlx-lm and adaptive drafting as levels where there is one setting."""
    series: list[Series] = []
    sets = settings(found)
    for i, setting in enumerate(sets):
        made = {row.contender: row for row in rows(found, setting) if row.speed}
        fixed = {float(k): row.speed for name, row in made.items() if (k := _drafts(name)) is not None}
        colour = i if len(sets) > 1 else None
        label = _setting(setting) if len(sets) > 1 else "k drafts in every cycle"
        series.append(_series(label, dict(sorted(fixed.items())), colour=colour))
        for name, line in ((ADAPTIVE, DASH_DOT), (MLX_LM, DOTTED)):
            if name in made:
                label = name if len(sets) == 1 else f"{name}, {_setting(setting)}"
                series.append(_level(label, made[name], list(fixed), line, colour))
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


def _series(
    label: str, values: Mapping[float, Measured | None], *, line: str = SOLID, colour: int | None = None
) -> Series:
    kept = {x: m for x, m in values.items() if m is not None}
    y, low, high = ([getattr(m, name) for m in kept.values()] for name in ("median", "low", "high"))
    return Series(_honest(label, kept.values()), list(kept), y, low, high, line=line, colour=colour)


def _honest(label: str, values: Iterable[Measured]) -> str:
    """A label that says where a spread is too wide."""
    return label if all(m.conclusive for m in values) else f"{label} (inconclusive)"


def _level(label: str, row: Row, x: list[float], line: str, colour: int | None) -> Series:
    assert row.speed
    y, low, high = ([v, v] for v in (row.speed.median, row.speed.low, row.speed.high))
    return Series(_honest(label, [row.speed]), [min(x), max(x)], y, low, high, level=True, line=line, colour=colour)


def acceptance(found: Found) -> Iterator[Grid]:
    """The share of drafts kept, by depth and kind of prompt, of the most drafts; one grid per setting."""
    for setting in settings(found):
        made = {kind: _deepest(rows(found, setting, kind)) for kind in categories(found)}
        depths = max((len(row.rates) for row in made.values() if row), default=0)
        if depths:
            where = f", {_setting(setting)}" if len(settings(found)) > 1 else ""
            table = [[*(row.rates if row else []), *[None] * depths][:depths] for row in made.values()]
            values = [[None if rate is None else 100 * rate for rate in line] for line in table]
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
    """T(M)/T(1) of the whole model at each context, and of its parts; stock MLX is dashed where both are."""
    whole = [c for c in found["curves"] if c["name"] == "whole"]
    parts = [c for c in found["curves"] if c["name"] != "whole"]
    for curves, what in ((whole, "the whole model"), (parts, "its parts")):
        series = [s for i, curve in enumerate(curves) for s in _curve(curve, i)]
        ticks = {x: f"{x:.0f}" for x in sorted({x for s in series for x in s.x})}
        if series:
            title = f"cost of a verify, {what}: {subject(found)}"
            yield Lines(title, "rows verified, M", "T(M) / T(1)", series, ticks)


def _curve(curve: Found, colour: int) -> Iterator[Series]:
    name = curve["name"] if curve["context"] is None else f"{curve['name']} at {curve['context']}"
    both = len(curve["seconds"]) > 1
    for side, seconds in curve["seconds"].items():
        values = {float(m): ratio(times, seconds["1"]) for m, times in seconds.items()}
        yield _series(
            f"{name}, {side}" if both else name,
            values,
            line=DASHED if both and side == "stock" else SOLID,
            colour=colour,
        )


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
            ("stock MLX's time over ours", "x")
            if timed
            else ("largest buffer, bytes requested over distinct, emulated", "x")
        )
        most = max(v for line in values for v in line if v is not None)
        where = subject(found) if timed else "counts, no times"
        axes = ("rows, M", "kernel", names, [str(m) for m in sizes])
        yield Grid(f"{title}: {where}", *axes, values, "{:.2f}", 0, max(2.0, most), unit)


def _kernel(line: Found) -> float | None:
    if "seconds" not in line:
        return line["reread"]
    return None if line["wrong"] else ratio(line["seconds"]["stock"], line["seconds"]["ours"]).median
