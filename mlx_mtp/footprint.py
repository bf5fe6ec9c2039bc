"""What a model holds in memory, told by its caches and its graph: shapes only, nothing is computed or read from disk."""

from collections import Counter, deque
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
LAG = 32  # operations that MLX has submitted and not done: what they read is still held


def nbytes(tree: Any) -> int:
    """Of the arrays of a tree, each counted once."""
    arrays: Any = {id(value): value for _, value in tree_flatten(tree)}
    return sum(a.nbytes for a in arrays.values() if isinstance(a, mx.array))


def fill(model: Any, cache: PromptCache, context: int, rows: int) -> int:
    """Give an empty cache the buffers that it has at `context` positions, when `rows` rows are verified at a time.

    Returns the bytes of one of the target's hidden rows.
    """
    cache.reserve(context)
    hidden = model.hidden(mx.zeros((1, 1), mx.int32), cache.layers)
    if not isinstance(cache.layers[0], PlainCache):
        if cache.heads:
            cache.push(hidden)
            prime(model, cache, [0, 0], 0, 1, step=1)
        cache.to_device()
        model.hidden(mx.zeros((1, rows), mx.int32), cache.layers)
    return hidden.nbytes


def plain_nbytes(caches: list[Any], context: int) -> int:
    """Bytes of mlx-lm's own caches, which hold something, at `context` positions."""
    total = 0
    for c in caches:
        if hasattr(c, "caches"):
            total += plain_nbytes(c.caches, context)
        elif getattr(c, "keys", None) is not None:
            slots = min(context, getattr(c, "max_size", None) or context)
            total += c.nbytes // c.keys.shape[2] * slots
        else:
            total += c.nbytes
    return total


def scratch(model: Any, cache: PromptCache, context: int, rows: int) -> int:
    """Bytes that reading the last `rows` of `context` positions holds at once, beside weights and caches.

    cache: one that was filled for that context; what it holds is not changed. mlx-lm's own caches are taken to be
    empty. 0 where MLX cannot tell a model's graph.
    """
    kept = [(name, array) for name, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)]
    states = [(c, c.parts, c.offset, c.limit) for c in cache.layers if not isinstance(c, PlainCache)]
    blanks = [blank(array) for _, array in kept] + [blank(part) for _, parts, *_ in states for part in parts]
    events: list[dict] = []

    def forward(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        given = iter(arrays)
        model.load_weights([(name, next(given)) for name, _ in kept], strict=False)
        for c, parts, *_ in states:
            c.parts = tuple(next(given) for _ in parts)
            c.seek(context - rows, context - rows)
        layers = cache.layers if states else [PlainCache()]
        hidden = model.hidden(tokens, layers)
        return [model.logits(hidden[:, -1:]), *(part for c, *_ in states for part in c.parts)]

    try:
        mx.export_function(events.append, forward, mx.zeros((1, rows), mx.int32), *blanks)
    except ValueError:
        return 0
    finally:
        model.load_weights(kept, strict=False)
        for c, parts, offset, limit in states:
            c.parts = parts
            c.seek(offset, limit)
    return peak(events)


def blank(array: mx.array) -> mx.array:
    """An array of the same shape and type that holds nothing."""
    return mx.zeros(array.shape, array.dtype)


def peak(events: list[dict]) -> int:
    """Most bytes held at once while the operations of an exported graph run in order; its inputs are not counted."""
    operations = [e for e in events if e["type"] == "primitive"]
    outputs = next(e["outputs"] for e in events if e["type"] == "outputs")
    root = _views(operations)
    left = Counter(root.get(name, name) for name, *_ in outputs)
    for e in operations:
        left.update(root.get(name, name) for name, *_ in e["inputs"])
    held: dict[str, int] = {}
    leaving: deque[int] = deque([0] * LAG)
    now = most = 0
    for e in operations:
        for name, *_ in e["inputs"]:
            left[root.get(name, name)] -= 1
        ending = {name for name in (root.get(name, name) for name, *_ in e["inputs"]) if not left[name]}
        freed = [held.pop(name) for name in ending & held.keys()]
        made = {name: _size(shape, dtype) for name, shape, dtype in e["outputs"] if name not in root}
        if e["name"] in IN_PLACE and len(made) == 1 and max(freed, default=0) >= sum(made.values()):
            made = dict.fromkeys(made, max(freed))  # it takes over that buffer
            now -= max(freed)
            freed.remove(max(freed))
        held |= {name: size for name, size in made.items() if left[name]}
        now += sum(made.values())
        most = max(most, now)
        leaving.append(sum(freed) + sum(size for name, size in made.items() if not left[name]))
        now -= leaving.popleft()
    return most


def _views(operations: list[dict]) -> dict[str, str]:
    """Of each view in a graph, the array that it is a view of."""
    root: dict[str, str] = {}
    for e in operations:
        if e["name"] in VIEWS and e["inputs"]:
            first = e["inputs"][0][0]
            root |= {name: root.get(first, first) for name, *_ in e["outputs"]}
    return root


def _size(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    n = dtype.size
    for length in shape:
        n *= length
    return n
