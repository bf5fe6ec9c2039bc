"""Turn a result into what its pictures show: panels of lines, bars, ranges and grids, in the order drawn."""

from collections.abc import Iterator, Sequence
from typing import Any

from .panels import BarPanel, Found, GridPanel, LinePanel, Panel, Series, subject, verify_panel
from .plot_model import documents, model_curve, model_cycles
from .rows import Row, Setting, categories, rows, settings
from .timing import Measured, measured, ratio

PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"


def panels(found: Found) -> list[Panel]:
    """Give the pictures of one result, of whatever command; empty where there is nothing to draw."""
    return panels_of([found])


def panels_of(results: Sequence[Found]) -> list[Panel]:
    """Give those of several results: profiles side by side in one panel, else one result after the other."""
    makers = {
        "decode": (speed, acceptance),
        "verify": (verify_curves,),
        "kernels": (kernel_grid,),
        "model": (model_curve, model_cycles, documents),
        "profile": (),
    }
    profiles = [found for found in results if found["bench"] == "profile"]
    made = [panel for found in results for maker in makers[found["bench"]] for panel in maker(found)]
    return [*made, *(phase_bars(profiles) if profiles else ())]


def speed(found: Found) -> Iterator[Panel]:
    """Draw `bench decode`'s tok/s against k: a line per setting, mlx-lm and adaptive drafting as levels."""
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
    most = int(max((x for s in series for x in s.x), default=0))
    ticks = {float(k): "plain" if k == 0 else str(k) for k in range(most + 1)}
    title = f"decoding speed: {subject(found)}"
    yield LinePanel(title, "drafts per cycle, k", "tokens/s, all prompts", series, ticks)


def _drafts(contender: str) -> int | None:
    """Read k from a loop's name; None where it is not fixed."""
    return 0 if contender == PLAIN else int(contender[2:]) if contender.startswith("k=") else None


def _setting(setting: Setting) -> str:
    context, bits, mtp_bits = setting
    shown = f"{context} tokens" if context else "short"
    return shown + (f", KV {bits} bits" if bits else "") + (f", heads' KV {mtp_bits} bits" if mtp_bits else "")


def _series(label: str, points: Sequence[tuple[float, Measured]], **drawn: Any) -> Series:
    """Draw points with their intervals under a label that says where a spread is too wide."""
    y, low, high = ([getattr(m, name) for _, m in points] for name in ("median", "low", "high"))
    honest = label if all(m.conclusive for _, m in points) else f"{label} (inconclusive)"
    return Series(honest, [x for x, _ in points], y, low, high, **drawn)


def acceptance(found: Found) -> Iterator[Panel]:
    """Draw the share of drafts kept, by depth and kind of prompt, of the most drafts; one grid per setting."""
    for setting in (sets := settings(found)):
        made = {kind: _deepest(rows(found, setting, kind)) for kind in categories(found)}
        if depths := max(map(len, made.values()), default=0):
            where = f", {_setting(setting)}" if len(sets) > 1 else ""
            padded = [[*rates, *[None] * (depths - len(rates))] for rates in made.values()]
            yield GridPanel(
                f"drafts accepted, %{where}: {subject(found)}",
                *("depth of the draft", "kind of prompt", list(made), [str(d + 1) for d in range(depths)]),
                *([[None if rate is None else 100 * rate for rate in rates] for rates in padded], "{:.0f}", 100),
                "% of drafts accepted",
            )


def _deepest(made: Sequence[Row]) -> Sequence[float | None]:
    """Take the rates of the row with the most drafts of a fixed number."""
    best = max(made, key=lambda row: _drafts(row.contender) or 0, default=None)
    return best.rates if best and _drafts(best.contender) else []


def verify_curves(found: Found) -> Iterator[Panel]:
    """Draw T(M)/T(1) of the whole model at each context, and of its parts; stock MLX is dashed where both are."""
    for whole, what in ((True, "the whole model"), (False, "its parts")):
        curves = [c for c in found["curves"] if (c["name"] == "whole") == whole]
        if series := [s for i, curve in enumerate(curves) for s in _curve(curve, i)]:
            yield verify_panel(f"cost of a verify, {what}: {subject(found)}", series)


def _curve(curve: Found, colour: int) -> Iterator[Series]:
    name = curve["name"] if curve["context"] is None else f"{curve['name']} at {curve['context']}"
    both = len(curve["seconds"]) > 1
    for side, seconds in curve["seconds"].items():
        points = [(float(m), ratio(times, seconds["1"])) for m, times in seconds.items()]
        line = "--" if both and side == "stock" else "-"
        yield _series(f"{name}, {side}" if both else name, points, line=line, colour=colour)


def phase_bars(results: Sequence[Found]) -> Iterator[Panel]:
    """Draw milliseconds of a cycle by phase, a bar per profile; what no phase explains is a part of its own."""
    bars = [f"{found['model']['name']}, k={found['options'].get('k', '?')}" for found in results]
    cycles = [_phases(found) for found in results]
    names = dict.fromkeys(name for phases in cycles for name in phases)
    parts = {name: [phases.get(name, 0.0) for phases in cycles] for name in names}
    shown = {name: values for name, values in parts.items() if max(values) > 0}
    yield BarPanel(f"where a cycle's time goes: {subject(results[0])}", "ms of a cycle", bars, shown)


def _phases(found: Found) -> dict[str, float]:
    phases = {name: times for name, times in found["seconds"].items() if name != "prefill"}
    phases["unexplained"] = found["unexplained"]
    return {name: 1e3 * measured(times).median / max(1, found["cycles"]) for name, times in phases.items()}


def kernel_grid(found: Found) -> Iterator[Panel]:
    """Draw stock MLX's time over ours, by case and rows; where emulated, how often the largest buffer is read."""
    if not (lines := found["found"]):
        return
    name, title, where = "op", "largest buffer, bytes requested over distinct, emulated", "counts, no times"
    if "seconds" in lines[0]:
        name, title, where = "name", "stock MLX's time over ours", subject(found)
    names, sizes = list(dict.fromkeys(line[name] for line in lines)), sorted({line["rows"] for line in lines})
    made = {(line[name], line["rows"]): _kernel(line) for line in lines}
    values = [[made.get((name, m)) for m in sizes] for name in names]
    high = max([2.0, *(v for v in made.values() if v is not None)])
    axes = "rows, M", "kernel", names, [str(m) for m in sizes]
    yield GridPanel(f"{title}: {where}", *axes, values, "{:.2f}", high, "x")


def _kernel(line: Found) -> float | None:
    if "seconds" not in line:
        return line["reread"]
    return None if line["wrong"] else ratio(line["seconds"]["stock"], line["seconds"]["ours"]).median
