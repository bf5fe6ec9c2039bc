"""Set what another engine measured of Step-3.5-Flash with its MTP heads beside our times, and beside byte floors.

Its figures, and where they are from, are in `documents.csv`. For floors every weight is counted in the format that a
row names, though mixes such as Q4_K_S keep some tensors in more bits: true floors are a little higher.
"""

import csv
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from .decode import PLAIN
from .decode_tables import STYLE, right, rows
from .roofline import phases
from .roofline.chips import Chip
from .roofline.models import MODELS
from .roofline.ops import OVERLAPS, ModelOps

FILE = Path(__file__).with_name("documents.csv")
MODEL = "Step-3.5-Flash"
CHIP = "M3 Ultra"  # what "Mac Studio" is taken for: its chip is not stated; M1 and M2 Ultra have 800 GB/s, not 819
MAC = "Mac Studio"
# GB/s of the machine's memory. Of the eight GPUs one at a time reads its layers, where layers are dealt out to them.
GBPS = {"DGX Spark": 273, "8xH200": 4800}
STORED_BITS = {"fp16": 16, "q8_0": 8.5, "IQ4_XS": 4.25, "Q4_K_S": 4.5, "q4_0": 4.5}  # of a value, scales included
BITS = {"fp16": None, "q8_0": 8, "q4_0": 4}
SHOWN = {"plain_tok_s": ".1f", "mtp_tok_s": ".1f", "speedup": ".2f", "acceptance": ".0%", "tokens_per_cycle": ".2f"}
QUICK = 256  # as much shorter are contexts with --quick
DEPTHS = 3

Condition = tuple[str, int | None, int | None]  # context, bits of the target's cache and of the heads'; None is 16


def source() -> str:
    """Say where the figures are from."""
    return FILE.read_text().splitlines()[0].removeprefix("# source: ")


def published() -> list[Any]:
    """Read every line of the table; its columns, and the `condition`, are attributes.

    Speeds are in tokens/s, acceptance is accepted of all drafted, a context in thousands ("32k"). kv_cache,
    mtp_kv_cache: types of the target's and of the heads' caches; the latter empty where it is the same.
    """
    found = []
    for row in csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")):
        caches = row["kv_cache"], row["mtp_kv_cache"] or row["kv_cache"]
        figures = {name: float(row[name]) for name in (*SHOWN, "cycle_cost_in_plain_steps")}
        figures["num_draft_tokens"] = int(row["num_draft_tokens"])
        found.append(SimpleNamespace(**{**row, **figures}, condition=(row["context"], *(BITS[c] for c in caches))))
    return found


def check(model: Any) -> None:
    """Raise ValueError where a model does not draft as the one of the table does."""
    if len(model.mtp) != DEPTHS or model.spec.topology != "chain":
        found = f"{len(model.mtp)} of topology {model.spec.topology!r}" if model.mtp else "none"
        allowed = f"allowed with {DEPTHS} chained heads, as published"
        raise ValueError(f"preset=documents: {allowed}; this model has {found}")


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
        length = tokens(context, quick=quick)
        measured = {row.contender: row for row in rows(found, (length, bits[0], bits[1]))}
        plain, row, cells = measured.get(PLAIN), measured.get(f"k={k}"), [""] * 5
        if row and plain and row.speed and plain.speed and row.vs_plain:
            accepted = f"{row.accepted / row.drafted:.0%}" if row.drafted else ""
            cells = [f"{plain.speed.median:.1f}", f"{row.speed.median:.1f}", str(row.vs_plain), accepted]
            cells.append(f"{row.tokens_per_cycle or 0:.2f}")
        label = f"{context}, shortened to {length}" if quick else context
        table.add_row(label, *(str(b or 16) for b in bits), str(k), here, *cells)
        for p in alike:
            values = (format(getattr(p, name), form) for name, form in SHOWN.items())
            table.add_row(*[""] * 4, f"{p.machine}, {p.weights}", *values)
    return table


def stored(row: Any) -> ModelOps:
    """Describe what that engine read in a row: it drafted with the first head only, fed its own output again."""
    kinds = row.kv_cache, row.mtp_kv_cache or row.kv_cache
    target, heads = (MODELS[MODEL].stored(STORED_BITS[row.weights], None, STORED_BITS[kv] / 8) for kv in kinds)
    return ModelOps(target.layers, target.head, heads.drafts[:1], recycled=True)


def documents(chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """Give every row its floors: seconds of a plain step and of a cycle, as published, and at least, by overlap.

    At least: bytes over the bandwidth that is usable, on the Mac Studio the fitted share, elsewhere the share that is
    taken where nothing is known. predicted: on the Mac Studio, seconds of the same by stock MLX and by ours, with
    4-bit weights, caches in 16 bits, all three heads, and experts routed as published.
    """
    return [_with_floors(row, chips) for row in published()]


def _with_floors(row: Any, chips: dict[str, Chip]) -> dict[str, Any]:
    on_mac, model, k, context = row.machine == MAC, stored(row), row.num_draft_tokens, tokens(row.context)
    usable = chips[CHIP].bandwidth if on_mac else GBPS[row.machine] * 1e9 * Chip.usable
    steps, predicted = {"plain": (phases.PLAIN, 1), "cycle": (phases.CYCLE, k + 1)}, {}
    if on_mac:
        times = phases.shown_times(phases.predicted(MODELS[MODEL], chips[CHIP], context, (k + 1,)))
        sides = phases.STOCK, phases.OURS
        predicted = {side: {name: times[side, *step] for name, step in steps.items()} for side in sides}
    return {
        **{name: getattr(row, name) for name in ("machine", "weights", "kv_cache", "mtp_kv_cache")},
        **{"context": context, "drafts": k, "speedup": row.speedup, "tokens_per_cycle": row.tokens_per_cycle},
        **{"plain": 1 / row.plain_tok_s, "cycle": row.tokens_per_cycle / row.mtp_tok_s, "bytes_per_second": usable},
        "plain_floor": phases.pass_floor(model, 1, context, OVERLAPS[0]).total / usable,
        "cycle_floor": {o: phases.cycle_floor(model, k, context, o).total / usable for o in OVERLAPS},
        "predicted": predicted,
    }
