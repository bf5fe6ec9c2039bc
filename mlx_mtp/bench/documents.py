"""Read what another engine measured of Step-3.5-Flash with its MTP heads: `documents.csv`, which names the source."""

import csv
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


def source() -> str:
    """Say where the figures are from."""
    return FILE.read_text().splitlines()[0].removeprefix("# source: ")


def published() -> list[dict[str, str]]:
    """Read every line of the table, its values by the names of their columns.

    Speeds are in tokens/s, acceptance is of all that were drafted, a context is in thousands ("32k"); mtp_kv_cache is
    empty where the heads' caches are of the target's type.
    """
    return list(csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")))


def _condition(line: dict[str, str]) -> Condition:
    types = line["kv_cache"], line["mtp_kv_cache"] or line["kv_cache"]
    return line["context"], BITS[types[0]], BITS[types[1]]


def check(model: Any) -> None:
    """Raise ValueError where a model does not draft as the one of the table does."""
    if len(model.mtp) != DEPTHS or model.spec.topology != "chain":
        found = f"{len(model.mtp)} of topology {model.spec.topology!r}" if model.mtp else "none"
        raise ValueError(
            f"preset=documents: allowed with {DEPTHS} chained heads, as published; this model has {found}"
        )


def conditions() -> list[Condition]:
    """List the conditions of all lines, each once: the least quantized first."""
    found = {_condition(line) for line in published()}
    return sorted(found, key=lambda c: (-(c[1] or 16), -(c[2] or 16), tokens(c[0])))


def tokens(context: str, *, quick: bool = False) -> int:
    """Count the tokens of a context, or of what stands for it with --quick."""
    return 1024 * int(context.removesuffix("k")) // (QUICK if quick else 1)


def beside(found: dict[str, Any], *, quick: bool) -> Table:
    """Show what was measured here, and every published line of the same context, caches and number of drafts."""
    names = ("plain tok/s", "MTP tok/s", "speed-up", "accepted", "tok/cycle")
    left = ("context", "KV", "heads' KV", "drafts", "where")
    table = Table(*left, *map(right, names), title=f"published: {source()}", **STYLE)
    lines, here = published(), "here, synthetic" if found["model"]["synthetic"] else "here"
    for context, *bits in conditions():
        measured = {row.contender: row for row in rows(found, (tokens(context, quick=quick), *bits))}
        label = f"{context}, shortened to {tokens(context, quick=True)}" if quick else context
        for k in range(1, DEPTHS + 1):
            alike = [p for p in lines if (*_condition(p), p["num_draft_tokens"]) == (context, *bits, str(k))]
            if alike:
                caches = (str(of_cache or 16) for of_cache in bits)
                table.add_row(label, *caches, str(k), here, *_measured_cells(measured, k))
            for p in alike:
                values = (format(float(p[name]), form) for name, form in SHOWN.items())
                table.add_row(*[""] * 4, f"{p['machine']}, {p['weights']}", *values)
    return table


def _measured_cells(measured: dict[str, Row], k: int) -> list[str]:
    plain, row = measured.get(PLAIN), measured.get(f"k={k}")
    if not row or not plain or not row.speed or not plain.speed or not row.vs_plain:
        return [""] * 5
    speeds = [f"{plain.speed.median:.1f}", f"{row.speed.median:.1f}", str(row.vs_plain)]
    return [*speeds, f"{row.accepted / row.drafted:.0%}" if row.drafted else "", f"{row.tokens_per_cycle or 0:.2f}"]
