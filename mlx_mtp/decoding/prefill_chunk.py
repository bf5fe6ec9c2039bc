"""Choose the prefill chunk of a model on a GPU: macOS ends GPU commands that take several seconds.

Chunk boundaries influence the rounding of 16-bit results. The size is therefore chosen once, when a model is loaded,
and stored for this machine, model and format of keys and values.
"""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .._version import __version__
from ..cache.make_cache import make_prompt_cache
from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..machine.memory import working_set
from ..machine.remembered import RememberedFile, machine
from ..tuning.cost_file import MLX_VERSION
from .graph_memory import fill, graph_of, nbytes
from .memory_needs import UNCHECKED, kv_bytes, stated_positions
from .policy import shapes_of
from .prefill import read_chunk

CHUNKS = (2048, 1024, 512, 256)  # tokens
ON_CPU = 256  # tokens; on a CPU short chunks are faster and can be interrupted sooner
MOST_SECONDS = 2.0  # maximum of a chunk at the longest context; macOS ends a command after about five
SAMPLE = 256  # rows that are timed
RUNS = 2  # timed runs, after one that compiles
LONGEST = 131_072  # positions of a model that does not state its maximum
SPAN = 1 << 16  # positions, more than any window: from there on caches grow by a constant per position
LOST = "the prefill chunk cannot be kept for the next load"
PRODUCTS = {"Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM"}  # their first input is [..., K]

_chosen: dict[str, int] = {}  # by `_facts`; a choice is final for this process


def prefill_chunk(model: Target, layout: Mapping[str, Any], *, lazy: bool = False) -> int | None:
    """Return the tokens per prefill chunk of a loaded model; None on a CPU, where every model has ON_CPU.

    A stored choice is used, else the device is timed and the choice stored. All ranks call this and get rank 0's.
    layout: arguments of `make_prompt_cache`. lazy: do not read the weights; without a stored choice, return the
    smallest chunk. What is returned is also the choice of later loads of the same facts in this process.
    """
    if mx.default_device() == mx.cpu:
        return None
    facts, ranks = _facts(model, layout), model.ranks
    key, file = json.dumps(facts, sort_keys=True), RememberedFile("chunks", facts, LOST)
    known = _chosen.get(key) or file.recall().get("chunk")
    found = _agreed(ranks, known if known in CHUNKS else None)
    if found is None and lazy:
        found = CHUNKS[-1]
    elif found is None:
        blank = make_prompt_cache(model, **layout)
        seconds = sample_seconds(model, blank)
        found = _agreed(ranks, largest_chunk(seconds, growth(model, blank, longest_context(model, blank))))
        if not ranks or ranks.rank == 0:
            file.keep(chunk=found, seconds=seconds)
    _chosen[key] = found
    return found


def largest_chunk(seconds: float, growth: float) -> int:
    """Return the largest chunk that takes at most MOST_SECONDS at the longest context; the smallest if none does.

    seconds: of the first SAMPLE rows of a prompt. growth: factor of a row's work from there to the longest context.
    """
    row = seconds / SAMPLE * growth
    return next((chunk for chunk in CHUNKS if chunk * row <= MOST_SECONDS), CHUNKS[-1])


def sample_seconds(model: Target, blank: PromptCache) -> float:
    """Return the seconds of prefilling the first SAMPLE rows of a prompt on the device, the minimum of RUNS.

    blank: an empty cache of the model, for its layout.
    """
    tokens, spent = [7 * i % model.vocab_size for i in range(SAMPLE)], []
    for _ in range(1 + RUNS):
        cache, tic = blank.like_new(), time.perf_counter()
        while cache.offset < SAMPLE:
            rest = tokens[cache.offset :]
            read_chunk(model, cache, rest, heads=bool(cache.heads) and model.runtime.untested is None, chunk=SAMPLE)
        spent.append(time.perf_counter() - tic)
    return min(spent[1:])


def growth(model: Target, blank: PromptCache, context: int) -> float:
    """Return the ratio of a row's multiply-adds at `context` positions to those within the first SAMPLE rows.

    At least 1.0; 1.0 if `graph_of` returns []. blank: an empty cache of the model, for its layout.
    """
    first = multiply_adds(model, blank, SAMPLE, SAMPLE)
    if not first:
        return 1.0
    if not blank.is_mlx_lm:
        return max(1.0, multiply_adds(model, blank, context, SAMPLE) / first)
    twice = multiply_adds(model, blank, 2 * SAMPLE, 2 * SAMPLE)
    attention = max(0, twice - 2 * first) / 2  # of SAMPLE rows that attend to SAMPLE positions
    return 1 + attention * max(0, context / SAMPLE - 1) / first


def multiply_adds(model: Target, blank: PromptCache, context: int, rows: int) -> int:
    """Return the multiply-adds of products and attention when the last `rows` of `context` positions are prefilled.

    0 if `graph_of` returns []. blank: an empty cache of the model, for its layout.
    """
    full = blank.like_new()
    full.quantize_at(context - 1)
    fill(model, full, context, 1)
    events = graph_of(model, full, context, rows)
    return sum(_of_operation(event) for event in events if event["type"] == "primitive")


def _of_operation(event: dict) -> int:
    (_, out, _), *_ = event["outputs"]
    shapes = [shape for _, shape, _ in event["inputs"]]
    if event["name"] in PRODUCTS:
        return math.prod(out) * shapes[0][-1]
    if event["name"] == "ScaledDotProductAttention":
        queries, keys = shapes[:2]
        return math.prod(out[:-1]) * keys[-2] * (queries[-1] + out[-1])
    return 0


def longest_context(model: Target, blank: PromptCache) -> int:
    """Return the largest number of positions that the model supports and whose caches fit in the GPU's memory.

    Memory limits it to no fewer than UNCHECKED, and not at all if its size is unknown. LONGEST stands for a maximum
    that the model does not state. blank: an empty cache of the model, for its layout.
    """
    supported, memory = stated_positions(model) or LONGEST, working_set()
    if memory is None:
        return supported
    short, long = (sum(kv_bytes(model, blank, positions)) for positions in (SPAN, 2 * SPAN))
    per_position = max(1, long - short) / SPAN
    return min(supported, max(UNCHECKED, int((memory - nbytes(model.parameters())) / per_position)))


def _facts(model: Target, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts that a choice of the chunk depends on, the key of its file."""
    ranks, kept = model.ranks, {name: value for name, value in layout.items() if value is not None}
    if "kv_bits" not in kept:
        kept.pop("quantized_kv_start", None)
    if not {"kv_bits", "mtp_kv_bits"} & kept.keys():
        kept.pop("kv_group_size", None)
    versions = {"mlx": MLX_VERSION, "mlx_mtp": __version__, "backend": str(mx.default_device())}
    own = {"model": shapes_of(model), "layout": kept, "ranks": ranks.size if ranks else 1}
    return {**machine(), **versions, **own}


def _agreed(ranks: Any, value: Any) -> Any:
    return ranks.broadcast(value) if ranks else value
