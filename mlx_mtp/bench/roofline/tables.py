"""Format the result of `mlx-mtp bench model` as tables, and summarise the accuracy of the cost model."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.table import Table

from ..result import new_table
from .chips import read_fitted
from .cost import KERNELS
from .links import LINKS
from .ops import OVERLAPS
from .phases import PHASES, PLAIN, SHOWN_OVERLAP, VERIFY, shown_times

Result = dict[str, Any]


def tables(found: Result) -> Iterator[Table]:
    """Yield the tables of a `bench model` result: floors, gaps, savings of kernels, formats, lanes, links.

    Those without data in the result are left out.
    """
    yield floor_table(found)
    if "predicted" in found or found.get("measured"):
        yield gap_table(found)
    if "kernels" in found:
        yield kernels_table(found)
    if "formats" in found:
        yield formats_table(found)
    if "lanes" in found:
        yield lanes_table(found)
    if "links" in found:
        yield links_table(found)
    chip = found.get("chip")
    if lines := [line for line in found["validation"]["passes"] if chip is None or line["chip"] == chip["name"]]:
        yield published_table(lines)


def summary(found: Result) -> list[str]:
    """Return lines: the constants of the result's chip, if it has one, and the stored accuracy of the cost model.

    The accuracy does not depend on the result: errors on published passes over M >= 3 rows by kind, and large errors.
    """
    stored, chip = read_fitted()["summary"], found.get("chip")
    if chip is None:
        return stored
    times = chip["fitted_to"]
    fitted = f"fitted to {times} published times of M <= 2" if times else "a prior: nothing published"
    shares = f"{chip['usable']:.2f} of {chip['gbps']:g} GB/s, {chip['issue']:.2f} of its issue rate"
    costs = f"{chip['launch'] * 1e6:g} us if it waits for an earlier one, else {chip['independent'] * 1e6:g} us"
    launch = f"a launch: {costs} ({chip['launch_source']})"
    return [f"constants of {chip['name']}: {shares}, {fitted}", launch, *stored]


def floors_of(found: Result) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """Return a result's floors: by (phase, rows), in the order of tables, a dict by overlap of bytes by kind."""
    index = {}
    for line in sorted(found["floors"], key=lambda line: (PHASES.index(line["phase"]), line["rows"])):
        index.setdefault((line["phase"], line["rows"]), {})[line["overlap"]] = line["bytes"]
    return index


def label(phase: str, rows: int) -> tuple[str, str]:
    """Return a row's first two cells: the phase and its size, as "M=4" of a verify or "k=3" of drafts."""
    return phase, "" if phase == PLAIN else f"M={rows}" if phase == VERIFY else f"k={rows - 1}"


def _each(floors: dict[str, dict[str, float]], part: str, size: dict[str, float] | float) -> str:
    """Format a part's figures over `size` at all overlaps, or one figure if they are equal."""
    sizes = size if isinstance(size, dict) else dict.fromkeys(OVERLAPS, size)
    shown = [f"{floors[o][part] / sizes[o]:.2f}" for o in OVERLAPS]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def floor_table(found: Result) -> Table:
    """Return a table of each phase's minimum bytes: shared weights, experts, LM heads, KV caches, states, and all.

    The last column is the ratio of all to a plain step's.
    """
    index = floors_of(found)
    plain, last = {overlap: nbytes["total"] for overlap, nbytes in index[PLAIN, 1].items()}, dict(index.keys())
    unit, size = ("GB", 1e9) if plain[OVERLAPS[0]] >= 1e8 else ("MB", 1e6)
    name, context = found["model"]["name"], found["options"]["context"]
    title = f"byte floor: {name}, {context} tokens of context, {unit}"
    caption = "experts that the rows of a pass visit: routed independently / as published / all equal"
    columns = "phase", "", "shared", "experts", "LM head", "KV", "state", "all", "over a plain step"
    table = new_table(title, *columns, left=2, caption=caption)
    for (phase, rows), floors in index.items():
        cells = [_each(floors, part, size) for part in ("shared", "experts", "head", "cache", "state", "total")]
        table.add_row(*label(phase, rows), *cells, _each(floors, "total", plain), end_section=rows == last[phase])
    return table


def gap_table(found: Result) -> Table:
    """Return a table of each phase's times relative to its floor: predicted for stock MLX and ours, and measured."""
    chip = found.get("chip")
    sides = dict.fromkeys((line["side"], kind) for kind in ("predicted", "measured") for line in found.get(kind, []))
    where, caption = "", "bytes of the floor over the measured time: GB/s"
    if chip:
        where, used = f" on {chip['name']}", f"{chip['bandwidth'] / 1e9:.0f} of {chip['gbps']:g} GB/s"
        ratios = "times the phase's floor; over the side's plain step"
        caption = f"floor: bytes over the {used} usable; ({ratios})"
    title = f"the gap to the floor: {found['model']['name']}{where}, {SHOWN_OVERLAP} routing"
    columns = "phase", "", *["floor ms"] * bool(chip), *(f"{side}, {kind} ms" for side, kind in sides)
    table = new_table(title, *columns, left=2, caption=caption)
    times, index = {kind: shown_times(found[kind]) for _, kind in sides}, floors_of(found)
    last = dict(index.keys())
    for (phase, rows), floors in index.items():
        nbytes = floors[SHOWN_OVERLAP]["total"]
        floor = nbytes / chip["bandwidth"] if chip else None
        cells = [f"{floor * 1e3:.2f}"] if floor else []
        for side, kind in sides:
            seconds, plain = times[kind].get((side, phase, rows)), times[kind].get((side, PLAIN, 1))
            relative = f"; {seconds / plain:.2f}" if seconds and plain and phase != PLAIN else ""
            gap = seconds and (f"{seconds / floor:.2f}x{relative}" if floor else f"{nbytes / seconds / 1e9:.2f} GB/s")
            cells.append(f"{seconds * 1e3:.2f} ({gap})" if seconds else "")
        if chip or any(cells):
            table.add_row(*label(phase, rows), *cells, end_section=rows == last[phase])
    return table


