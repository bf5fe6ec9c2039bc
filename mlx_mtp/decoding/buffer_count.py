"""Count the buffers that a process holds; Metal limits their number (`METAL_BUFFERS`) as well as their bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.pieces import buffers, has_rows
from ..cache.prompt_cache import SPILL, PromptCache
from ..layers.target import Target
from .graph_memory import fill, graph_of, shaped
from .replay import KEPT

KEPT_SNAPSHOTS = 3  # of a chat session; each costs one copy of the wrapped windows
CONVERSATION = 131_072  # tokens of the conversation that is estimated, unless the model supports fewer
LEAST_CHUNK = 32  # tokens of the shortest chunks in the server's prefix tree
CONTEXT, VERIFIED = 8, 4  # positions and rows of the pass whose arrays are counted


@dataclass(frozen=True)
class Buffers:
    """Number of buffers, by owner.

    weights: of the model. caches: of one conversation, with pending hidden rows. snapshots: of a chat session.
    recordings: constants of the cycles that one thread records. prefixes: the server's prefix tree.
    """

    weights: int = 0
    caches: int = 0
    snapshots: int = 0
    recordings: int = 0
    prefixes: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_buffers(blank: PromptCache, tokens: int = 0, chunk: int = 1) -> Buffers:
    """Return the numbers of buffers that a model and one conversation need, by owner; nothing is computed.

    blank: an empty cache of the model, for its layout. tokens, chunk: length of a conversation in the server's prefix
    tree, and of its chunks, each of which ends with a checkpoint; 0 tokens: no tree. For mlx-lm's caches only the
    weights and caches are counted.
    """
    model = blank.model
    weights = _distinct(array for _, array in tree_flatten(model.parameters()))  # type: ignore[attr-defined]
    if blank.is_mlx_lm:  # the prefix tree does not support its caches
        return Buffers(weights, caches=2 * len(model.layers))  # type: ignore[attr-defined]
    read, drafting = shaped(blank), blank.like_new()
    fill(model, drafting, CONTEXT, VERIFIED)  # type: ignore[arg-type]
    for cache in (read, drafting):
        cache.quantize_at(cache.quantizing.start if cache.quantizing else 0)
    rows = buffers(part for c in read.caches if has_rows(c) for part in c.parts)
    pending = [model.no_hidden()] if blank.heads else []  # type: ignore[attr-defined]
    of_read, of_drafting = (
        [*cache.kept, *pending, *(part for c in cache.caches if not has_rows(c) for part in c.parts)]
        for cache in (read, drafting)
    )
    parts = [part for c in drafting.caches for part in c.parts]
    return Buffers(
        weights,
        caches=_distinct([*drafting.kept, *parts]) + SPILL * len(pending),
        snapshots=KEPT_SNAPSHOTS * _distinct(of_drafting),
        recordings=KEPT * _constants(model, drafting),  # type: ignore[arg-type]
        prefixes=-(-tokens // chunk) * (rows + buffers(of_read)),
    )


def _constants(model: Target, cache: PromptCache) -> int:
    """Return the number of constants in the graph of one pass; a recorded cycle holds as many."""
    events = graph_of(model, cache, CONTEXT, VERIFIED)
    return sum(len(event["constants"]) for event in events if event["type"] == "constants")


def _distinct(arrays: Iterable[mx.array]) -> int:
    return len({id(array) for array in arrays})
