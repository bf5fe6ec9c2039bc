"""The result of `mlx-mtp bench model` as tables."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from .documents import CHIP, MAC
from .floor import CYCLE, DRAFT, PLAIN, VERIFY
from .launches import KERNELS
from .ops import OVERLAPS
from .predict import OURS, SHOWN_OVERLAP, STOCK

ORDER = {phase: i for i, phase in enumerate((PLAIN, DRAFT, VERIFY, CYCLE))}
Found = dict[str, Any]


def new_table(title: str, *columns: str, left: int = 1, caption: str | None = None) -> Table:
    """Columns from `left` on are numbers."""
    table = Table(title=title, caption=caption)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def tables(found: Found) -> Iterator[Table]:
    """Of a result: floors, the gap to them, what kernels take off, and the documents where they are this model's."""
    yield floor_table(found)
    if "predicted" in found or found.get("measured"):
        yield gap_table(found)
    if "kernels" in found:
        yield kernels_table(found)
    if found["documents"]:
        yield documents_table(found)
        yield same_work_table(found)


def phases_of(found: Found) -> list[tuple[str, int]]:
    """(phase, rows) in the order of tables."""
    made = {(line["phase"], line["rows"]) for line in found["floors"]}
    return sorted(made, key=lambda phase: (ORDER[phase[0]], phase[1]))


def floors_of(found: Found, phase: str, rows: int) -> dict[str, dict[str, float]]:
    """Bytes of a phase by overlap."""
    lines = (line for line in found["floors"] if (line["phase"], line["rows"]) == (phase, rows))
    return {line["overlap"]: line["bytes"] for line in lines}


def label(phase: str, rows: int) -> tuple[str, str]:
    """A phase and its size, as a row begins."""
    sizes = {PLAIN: "", DRAFT: f"k={rows - 1}", VERIFY: f"M={rows}", CYCLE: f"k={rows - 1}"}
    return phase, sizes[phase]


