"""Estimate the memory of a model's caches and passes from shapes alone; no weights are read."""

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

# Primitives whose output is a view of their first input, or is written into its buffer.
VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Contiguous", "ExpandDims", "Flatten", "Reshape", "Slice"),
    *("DynamicSlice", "DynamicSliceUpdate", "ScatterAxis", "SliceUpdate", "Split", "Squeeze", "StopGradient"),
    *("Transpose", "Unflatten", "View"),
}
# Primitives that can write their output over an input that no other operation reads.
IN_PLACE = {
    *("Abs", "Add", "AsType", "Compiled", "Cos", "Divide", "Exp", "Log", "Maximum", "Minimum", "Multiply"),
    *("Negative", "RMSNorm", "RoPE", "Rsqrt", "Select", "Sigmoid", "Sin", "Softmax", "Sqrt", "Square", "Subtract"),
    "Tanh",
}
LAG = 32  # submitted operations that have not finished: their inputs are still held


def nbytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays; an array that occurs twice counts once."""
    arrays: Any = {id(value): value for _, value in tree_flatten(tree)}
    return sum(a.nbytes for a in arrays.values() if isinstance(a, mx.array))


def fill(model: Target, cache: PromptCache, context: int, rows: int) -> int:
    """Give an empty cache unevaluated arrays, as large as at `context` positions in cycles that verify `rows` rows.

    mlx-lm's caches get one row. Returns the bytes of one row in the backlog.
    """
    cache.reserve(context)
    read = max(1, len(cache.heads))  # rows, so that the last depth reads one
    hidden = model.hidden(mx.zeros((1, read), mx.int32), cache.layers)
    if not cache.is_mlx_lm:
        if cache.heads:
            cache.push(hidden)
            _prefill_drafter(model, cache, read)
        cache.to_device()
        model.hidden(mx.zeros((1, rows), mx.int32), cache.layers)
    return pending(model, hidden).nbytes // hidden.shape[1]


def shaped(blank: PromptCache) -> PromptCache:
    """Return a cache of the layout of `blank` that has read a few tokens, unevaluated, so that it has all arrays."""
    model: Any = blank.model
    cache, rows = blank.like_new(), len(blank.heads) + 2
    cache.push(model.hidden(mx.zeros((1, rows), mx.int32), cache.layers))
    _prefill_drafter(model, cache, rows)
    return cache


def _prefill_drafter(model: Target, cache: PromptCache, rows: int) -> None:
    if drafter := drafter_of(model):
        drafter.read(model, cache, [0] * (rows + 1), 0, rows, step=rows)


def plain_nbytes(cache: Any, context: int) -> int:
    """Return the bytes that one of mlx-lm's caches, which contains some tokens, has at `context` positions."""
    if hasattr(cache, "caches"):
        return sum(plain_nbytes(c, context) for c in cache.caches)
    if getattr(cache, "keys", None) is None:
        return cache.nbytes
    slots = min(context, getattr(cache, "max_size", None) or context)
    return cache.nbytes // cache.keys.shape[2] * slots


def scratch(model: Target, cache: PromptCache, context: int, rows: int) -> int:
    """Estimate the bytes of temporary arrays that prefilling the last `rows` of `context` positions needs.

    cache: filled for that context. 0 if `graph_of` returns [].
    """
    return peak(graph_of(model, cache, context, rows))


def graph_of(model: Target, cache: PromptCache, context: int, rows: int) -> list[dict]:
    """Return the events of the exported graph that prefills the last `rows` of `context` positions.

    [] if MLX cannot export it or a kernel is refused. Nothing is computed. cache: filled for that
    context; its contents do not change. mlx-lm's caches count as empty.
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
    """Return the maximum bytes that a graph, run in the order of `events`, holds at once, without its inputs."""
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
            makes = dict.fromkeys(makes, max(freed))  # it reuses that buffer
            now -= max(freed)
            freed.remove(max(freed))
        held |= {array: size for array, size in makes.items() if left[array]}
        now += sum(makes.values())
        most = max(most, now)
        leaving.append(sum(freed) + sum(size for array, size in makes.items() if not left[array]))
        now -= leaving.popleft()
    return most


def _operations(events: list[dict]) -> tuple[list[tuple[str, list[str], dict[str, int]]], list[str]]:
    """Return an exported graph's operations, as (name, inputs, bytes by output), and the graph's outputs.

    A view stays in the list, without outputs: operations that read the view, and the graph's outputs, name the array
    that it is a view of.
    """
    base: dict[str, str] = {}
    operations: list[Any] = []
    kept: list[str] = []
    for event in events:
        if event["type"] == "outputs":
            kept = [name for name, *_ in event["outputs"]]
        elif event["type"] == "primitive":
            reads = [base.get(name, name) for name, *_ in event["inputs"]]
            makes = {name: math.prod(shape) * dtype.size for name, shape, dtype in event["outputs"]}
            if reads and event["name"] in VIEWS:
                base |= dict.fromkeys(makes, reads[0])
                makes = {}
            operations.append((event["name"], reads, makes))
    return operations, [base.get(name, name) for name in kept]
