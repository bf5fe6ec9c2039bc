"""Compare another engine's published times of Step-3.5-Flash with MTP heads with ours, and with byte floors.

Its figures and their source are in `documents.csv`. Floors count every weight in the format that a row names,
although mixes such as Q4_K_S keep some tensors in more bits, so true floors are slightly higher.
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
CHIP = "M3 Ultra"  # assumed for "Mac Studio", whose chip is not stated; M1 and M2 Ultra have 800 GB/s, not 819
MAC = "Mac Studio"
# Memory bandwidth in GB/s. With layers distributed over eight GPUs, only one of them reads at a time.
GBPS = {"DGX Spark": 273, "8xH200": 4800}
STORED_BITS = {"fp16": 16, "q8_0": 8.5, "IQ4_XS": 4.25, "Q4_K_S": 4.5, "q4_0": 4.5}  # per value, scales included
BITS = {"fp16": None, "q8_0": 8, "q4_0": 4}
SHOWN = {"plain_tok_s": ".1f", "mtp_tok_s": ".1f", "speedup": ".2f", "acceptance": ".0%", "tokens_per_cycle": ".2f"}
QUICK = 256  # factor by which --quick shortens contexts
DEPTHS = 3

Condition = tuple[str, int | None, int | None]  # context, bits of the target's cache and of the heads'; None is 16


def source() -> str:
    """Return the source of the published figures, as stated in documents.csv."""
    return FILE.read_text().splitlines()[0].removeprefix("# source: ")


def published() -> list[Any]:
    """Return the other engine's published figures, one object per row of documents.csv.

    Its columns and the `condition` are attributes.

    Speeds are in tokens/s, acceptance is the share of all drafts, a context is in 1,024 tokens ("32k"). kv_cache,
    mtp_kv_cache: types of the target's and the heads' caches; mtp_kv_cache is "" if they are equal.
    """
    found = []
    for row in csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")):
        caches = row["kv_cache"], row["mtp_kv_cache"] or row["kv_cache"]
        figures = {name: float(row[name]) for name in (*SHOWN, "cycle_cost_in_plain_steps")}
        figures["num_draft_tokens"] = int(row["num_draft_tokens"])
        found.append(SimpleNamespace(**{**row, **figures}, condition=(row["context"], *(BITS[c] for c in caches))))
    return found


def check(model: Any) -> None:
    """Raise ValueError unless a model has exactly three heads of topology "chain", as the published one does."""
    if len(model.mtp) != DEPTHS or model.spec.topology != "chain":
        found = f"{len(model.mtp)} of topology {model.spec.topology!r}" if model.mtp else "none"
        allowed = f"allowed with {DEPTHS} chained heads, as published"
        raise ValueError(f"preset=documents: {allowed}; this model has {found}")


def conditions() -> list[Condition]:
    """Return each (context, bits of the target's cache, of the heads') of the published rows once; None is 16 bits.

    Largest bits first, then shortest contexts.
    """
    found = {row.condition for row in published()}
    return sorted(found, key=lambda c: (-(c[1] or 16), -(c[2] or 16), tokens(c[0])))


def tokens(context: str, *, quick: bool = False) -> int:
    """Return the number of tokens of a context such as "32k"; `quick`: a 256th of it."""
    return 1024 * int(context.removesuffix("k")) // (QUICK if quick else 1)


def comparison(found: dict[str, Any], *, quick: bool) -> Table:
    """Return a table of the other engine's published rows, each group after our measurement of the same setting.

    found: a result of `bench decode`. The setting is context, caches and number of drafts; unmeasured ones are empty.
    quick: the result's contexts have a 256th of the published tokens.
    """
    names = ("plain tok/s", "MTP tok/s", "speed-up", "accepted", "tok/cycle")
    left = ("context", "KV", "heads' KV", "drafts", "where")
    table = Table(*left, *map(right, names), title=f"published: {source()}", **STYLE)
    order, here = conditions(), "here, synthetic" if found["model"]["synthetic"] else "here"
    lines = sorted(published(), key=lambda p: (order.index(p.condition), p.num_draft_tokens))
    for ((context, *bits), k), equal in groupby(lines, lambda p: (p.condition, p.num_draft_tokens)):
        length = tokens(context, quick=quick)
        measured = {row.contender: row for row in rows(found, (length, bits[0], bits[1]))}
        plain, row, cells = measured.get(PLAIN), measured.get(f"k={k}"), [""] * 5
        if row and plain and row.speed and plain.speed and row.vs_plain:
            accepted = f"{row.accepted / row.drafted:.0%}" if row.drafted else ""
            cells = [f"{plain.speed.median:.1f}", f"{row.speed.median:.1f}", str(row.vs_plain), accepted]
            cells.append(f"{row.tokens_per_cycle or 0:.2f}")
        label = f"{context}, shortened to {length}" if quick else context
        table.add_row(label, *(str(b or 16) for b in bits), str(k), here, *cells)
        for p in equal:
            values = (format(getattr(p, name), form) for name, form in SHOWN.items())
            table.add_row(*[""] * 4, f"{p.machine}, {p.weights}", *values)
    return table


def stored(row: Any) -> ModelOps:
    """Return the operations, for byte counts, of the other engine in a published row.

    That engine drafted with the first head only, recycled.
    """
    kinds = row.kv_cache, row.mtp_kv_cache or row.kv_cache
    target, heads = (MODELS[MODEL].stored(STORED_BITS[row.weights], None, STORED_BITS[kv] / 8) for kv in kinds)
    return ModelOps(target.layers, target.head, heads.drafts[:1], recycled=True)


def documents(chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """Return a line per published row of the other engine: its seconds of a plain step and of a cycle, and floors.

    Floors are the minimum seconds, bytes over usable bandwidth (fitted share on the Mac Studio, default elsewhere); a
    cycle's are by overlap of experts.
    predicted: seconds on the Mac Studio with stock MLX and with our kernels, with 4-bit weights, 16-bit caches, all
    three heads, and experts routed as published; empty for other machines.
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
