"""Estimate what a model holds in memory from the shapes of its caches and its graph, reading nothing."""

import math
from collections import Counter, deque
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.drafting import pending
from ..cache.mlx_lm_caches import MlxLmCaches
from ..cache.prompt_cache import PromptCache
from ..kernels import KernelRefused
from ..layers.target import Target
from .drafters import drafter_of

# Primitives whose output is a view of their first input, or is written into it.
VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Contiguous", "ExpandDims", "Flatten", "Reshape", "Slice"),
    *("DynamicSlice", "DynamicSliceUpdate", "ScatterAxis", "SliceUpdate", "Split", "Squeeze", "StopGradient"),
    *("Transpose", "Unflatten", "View"),
}
# Those that may write their output over an input that nothing else reads.
IN_PLACE = {
    *("Abs", "Add", "AsType", "Compiled", "Cos", "Divide", "Exp", "Log", "Maximum", "Minimum", "Multiply"),
    *("Negative", "RMSNorm", "RoPE", "Rsqrt", "Select", "Sigmoid", "Sin", "Softmax", "Sqrt", "Square", "Subtract"),
    "Tanh",
}
LAG = 32  # operations that MLX has submitted and not done: what they read is still held


def nbytes(tree: Any) -> int:
    """Count the bytes of a tree's arrays, each once."""
    arrays: Any = {id(value): value for _, value in tree_flatten(tree)}
    return sum(a.nbytes for a in arrays.values() if isinstance(a, mx.array))


def fill(model: Target, cache: PromptCache, context: int, rows: int) -> int:
    """Give an empty cache the buffers that it has at `context` positions, when `rows` rows are verified at a time.

    Returns the bytes of what waits of one of the target's hidden rows.
    """
    cache.reserve(context)
    read = max(1, len(cache.heads))  # the last depth's first row is there
    hidden = model.hidden(mx.zeros((1, read), mx.int32), cache.layers)
    if not cache.is_mlx_lm:
        if cache.heads:
            cache.push(hidden)
            _read(model, cache, read)
        cache.to_device()
        model.hidden(mx.zeros((1, rows), mx.int32), cache.layers)
    return pending(model, hidden).nbytes // hidden.shape[1]


def shaped(blank: PromptCache) -> PromptCache:
    """Return a cache of the layout of an empty one that holds a few tokens at rest; none of its arrays is computed.

    All heads have read a row, so that the cache has every array that a longer conversation has.
    """
    model: Any = blank.model
    cache, rows = blank.like_new(), len(blank.heads) + 2
    cache.push(model.hidden(mx.zeros((1, rows), mx.int32), cache.layers))
    _read(model, cache, rows)
    return cache


def _read(model: Target, cache: PromptCache, rows: int) -> None:
    """Let what drafts for the model, if anything does, read the first rows, which wait in the backlog."""
    if drafter := drafter_of(model):
        drafter.read(model, cache, [0] * (rows + 1), 0, rows, step=rows)


def plain_nbytes(cache: Any, context: int) -> int:
    """Count the bytes of one of mlx-lm's own caches, or of all within it, which hold something, at `context`."""
    if hasattr(cache, "caches"):
        return sum(plain_nbytes(c, context) for c in cache.caches)
    if getattr(cache, "keys", None) is None:
        return cache.nbytes
    slots = min(context, getattr(cache, "max_size", None) or context)
    return cache.nbytes // cache.keys.shape[2] * slots


def scratch(model: Target, cache: PromptCache, context: int, rows: int) -> int:
    """Estimate the bytes that reading the last `rows` of `context` positions holds beside weights and caches.

    Arguments are those of `graph_of`. 0 where MLX cannot export the model's graph.
    """
    return peak(graph_of(model, cache, context, rows))


def graph_of(model: Target, cache: PromptCache, context: int, rows: int) -> list[dict]:
    """Export the graph that reads the last `rows` of `context` positions, computing nothing; [] where MLX cannot.

    cache: one that was filled for that context; what it holds is not changed. mlx-lm's own caches are taken to be
    empty.
    """
    kept = [(name, array) for name, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)]
    states = [(c, c.parts, c.offset, c.limit) for c in cache.layers if not c.is_mlx_lm]
    inputs = [array for _, array in kept] + [part for _, parts, *_ in states for part in parts]
    events: list[dict] = []

    def forward(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        given = iter(arrays)
        model.load_weights([(name, next(given)) for name, _ in kept], strict=False)
        for c, parts, *_ in states:
            c.parts = tuple(next(given) for _ in parts)
            c.seek(context - rows, context - rows)
        layers: list[Any] = cache.layers if states else [MlxLmCaches()]
        hidden = model.hidden(tokens, layers)
        return [model.logits(hidden[:, -1:]), *(part for c, *_ in states for part in c.parts)]

    try:
        mx.export_function(events.append, forward, mx.zeros((1, rows), mx.int32), *map(mx.zeros_like, inputs))
    except (ValueError, KernelRefused):
        return []
    finally:
        model.load_weights(kept, strict=False)
        for c, parts, offset, limit in states:
            c.parts = parts
            c.seek(offset, limit)
    return events


def peak(events: list[dict]) -> int:
    """Find the most bytes held at once while an exported graph's operations run in order, inputs not counted."""
    operations, kept = _operations(events)
    left = Counter(chain(kept, *(reads for _, reads, _ in operations)))
    held: dict[str, int] = {}
    leaving = deque([0] * LAG)
    now = most = 0
    for name, reads, makes in operations:
        for array in reads:
            left[array] -= 1
        freed = [held.pop(array) for array in {*reads} & held.keys() if not left[array]]
        if name in IN_PLACE and len(makes) == 1 and max(freed, default=0) >= sum(makes.values()):
            makes = dict.fromkeys(makes, max(freed))  # it takes that buffer over
            now -= max(freed)
            freed.remove(max(freed))
        held |= {array: size for array, size in makes.items() if left[array]}
        now += sum(makes.values())
        most = max(most, now)
        leaving.append(sum(freed) + sum(size for array, size in makes.items() if not left[array]))
        now -= leaving.popleft()
    return most


def _operations(events: list[dict]) -> tuple[list[tuple[str, list[str], dict[str, int]]], list[str]]:
    """List an exported graph's operations: name, arrays that it reads, bytes of those that it makes.

    And the arrays that are left at the end. Views are not made; who reads one reads the array behind it.
    """
    behind: dict[str, str] = {}
    operations: list[Any] = []
    kept: list[str] = []
    for event in events:
        if event["type"] == "outputs":
            kept = [name for name, *_ in event["outputs"]]
        elif event["type"] == "primitive":
            reads = [behind.get(name, name) for name, *_ in event["inputs"]]
            makes = {name: math.prod(shape) * dtype.size for name, shape, dtype in event["outputs"]}
            if reads and event["name"] in VIEWS:
                behind |= dict.fromkeys(makes, reads[0])
                makes = {}
            operations.append((event["name"], reads, makes))
    return operations, [behind.get(name, name) for name in kept]
