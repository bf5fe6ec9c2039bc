"""Measure our kernels, an op at a time: beside stock MLX on a GPU, in time, and anywhere, emulated, in traffic.

Times are of dependent chains over several layers of a released model's shapes, ours and stock in turn; those of
`verify_qmm_mma` are beside `verify_qmm`. Traffic is of small shapes, and is a count, never a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
from rich.table import Column, Table

from ..emulator import emulated
from ..tuning.ab_test import FAILS, KernelTrial, check
from ..tuning.kernel_switch import trials
from .kernels_cases import CASES, SMALL
from .timing import Call, Measured, Timed, interleaved, ratio, steps_for

OPS = tuple(sorted({op for op, _ in CASES.values()}))
LAYERS = {"verify_moe": 1}  # of a shape; of the others four, so that caches stay cold
CHAIN_SECONDS = 0.002


@dataclass(frozen=True)
class Compared:
    """One kernel at some rows. wrong: of `ab_test.check`; seconds: of calls by side and round; none if it fails."""

    name: str
    op: str
    shape: str
    rows: int
    wrong: str | None
    seconds: dict[str, list[float]]

    @property
    def speedup(self) -> Measured:
        """Stock MLX's time over ours."""
        return ratio(self.seconds["stock"], self.seconds["ours"])


def timed(op: str | None, rows: int, rounds: int, cooldown: float = 0.0) -> Iterator[Compared]:
    """Time each kernel (of one op, or all) beside stock MLX, in each number of rows up to `rows`; needs a GPU."""
    for name, (kind, make) in CASES.items():
        if op in (None, kind):
            sites = [make() for _ in range(LAYERS.get(kind, 4))]
            for trial in trials(sites, mx.bfloat16):
                if trial.rows <= rows:
                    yield compared(name, trial, rounds, cooldown)
            del sites
            mx.clear_cache()


def compared(name: str, trial: KernelTrial, rounds: int, cooldown: float = 0.0) -> Compared:
    """Check and time one trial's kernel beside what it takes the place of."""
    x = trial.x(0)
    sides = {side: [Call(pair[i], x) for pair in trial.pairs] for i, side in enumerate(("ours", "stock"))}
    wrong, seconds = check(trial), {}
    if not (wrong and wrong.startswith(FAILS)):
        steps = steps_for(sides["stock"], CHAIN_SECONDS)
        seconds = interleaved({side: Timed(calls, steps) for side, calls in sides.items()}, rounds, cooldown=cooldown)
    return Compared(name, trial.op, trial.shape, trial.rows, wrong, seconds)


@dataclass(frozen=True)
class Asked:
    """Bytes that a call of a kernel asks for. largest: the buffer of which most is read; reread: how often it is."""

    op: str
    rows: int
    launches: int
    requested: int
    written: int
    largest: str
    reread: float


def traffic(op: str | None, rows: int) -> Iterator[Asked]:
    """Count on the emulator what each op, or one, asks at all it serves of 1 to `rows`; ValueError for none."""
    for kind in (op,) if op else OPS:
        site = SMALL[kind]()
        served = sorted(m for m in site.candidates if m <= rows)
        if op and not served:
            raise ValueError(f"rows={rows}: allowed for {op} are {min(site.candidates)} to {max(site.candidates)}")
        for m in served:
            x = mx.random.normal((m, site.width), mx.bfloat16, key=mx.random.key(m))
            mx.eval(site.ours(x))  # makes what the rows come behind
            with emulated() as launches:
                mx.eval(site.ours(x))
            buffers = [b for launch in launches for b in launch.buffers.values() if b.space != "threadgroup"]
            requested, written = sum(b.bytes_read for b in buffers), sum(b.bytes_written for b in buffers)
            largest = max(buffers, key=lambda b: b.distinct_read)
            yield Asked(kind, m, len(launches), requested, written, largest.name, largest.reread)


def speed_table(found: list[Compared]) -> Table:
    """Show stock MLX's time over ours, a line per case, a column per number of rows."""
    columns = sorted({c.rows for c in found})
    headers = [Column(name, no_wrap=True) for name in ("op", "case")]
    headers += [Column(f"M={m}", justify="right") for m in columns]
    title, caption = "stock MLX's time over our kernel's", "WRONG: its values are not what they should be"
    table = Table(*headers, title=title, caption=caption)
    for case, op in {c.name: c.op for c in found}.items():
        cells = {c.rows: "WRONG" if c.wrong else str(c.speedup) for c in found if c.name == case}
        table.add_row(op, case, *(cells.get(m, "") for m in columns))
    return table


def traffic_table(found: list[Asked]) -> Table:
    """Show a line per op and number of rows."""
    names = ("M", "launches", "KiB requested", "KiB written", "largest buffer", "read")
    headers = [Column("op", no_wrap=True), *(Column(name, justify="right") for name in names)]
    title, caption = "what our kernels ask of memory, emulated", "of small shapes; counts, not times"
    table = Table(*headers, title=title, caption=caption)
    for op, of_op in groupby(found, lambda a: a.op):
        for i, a in enumerate(of_op):
            kib = [f"{n / 1024:.1f}" for n in (a.requested, a.written)]
            table.add_row("" if i else op, str(a.rows), str(a.launches), *kib, a.largest, f"{a.reread:.2f}x")
        table.add_section()
    return table
