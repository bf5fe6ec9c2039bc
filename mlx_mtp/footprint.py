"""What a model's forward pass holds in memory, told by its graph: shapes only, nothing is computed or read from disk."""

from collections import Counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .draft import prime
from .plain_cache import PlainCache
from .prompt_cache import PromptCache

# Primitives whose output is a view of their first input, or is written into it.
VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Contiguous", "ExpandDims", "Flatten", "Reshape", "Slice"),
    *("DynamicSlice", "DynamicSliceUpdate", "ScatterAxis", "SliceUpdate", "Split", "Squeeze", "StopGradient"),
    *("Transpose", "Unflatten", "View"),
}
# Those that may write their output over an input that nothing else reads.
IN_PLACE = {
    *("Abs", "Add", "AsType", "Compiled", "Cos", "Divide", "Exp", "Log", "Maximum", "Minimum", "Multiply", "Negative"),
    *("RMSNorm", "RoPE", "Rsqrt", "Select", "Sigmoid", "Sin", "Softmax", "Sqrt", "Square", "Subtract", "Tanh"),
}


def nbytes(tree: Any) -> int:
    """Of the arrays of a tree, each counted once."""
    arrays: Any = {id(value): value for _, value in tree_flatten(tree)}
    return sum(a.nbytes for a in arrays.values() if isinstance(a, mx.array))


def fill(model: Any, cache: PromptCache, context: int, rows: int) -> None:
    """Give an empty cache the buffers that it has at `context` positions, when `rows` rows are verified at a time."""
    cache.reserve(context)
    hidden = model.hidden(mx.zeros((1, 1), mx.int32), cache.layers)
    if isinstance(cache.layers[0], PlainCache):
        return
    if cache.heads:
        cache.push(hidden)
        prime(model, cache, [0, 0], 0, 1, step=1)
    cache.to_device()
    model.hidden(mx.zeros((1, rows), mx.int32), cache.layers)


def scratch(model: Any, cache: PromptCache, context: int, rows: int) -> int:
    """Bytes that reading the last `rows` of `context` positions holds at once, beside weights and caches.

    cache: one that was filled for that context; what it holds is not changed.
    """
    kept = tree_flatten(model.parameters())
    names, parameters = [name for name, _ in kept], [blank(array) for _, array in kept]
    states = [(c, c.parts, c.offset, c.limit) for c in cache.layers]
    parts = [[blank(part) for part in c.parts] for c in cache.layers]
    events: list[dict] = []

    def forward(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        given = iter(arrays)
        model.load_weights([(name, next(given)) for name in names], strict=False)
        for c in cache.layers:
            c.parts = tuple(next(given) for _ in c.parts)
            c.seek(context - rows, context - rows)
        hidden = model.hidden(tokens, cache.layers)
        return [hidden, model.logits(hidden[:, -1:]), *(part for c in cache.layers for part in c.parts)]

    try:
        flat = [part for own in parts for part in own]
        mx.export_function(events.append, forward, mx.zeros((1, rows), mx.int32), *parameters, *flat)
    finally:
        model.load_weights(kept, strict=False)
        for c, held, offset, limit in states:
            c.parts = held
            c.seek(offset, limit)
    return peak(events)


def blank(array: mx.array) -> mx.array:
    """An array of the same shape and type that holds nothing."""
    return mx.zeros(array.shape, array.dtype)


def peak(events: list[dict]) -> int:
    """Most bytes alive at once while the operations of an exported graph run in order; its inputs are not counted."""
    primitives = [e for e in events if e["type"] == "primitive"]
    outputs = next(e["outputs"] for e in events if e["type"] == "outputs")
    root: dict[str, str] = {}  # of a view: what it is a view of
    uses = Counter(name for name, *_ in outputs)
    for e in primitives:
        names = [name for name, *_ in e["inputs"]]
        for name, *_ in e["outputs"] if e["name"] in VIEWS and names else ():
            root[name] = root.get(names[0], names[0])
    for e in primitives:
        uses.update(name for name, *_ in e["inputs"])
    left: Counter = Counter()
    for name, count in uses.items():
        left[root.get(name, name)] += count
    alive, now, most = {}, 0, 0
    for e in primitives:
        owners = {root.get(name, name) for name, *_ in e["inputs"]}
        for name, *_ in e["inputs"]:
            left[root.get(name, name)] -= 1
        ending = {name: alive[name] for name in owners if name in alive and not left[name]}
        made = {name: size(shape, dtype) for name, shape, dtype in e["outputs"] if name not in root}
        over = e["name"] in IN_PLACE and max(ending.values(), default=0) >= sum(made.values())
        now += sum(made.values())
        most = max(most, now - (sum(made.values()) if over else 0))
        alive |= made
        for name in [*ending, *(name for name in made if not left[name])]:
            now -= alive.pop(name)
    return most


def size(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    """Bytes of an array."""
    n = dtype.size
    for length in shape:
        n *= length
    return n