def links_table(found: Result) -> Table:
    """Return a table of the messages between ranks in a plain step and in cycles, one line per number of rows.

    Columns: the number of collectives, the kB that a rank sends, and the predicted ms over each of LINKS.
    """
    lines = found["links"]
    title = f"predicted, not measured: {found['model']['name']} on {lines[0]['ranks']} ranks, a cycle's messages"
    caption = "; ".join(f"{link.name}: {link.source}" for link in LINKS)
    columns = "phase", "", "collectives", "kB a rank sends", *(f"{link.name} ms" for link in LINKS)
    table = new_table(title, *columns, left=2, caption=caption)
    for (phase, rows), group in groupby(lines, key=itemgetter("phase", "rows")):
        of = list(group)
        times = (f"{line['seconds'] * 1e3:.2f}" for line in of)
        table.add_row(*label(phase, rows), str(of[0]["collectives"]), f"{of[0]['bytes'] / 1e3:.1f}", *times)
    return table


def published_table(lines: Iterable[dict[str, Any]]) -> Table:
    """Return a table of published times of stock MLX's passes, and predictions for their own bytes and launches."""
    columns = "source", "chip", "model", "M", "GB", "launches", "published ms", "predicted ms", "ratio"
    caption = "context of 512 tokens; in brackets: launches that wait for no earlier one; * among the times fitted to"
    table = new_table("predicted and published times of passes of stock MLX", *columns, left=3, caption=caption)
    for x in lines:
        counts = f"{x['bytes'] / 1e9:.1f}", f"{x['launches']:.0f} ({x['independent']:.0f})"
        ratio = f"{x['predicted'] / x['published']:.2f}" + " *" * x["fitted"]
        times = (f"{x[side] * 1e3:.1f}" for side in ("published", "predicted"))
        table.add_row(x["source"], x["chip"], f"{x['model']}, {x['bits']} bits", str(x["m"]), *counts, *times, ratio)
    return table


def kernels_table(found: Result) -> Table:
    """Return a table of the predicted ms that kernels save in a pass of stock MLX, and their share of that pass.

    It has a line for each kind of kernel that saves time, alone, and one for all together; columns are row counts.
    """
    rows = sorted({line["rows"] for line in found["kernels"]})
    title = f"predicted savings in a pass of stock MLX on {found['chip']['name']}, ms"
    caption = "each kind alone, and all together; in brackets the share of the pass; not yet timed on a Mac"
    table = new_table(title, "kernels", "", *(f"M={m}" for m in rows), left=2, caption=caption)
    kinds = [kind for kind in KERNELS if any(x["seconds"] for x in found["kernels"] if x["kernels"] == kind)]
    for kind in (*kinds, "all"):
        lines = {line["rows"]: line for line in found["kernels"] if line["kernels"] == kind}
        cells = [f"{lines[m]['seconds'] * 1e3:.2f} ({lines[m]['seconds'] / lines[m]['stock']:.1%})" for m in rows]
        table.add_row(kind, ", ".join(KERNELS.get(kind, ())), *cells, end_section=kind == kinds[-1])
    return table


def formats_table(found: Result) -> Table:
    """Return a table of predicted passes with all weights in one format, MLX's and GGUF's next to each other."""
    lines = found["formats"]
    rows = sorted({line["rows"] for line in lines})
    title = f"predicted passes by format of all weights on {found['chip']['name']}, ms"
    caption = "with our kernels, which for iq4_xs, iq4_nl and q6_k are the only ones; not yet timed on a Mac"
    table = new_table(title, "format", "GB", *(f"M={m}" for m in rows), left=1, caption=caption)
    for name, group in groupby(lines, itemgetter("format")):
        of = list(group)
        table.add_row(name, f"{of[0]['bytes'] / 1e9:.2f}", *(f"{line['seconds'] * 1e3:.2f}" for line in of))
    return table


def lanes_table(found: Result) -> Table:
    """Return a table of predicted passes in both lanes of products: ms, and over one row in the lane `exact`."""
    lines = found["lanes"]
    rows = sorted({line["rows"] for line in lines})
    title = f"predicted passes by lane of dense products on {found['chip']['name']}, ms"
    caption = "with our kernels; in brackets over exact at one row; without M5's tensor units; not yet timed on a Mac"
    table = new_table(title, "lane", *(f"M={m}" for m in rows), left=1, caption=caption)
    for name, group in groupby(lines, itemgetter("lane")):
        times = [line["seconds"] for line in group]
        table.add_row(name, *(f"{time * 1e3:.2f} ({time / lines[0]['seconds']:.2f})" for time in times))
    return table
