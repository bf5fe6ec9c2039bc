"""Set each of 42 published measurements of Step-3.5-Flash with MTP beside what its machine's memory would allow.

Every weight is counted in the format that a row names, though mixes such as Q4_K_S keep some tensors in more bits:
true floors are a little higher, the distances from them a little smaller.
"""

from typing import Any

from ..documents import Published, published, tokens
from .chips import Chip
from .floor import CYCLE, PLAIN, cycle_floor, pass_floor
from .ops import OVERLAPS, ModelOps
from .predict import OURS, STOCK, predicted, shown_times
from .released import MODELS

MODEL = "Step-3.5-Flash"
CHIP = "M3 Ultra"  # what "Mac Studio" is taken for: its chip is not stated; M1 and M2 Ultra have 800 GB/s, not 819
MAC = "Mac Studio"
# GB/s of the machine's memory. Of the eight GPUs one at a time reads its layers, where layers are dealt out to them.
GBPS = {"DGX Spark": 273, "8xH200": 4800}
BITS = {"fp16": 16, "q8_0": 8.5, "IQ4_XS": 4.25, "Q4_K_S": 4.5, "q4_0": 4.5}  # of a value, scales included


def stored(row: Published) -> ModelOps:
    """Describe what that engine read in a row: it drafted with the first head only, fed its own output again."""
    kinds = row.kv_cache, row.mtp_kv_cache or row.kv_cache
    target, heads = (MODELS[MODEL].stored(BITS[row.weights], None, BITS[kv] / 8) for kv in kinds)
    return ModelOps(target.layers, target.head, heads.drafts[:1], recycled=True)


def documents(chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """Give every row its floors: seconds of a plain step and of a cycle, as published, and at least, by overlap.

    At least: bytes over the bandwidth that is usable, on the Mac Studio the fitted share, elsewhere the share that is
    taken where nothing is known. predicted: on the Mac Studio, seconds of the same by stock MLX and by ours, with
    4-bit weights, caches in 16 bits, all three heads, and experts routed as published.
    """
    return [_row(row, chips) for row in published()]


def _row(row: Published, chips: dict[str, Chip]) -> dict[str, Any]:
    usable = chips[CHIP].bandwidth if row.machine == MAC else GBPS[row.machine] * 1e9 * Chip.usable
    model, k, context = stored(row), row.num_draft_tokens, tokens(row.context, quick=False)
    sides = (STOCK, OURS) if row.machine == MAC else ()
    times = shown_times(predicted(MODELS[MODEL], chips[CHIP], context, (k + 1,)) if sides else [])
    return {
        **{name: getattr(row, name) for name in ("machine", "weights", "kv_cache", "mtp_kv_cache")},
        **{"context": context, "drafts": k, "speedup": row.speedup, "tokens_per_cycle": row.tokens_per_cycle},
        **{"plain": 1 / row.plain_tok_s, "cycle": row.tokens_per_cycle / row.mtp_tok_s},
        "bytes_per_second": usable,
        "plain_floor": pass_floor(model, 1, context, OVERLAPS[0]).total / usable,
        "cycle_floor": {overlap: cycle_floor(model, k, context, overlap).total / usable for overlap in OVERLAPS},
        "predicted": {s: {"plain": times[s, PLAIN, 1], "cycle": times[s, CYCLE, k + 1]} for s in sides},
    }
