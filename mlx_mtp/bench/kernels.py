"""Measure our kernels op by op: times against stock MLX on a GPU, and emulated memory traffic anywhere.

Times are those of dependent chains over several layers of a released model's shapes, ours and stock alternately.
Traffic is counted on small shapes and is not a time.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..emulator import Traffic, emulated
from ..emulator.stock import MOST_QUERIES, stock_kernels
from ..tuning.ab_test import FAILS, KernelTrial, check
from ..tuning.kernel_switch import trials
from .kernels_cases import CASES, SMALL
from .result import new_table
from .timing import Call, Measured, Timed, interleaved, ratio, steps_for

OPS = tuple(sorted({op for op, _ in CASES.values()}))
LAYERS = {"verify_moe": 1}  # layers per shape; four for other ops, so that caches stay cold
CHAIN_SECONDS = 0.002
PRODUCTS = {"gather_qmv": 3}  # launches of MLX's kernel for one of ours
# MLX's kernels whose traffic is shown next to an op's, and its matrix's rows and columns, those of SMALL.
STOCK = {
    **dict.fromkeys(
        ("verify_qmm", "verify_glu", "matrix_qmm", "matrix_glu"), (("qmv_fast", "qmv", "qmv_wide"), (64, 1024))
    ),
    "verify_gemv": (("gemv",), (64, 1024)),
    "verify_head": (("qmv_fast", "qmv_wide"), (1024, 512)),
    "verify_moe": (("gather_qmv",), ()),
    "verify_attention": (("sdpa_vector",), ()),
}

Result = dict[str, Any]  # a kernel at a row count, as in results


def timed(op: str | None, rows: int, rounds: int, cooldown: float = 0.0) -> Iterator[Result]:
    """Yield `compared` for each case, of one op or all (None), at each of its row counts up to `rows`.

    Needs a Metal GPU. For an unknown op, or if no row count is small enough, nothing is yielded.
    """
    for name, (kind, make) in CASES.items():
        if op in (None, kind):
            sites = [make() for _ in range(LAYERS.get(kind, 4))]
            for trial in trials(sites, mx.bfloat16):
                if trial.rows <= rows:
                    yield compared(name, trial, rounds, cooldown)
            del sites
            mx.clear_cache()


def compared(name: str, trial: KernelTrial, rounds: int, cooldown: float = 0.0) -> Result:
    """Check one trial's kernel and time it, even if its values are wrong, against the operations that it replaces.

    name: the case's, for the result. cooldown: seconds of rest before each turn. wrong: what is wrong, or None.
    seconds: of a call, a value per round, by side ("ours", "stock"); {} if the kernel does not run.
    """
    x = trial.x(0)
    sides = {side: [Call(pair[i], x) for pair in trial.pairs] for i, side in enumerate(("ours", "stock"))}
    wrong, seconds = check(trial), {}
    if not (wrong and wrong.startswith(FAILS)):
        steps = steps_for(sides["stock"], CHAIN_SECONDS)
        seconds = interleaved({side: Timed(calls, steps) for side, calls in sides.items()}, rounds, cooldown=cooldown)
    shape = {"name": name, "op": trial.op, "shape": trial.shape, "rows": trial.rows}
    return {**shape, "wrong": wrong, "seconds": seconds}


def traffic(op: str | None, rows: int) -> Iterator[Result]:
    """Yield the emulated memory traffic of one op, or all (None), at the row counts up to `rows` that it serves.

    Raises ValueError if the one op serves none.
    """
    for kind in (op,) if op else OPS:
        site = SMALL[kind]()
        served = sorted(m for m in site.candidates if m <= rows)
        if op and not served:
            raise ValueError(f"rows={rows}: {op} needs at least {min(site.candidates)} rows")
        for m in served:
            x = mx.random.normal((m, site.width), mx.bfloat16, key=mx.random.key(m))
            mx.eval(site.ours(x))  # creates the context of the rows
            yield {"op": kind, "rows": m, **asked(site, x)}


def stock_traffic(op: str | None, rows: int) -> Iterator[Result]:
    """Yield the emulated traffic of the kernels of MLX that STOCK lists for an op, at row counts as in `traffic`."""
    names, matrix = STOCK.get(op or "", ((), ()))
    for name in names:
        for m in sorted(m for m in SMALL[op or ""]().candidates if m <= rows):
            if name != "sdpa_vector" or m <= MOST_QUERIES:
                launches = [stock_kernels(*matrix)[name](m)] * PRODUCTS.get(name, 1)
                yield {"op": f"MLX {name}", "rows": m, **counts(launches)}


def asked(site: Any, x: mx.array) -> Result:
    """Return the counts of an emulated call of `site` on x, see `counts`."""
    with emulated() as launches:
        mx.eval(site.ours(x))
    return counts(launches)


def counts(launches: Sequence[Traffic]) -> Result:
    """Return the number of launches, and the bytes that they requested and wrote.

    largest: the buffer with the most distinct bytes read; reread: bytes requested of it over these.
    """
    buffers = [b for launch in launches for b in launch.buffers.values() if b.space != "threadgroup"]
    requested, written = sum(b.bytes_read for b in buffers), sum(b.bytes_written for b in buffers)
    largest = max(buffers, key=lambda b: b.distinct_read)
    found = {"launches": len(launches), "requested": requested, "written": written}
    return {**found, "largest": largest.name, "reread": largest.reread}


def speed_table(found: Sequence[Result]) -> Table:
    """Return a table of `compared` lines: stock MLX's time over ours, a line per case, a column per row count."""
    sizes = sorted({line["rows"] for line in found})
    title, caption = "stock MLX's time over our kernel's", "WRONG: its values are wrong"
    table = new_table(title, "op", "case", *(f"M={m}" for m in sizes), left=2, caption=caption)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for (op, case), lines in groupby(found, itemgetter("op", "name")):
        cells = {k["rows"]: "WRONG" if k["wrong"] else str(speedup(k)) for k in lines}
        table.add_row(op, case, *(cells.get(m, "") for m in sizes))
    return table


def speedup(line: Result) -> Measured:
    """Return stock MLX's time over ours, of a `compared` line; KeyError if its kernel does not run."""
    return ratio(line["seconds"]["stock"], line["seconds"]["ours"])


def traffic_table(found: Sequence[Result]) -> Table:
    """Return a table of `traffic` lines, one per op and row count."""
    names = ("M", "launches", "KiB requested", "KiB written", "largest buffer", "read")
    title, caption = "memory traffic of our kernels, emulated", "of small shapes; counts, not times"
    table = new_table(title, "op", *names, caption=caption)
    for op, lines in groupby(found, itemgetter("op")):
        for i, k in enumerate(lines):
            kib = [f"{n / 1024:.1f}" for n in (k["requested"], k["written"])]
            cells = str(k["rows"]), str(k["launches"]), *kib, k["largest"], f"{k['reread']:.2f}x"
            table.add_row("" if i else op, *cells)
        table.add_section()
    return table
