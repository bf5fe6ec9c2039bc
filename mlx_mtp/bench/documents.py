"""Read what another engine measured of Step-3.5-Flash with its MTP heads: `documents.csv`, which names the source."""

import csv
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from .decode import PLAIN
from .decode_tables import STYLE, right
from .rows import Row, rows

BITS = {"fp16": None, "q8_0": 8, "q4_0": 4}
SHOWN = {"plain_tok_s": ".1f", "mtp_tok_s": ".1f", "speedup": ".2f", "acceptance": ".0%", "tokens_per_cycle": ".2f"}
QUICK = 256  # as much shorter are contexts with --quick
DEPTHS = 3
FILE = Path(__file__).parent / "documents.csv"

Condition = tuple[str, int | None, int | None]  # context, bits of the target's cache and of the heads'; None is 16


@dataclass(frozen=True)
class Published:
    """One line: speeds in tokens/s, acceptance as accepted of all drafted, context in thousands ("32k").

    kv_cache, mtp_kv_cache: types of the target's and of the heads' caches; the latter empty where it is the same.
    """

    machine: str
    weights: str
    kv_cache: str
    mtp_kv_cache: str
    context: str
    num_draft_tokens: int
    plain_tok_s: float
    mtp_tok_s: float
    speedup: float
    acceptance: float
    tokens_per_cycle: float
    cycle_cost_in_plain_steps: float

    @property
    def condition(self) -> Condition:
        return self.context, BITS[self.kv_cache], BITS[self.mtp_kv_cache or self.kv_cache]


def source() -> str:
    """Say where the figures are from."""
    return FILE.read_text().splitlines()[0].removeprefix("# source: ")


def published() -> list[Published]:
    """Read every line of the table."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    types = Published.__annotations__
    return [Published(**{name: types[name](value) for name, value in row.items()}) for row in csv.DictReader(lines)]


def check(model: Any) -> None:
    """Raise ValueError where a model does not draft as the one of the table does."""
    if len(model.mtp) != DEPTHS or model.spec.topology != "chain":
        found = f"{len(model.mtp)} of topology {model.spec.topology!r}" if model.mtp else "none"
        raise ValueError(
            f"preset=documents: allowed with {DEPTHS} chained heads, as published; this model has {found}"
        )


def conditions() -> list[Condition]:
    """List the conditions of the table, the least quantized first."""
    found = {row.condition for row in published()}
    return sorted(found, key=lambda c: (-(c[1] or 16), -(c[2] or 16), tokens(c[0])))


def tokens(context: str, *, quick: bool = False) -> int:
    """Count the tokens of a context, or of what stands for it with --quick."""
    return 1024 * int(context.removesuffix("k")) // (QUICK if quick else 1)


def beside(found: dict[str, Any], *, quick: bool) -> Table:
    """Show what was measured here, and every published line of the same context, caches and number of drafts."""
    names = ("plain tok/s", "MTP tok/s", "speed-up", "accepted", "tok/cycle")
    left = ("context", "KV", "heads' KV", "drafts", "where")
    table = Table(*left, *map(right, names), title=f"published: {source()}", **STYLE)
    order, here = conditions(), "here, synthetic" if found["model"]["synthetic"] else "here"
    lines = sorted(published(), key=lambda p: (order.index(p.condition), p.num_draft_tokens))
    for ((context, *bits), k), alike in groupby(lines, lambda p: (p.condition, p.num_draft_tokens)):
        setting = tokens(context, quick=quick), bits[0], bits[1]
        measured = {row.contender: row for row in rows(found, setting)}
        label = f"{context}, shortened to {setting[0]}" if quick else context
        table.add_row(label, *(str(b or 16) for b in bits), str(k), here, *_measured_cells(measured, k))
        for p in alike:
            values = (format(getattr(p, name), form) for name, form in SHOWN.items())
            table.add_row(*[""] * 4, f"{p.machine}, {p.weights}", *values)
    return table


def _measured_cells(measured: dict[str, Row], k: int) -> list[str]:
    plain, row = measured.get(PLAIN), measured.get(f"k={k}")
    if not row or not plain or not row.speed or not plain.speed or not row.vs_plain:
        return [""] * 5
    speeds = [f"{plain.speed.median:.1f}", f"{row.speed.median:.1f}", str(row.vs_plain)]
    return [*speeds, f"{row.accepted / row.drafted:.0%}" if row.drafted else "", f"{row.tokens_per_cycle or 0:.2f}"]
