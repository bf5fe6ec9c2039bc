"""The 42 published measurements of Step-3.5-Flash with MTP, each beside what its machine's memory would allow.

documents.csv: see `read`. Every weight is counted in the format that a row names, though mixes such as Q4_K_S keep some
tensors in more bits: true floors are a little higher, the distances from them a little smaller.
"""

import csv
from pathlib import Path
from typing import Any

from .chips import Chip
from .floor import cycle_floor, pass_floor
from .ops import OVERLAPS, Model
from .released import MODELS

MODEL = "Step-3.5-Flash"
CHIP = "M3 Ultra"  # what "Mac Studio" is taken for: its chip is not stated; M1 and M2 Ultra have 800 GB/s, not 819
MAC = "Mac Studio"
# GB/s of the machine's memory. Of the eight GPUs one at a time reads its layers, where layers are dealt out to them.
GBPS = {"DGX Spark": 273, "8xH200": 4800}
BITS = {"fp16": 16, "q8_0": 8.5, "IQ4_XS": 4.25, "Q4_K_S": 4.5, "q4_0": 4.5}  # of a value, scales included


def read(path: Path = Path(__file__).parents[1] / "documents.csv") -> list[dict[str, str]]:
    """Rows as published, with tokens per cycle and the cycle's cost in plain steps worked out from them."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def stored(line: dict[str, str]) -> Model:
    """What that engine read in a row: it drafted with the first head only, fed its own output again."""
    model = MODELS[MODEL].stored(BITS[line["weights"]], None, BITS[line["kv_cache"]] / 8)
    heads = model.drafts[:1]
    if line["mtp_kv_cache"]:
        heads = MODELS[MODEL].stored(BITS[line["weights"]], None, BITS[line["mtp_kv_cache"]] / 8).drafts[:1]
    return Model(model.layers, model.head, heads, recycled=True)


def documents(chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """Every row with its floors: seconds of a plain step and of a cycle, measured and at least, the latter by overlap.

    At least: bytes over the bandwidth that is usable, on the Mac Studio the fitted share, elsewhere the share that is
    taken where nothing is known.
    """
    found = []
    for line in read():
        machine, k = line["machine"], int(line["num_draft_tokens"])
        chip = chips[CHIP] if machine == MAC else None
        usable = chip.bandwidth if chip else GBPS[machine] * 1e9 * Chip.usable
        model, context = stored(line), int(line["context"].removesuffix("k")) * 1024
        plain, cycle = 1 / float(line["plain_tok_s"]), float(line["tokens_per_cycle"]) / float(line["mtp_tok_s"])
        found.append(
            {
                **{name: line[name] for name in ("machine", "weights", "kv_cache", "mtp_kv_cache")},
                **{"context": context, "drafts": k, "speedup": float(line["speedup"])},
                **{"tokens_per_cycle": float(line["tokens_per_cycle"]), "plain": plain, "cycle": cycle},
                "bytes_per_second": usable,
                "plain_floor": pass_floor(model, 1, context, "independent").total / usable,
                "cycle_floor": {o: cycle_floor(model, k, context, o).total / usable for o in OVERLAPS},
            }
        )
    return found
