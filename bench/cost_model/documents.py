"""Compare another engine's published times of Step-3.5-Flash with MTP heads with predictions and byte floors.

Its figures and their source are in `documents.csv`. Floors count every weight in the format that a row names,
although mixes such as Q4_K_S keep some tensors in more bits, so true floors are slightly higher.
"""

import csv
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from mlx_mtp.bench.result import new_table
from mlx_mtp.bench.roofline import phases
from mlx_mtp.bench.roofline.assemble import MODEL
from mlx_mtp.bench.roofline.chips import Chip
from mlx_mtp.bench.roofline.models import MODELS
from mlx_mtp.bench.roofline.ops import OVERLAPS, ModelOps
from mlx_mtp.bench.roofline.phases import OURS, SHOWN_OVERLAP, STOCK

Found = dict[str, Any]
FILE = Path(__file__).with_name("documents.csv")
CHIP = "M3 Ultra"  # assumed for "Mac Studio", whose chip is not stated; M1 and M2 Ultra have 800 GB/s, not 819
MAC = "Mac Studio"
# Memory bandwidth in GB/s. With layers distributed over eight GPUs, only one of them reads at a time.
GBPS = {"DGX Spark": 273, "8xH200": 4800}
STORED_BITS = {"fp16": 16, "q8_0": 8.5, "IQ4_XS": 4.25, "Q4_K_S": 4.5, "q4_0": 4.5}  # per value, scales included
NUMBERS = "plain_tok_s", "mtp_tok_s", "speedup", "tokens_per_cycle", "cycle_cost_in_plain_steps"


def published() -> list[Any]:
    """Return the other engine's published figures, one object per row of documents.csv, columns as attributes.

    Speeds are in tokens/s, a context is in tokens. kv_cache, mtp_kv_cache: types of the target's and the heads'
    caches; mtp_kv_cache is "" if they are equal.
    """
    found = []
    for row in csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")):
        figures = {name: float(row[name]) for name in NUMBERS}
        sizes = {"num_draft_tokens": int(row["num_draft_tokens"]), "context": 1024 * int(row["context"][:-1])}
        found.append(SimpleNamespace(**{**row, **figures, **sizes}))
    return found


def stored(row: Any) -> ModelOps:
    """Return the operations, for byte counts, of the other engine in a published row.

    That engine drafted with the first head only, recycled.
    """
    kinds = row.kv_cache, row.mtp_kv_cache or row.kv_cache
    formats: Found = {"bits": STORED_BITS[row.weights], "group": None, "packed": False}
    target, heads = (MODELS[MODEL].with_fields(**formats, value_bytes=STORED_BITS[kv] / 8) for kv in kinds)
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
    on_mac, model, k, context = row.machine == MAC, stored(row), row.num_draft_tokens, row.context
    usable = chips[CHIP].bandwidth if on_mac else GBPS[row.machine] * 1e9 * Chip.usable
    steps, predicted = {"plain": (phases.PLAIN, 1), "cycle": (phases.CYCLE, k + 1)}, {}
    if on_mac:
        times = phases.shown_times(phases.predicted(MODELS[MODEL], chips[CHIP], context, (k + 1,)))
        predicted = {side: {name: times[side, *step] for name, step in steps.items()} for side in (STOCK, OURS)}
    return {
        **{name: getattr(row, name) for name in ("machine", "weights", "kv_cache", "mtp_kv_cache")},
        **{"context": context, "drafts": k, "speedup": row.speedup, "tokens_per_cycle": row.tokens_per_cycle},
        **{"plain": 1 / row.plain_tok_s, "cycle": row.tokens_per_cycle / row.mtp_tok_s, "bytes_per_second": usable},
        "plain_floor": phases.pass_floor(model, 1, context, OVERLAPS[0]).total / usable,
        "cycle_floor": {o: phases.cycle_floor(model, k, context, o).total / usable for o in OVERLAPS},
        "predicted": predicted,
    }


def documents_table(lines: list[Found]) -> Table:
    """Return a table of the other engine's published times over its byte floors; lines: from `documents`."""
    table = new_table(
        f"another engine's {MODEL} over its byte floor",
        *("weights", "KV", "context", "k", "plain ms", "floor", "cycle ms", "floor", "speed-up", "at the floor"),
        left=2,
        caption=f"(times the floor; a cycle's: {', '.join(OVERLAPS)} routing); floor ms: {SHOWN_OVERLAP} routing. "
        f"At the floor: speed-up if plain steps and cycles both were. {MAC}: assumed to be an {CHIP}",
    )
    for _, group in groupby(lines, itemgetter("machine", "weights", "context")):
        for line in group:
            plain, cycle, floor, floors = (line[x] for x in ("plain", "cycle", "plain_floor", "cycle_floor"))
            kv = ", ".join(filter(None, (line["kv_cache"], line["mtp_kv_cache"])))
            weights = f"{line['machine']} {line['weights']}"
            distances = "/".join(f"{cycle / floors[o]:.1f}" for o in OVERLAPS)
            table.add_row(
                *(weights, kv, f"{line['context'] // 1024}k", str(line["drafts"])),
                *(f"{plain * 1e3:.1f} ({plain / floor:.1f}x)", f"{floor * 1e3:.1f}"),
                *(f"{cycle * 1e3:.1f} ({distances}x)", f"{floors[SHOWN_OVERLAP] * 1e3:.1f}"),
                *(f"{line['speedup']:.2f}", f"{speed_up(line, floor, floors[SHOWN_OVERLAP]):.2f}"),
            )
        table.add_section()
    return table


def same_work_table(lines: list[Found]) -> Table:
    """Return a table of predicted times with MLX, stock and ours, next to another engine's published speed-ups.

    The predictions are for the Mac on which that engine was measured, taken to be an M3 Ultra, and for the engine's
    contexts and numbers of drafts.
    """
    title = f"the same on an {CHIP}, predicted: MLX, 4 bits, caches in 16, {SHOWN_OVERLAP} routing"
    ours = [f"{side}: {name}" for side in (STOCK, OURS) for name in ("plain ms", "cycle ms", "speed-up")]
    columns, caption = ("context", "k", "published speed-up", *ours), "speed-ups with the published tokens per cycle"
    table = new_table(title, *columns, left=0, caption=caption)
    lines = [line for line in lines if line["predicted"]]
    for work in sorted({(line["context"], line["drafts"]) for line in lines}):
        same = [line for line in lines if (line["context"], line["drafts"]) == work]
        cells = [f"{work[0] // 1024}k", str(work[1]), " / ".join(f"{line['speedup']:.2f}" for line in same)]
        for side in (STOCK, OURS):
            plain, cycle = (same[0]["predicted"][side][kind] for kind in ("plain", "cycle"))
            gain = median(speed_up(line, plain, cycle) for line in same)  # acceptance differs with the weights
            cells += [f"{plain * 1e3:.1f}", f"{cycle * 1e3:.1f}", f"{gain:.2f}"]
        table.add_row(*cells)
    return table


def speed_up(line: Found, plain: float, cycle: float) -> float:
    """Return drafting's speed-up at these seconds of a step and a cycle, with a line's published tokens per cycle."""
    return line["tokens_per_cycle"] * plain / cycle