def _each(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Figures of all overlaps, or the one where they are alike."""
    shown = [form.format(x) for x in values]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def floor_table(found: Found) -> Table:
    """Bytes that each phase has to read."""
    plain = floors_of(found, PLAIN, 1)
    unit, size = ("GB", 1e9) if plain[OVERLAPS[0]]["total"] >= 1e8 else ("MB", 1e6)
    columns = "shared", "experts", "LM head", "KV", "state", "all"
    name, context = found["model"]["name"], found["options"]["context"]
    table = new_table(
        f"byte floor: {name}, {context} tokens of context, {unit}",
        *("phase", "", *columns, "over a plain step"),
        left=2,
        caption="experts that the rows of a pass visit: routed independently / as published / all alike",
    )
    for i, (phase, rows) in enumerate(phases := phases_of(found)):
        floors = floors_of(found, phase, rows)
        parts = [
            [floors[o][part] / size for o in OVERLAPS] for part in ("shared", "experts", "head", "cache", "state")
        ]
        totals = [floors[o]["total"] for o in OVERLAPS]
        over = _each([total / plain[o]["total"] for total, o in zip(totals, OVERLAPS, strict=True)])
        cells = *map(_each, parts), _each([total / size for total in totals]), over
        last = i + 1 == len(phases) or phases[i + 1][0] != phase
        table.add_row(*label(phase, rows), *cells, end_section=last)
    return table


def gap_table(found: Found) -> Table:
    """Times of each phase beside its floor: predicted of stock MLX and of ours, and measured ones."""
    chip, measured = found.get("chip"), found.get("measured", [])
    sides = [(side, "predicted") for side in (STOCK, OURS)] if chip else []
    sides += [(side, "measured") for side in dict.fromkeys(line["side"] for line in measured)]
    shown = f" on {chip['name']}" if chip else ""
    columns = ["floor ms", *(f"{side}, {kind} ms" for side, kind in sides)] if chip else []
    columns += [] if chip else [f"{side}, {kind} ms" for side, kind in sides]
    table = new_table(
        f"the gap to the floor: {found['model']['name']}{shown}, {SHOWN_OVERLAP} routing",
        *("phase", "", *columns),
        left=2,
        caption=_gap_caption(chip),
    )
    for i, (phase, rows) in enumerate(phases := phases_of(found)):
        nbytes = floors_of(found, phase, rows)[SHOWN_OVERLAP]["total"]
        floor = nbytes / chip["bandwidth"] if chip else None
        cells = [f"{floor * 1e3:.2f}"] if floor else []
        cells += [_gap_cell(found, kind, side, phase, rows, floor, nbytes) for side, kind in sides]
        last = i + 1 == len(phases) or phases[i + 1][0] != phase
        if chip or any(cells):
            table.add_row(*label(phase, rows), *cells, end_section=last)
    return table


def _gap_caption(chip: Found | None) -> str:
    if chip is None:
        return "bytes of the floor over the measured time: GB/s"
    used = f"{chip['bandwidth'] / 1e9:.0f} of {chip['gbps']:g} GB/s"
    return f"floor: bytes over the {used} that are usable; (times the phase's floor; over the side's plain step)"


def _gap_cell(found: Found, kind: str, side: str, phase: str, rows: int, floor: float | None, nbytes: float) -> str:
    seconds = time_of(found, kind, side, phase, rows)
    if seconds is None:
        return ""
    if floor is None:
        return f"{seconds * 1e3:.2f} ({nbytes / seconds / 1e9:.2f} GB/s)"
    plain = time_of(found, kind, side, PLAIN, 1)
    over = f"; {seconds / plain:.2f}" if plain and phase != PLAIN else ""
    return f"{seconds * 1e3:.2f} ({seconds / floor:.2f}x{over})"


def time_of(found: Found, kind: str, side: str, phase: str, rows: int) -> float | None:
    """Seconds of a phase, "predicted" or "measured"; None where there are none."""
    for line in found.get(kind, []):
        asked = (line["side"], line["phase"], line["rows"]) == (side, phase, rows)
        if asked and line.get("overlap", SHOWN_OVERLAP) == SHOWN_OVERLAP:
            return line["seconds"]
    return None


def kernels_table(found: Found) -> Table:
    """What each kind of kernels takes off a pass of stock MLX."""
    rows = sorted({line["rows"] for line in found["kernels"]})
    table = new_table(
        f"predicted to come off a pass of stock MLX on {found['chip']['name']}, ms",
        *("kernels", "", *(f"M={m}" for m in rows)),
        left=2,
        caption="each kind alone, and all together; in brackets the share of the pass; until a Mac times it a plan",
    )
    kinds = [kind for kind in KERNELS if any(x["seconds"] for x in found["kernels"] if x["kernels"] == kind)]
    for kind in (*kinds, "all"):
        lines = {line["rows"]: line for line in found["kernels"] if line["kernels"] == kind}
        cells = [f"{lines[m]['seconds'] * 1e3:.2f} ({lines[m]['seconds'] / lines[m]['stock']:.1%})" for m in rows]
        table.add_row(kind, ", ".join(KERNELS.get(kind, ())), *cells, end_section=kind == kinds[-1])
    return table


def documents_table(found: Found, machine: str | None = MAC) -> Table:
    """How far the published engine was from its machine's limit; None: all machines."""
    lines = [line for line in found["documents"] if machine in (None, line["machine"])]
    columns = "weights", "KV", "context", "k", "plain ms", "floor", "cycle ms", "floor", "speed-up", "at the floor"
    table = new_table(
        f"another engine's {found['model']['name']} over its byte floor: {machine or 'all that is published'}",
        *columns,
        left=2,
        caption=f"(times the floor; a cycle's: {', '.join(OVERLAPS)} routing); floor ms: {SHOWN_OVERLAP} routing. "
        f"At the floor: speed-up if plain steps and cycles both were. {MAC}: taken as an {CHIP}",
    )
    for i, line in enumerate(lines):
        floor = line["cycle_floor"][SHOWN_OVERLAP]
        kv = line["kv_cache"] + (f", {line['mtp_kv_cache']}" if line["mtp_kv_cache"] else "")
        weights = line["weights"] if machine else f"{line['machine']} {line['weights']}"
        distances = "/".join(f"{line['cycle'] / line['cycle_floor'][o]:.1f}" for o in OVERLAPS)
        last = i + 1 == len(lines) or any(line[x] != lines[i + 1][x] for x in ("machine", "weights", "context"))
        table.add_row(
            *(weights, kv, f"{line['context'] // 1024}k", str(line["drafts"])),
            *(f"{line['plain'] * 1e3:.1f} ({line['plain'] / line['plain_floor']:.1f}x)",),
            *(f"{line['plain_floor'] * 1e3:.1f}", f"{line['cycle'] * 1e3:.1f} ({distances}x)", f"{floor * 1e3:.1f}"),
            *(f"{line['speedup']:.2f}", f"{speed_up(line, line['plain_floor'], floor):.2f}"),
            end_section=last,
        )
    return table


def same_work_table(found: Found) -> Table:
    """What is predicted of the documents' experiment on their Mac: stock MLX and ours beside what was published."""
    table = new_table(
        f"the same on an {CHIP}, predicted: MLX, 4 bits, caches in 16, {SHOWN_OVERLAP} routing",
        *("context", "k", "published speed-up"),
        *(f"{side}: {name}" for side in (STOCK, OURS) for name in ("plain ms", "cycle ms", "speed-up")),
        left=0,
        caption="speed-ups with the published tokens per cycle",
    )
    lines = [line for line in found["documents"] if line["predicted"]]
    for work in sorted({(line["context"], line["drafts"]) for line in lines}):
        alike = [line for line in lines if (line["context"], line["drafts"]) == work]
        sides = [alike[0]["predicted"][side] for side in (STOCK, OURS)]
        cells = [(f"{s['plain'] * 1e3:.1f}", f"{s['cycle'] * 1e3:.1f}", _gains(alike, s)) for s in sides]
        shown = " / ".join(f"{line['speedup']:.2f}" for line in alike)
        table.add_row(f"{work[0] // 1024}k", str(work[1]), shown, *(cell for side in cells for cell in side))
    return table


def _gains(lines: Sequence[Found], side: dict[str, float]) -> str:
    """Of rows with different weights, whose acceptance differs a little, the middle."""
    return f"{median(speed_up(line, side['plain'], side['cycle']) for line in lines):.2f}"


def speed_up(line: Found, plain: float, cycle: float) -> float:
    """Of MTP over plain decoding at these times of a step and a cycle, with the published tokens per cycle."""
    return line["tokens_per_cycle"] * plain / cycle
