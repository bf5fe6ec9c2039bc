"""Count the launches of a graph on a GPU, without a GPU: primitives that are not views, and copies of views.

Two graphs of a function are used. The first is built as by mlx-lm, fused by `mx.compile`, and gives the number of
launches. The second is recorded without fusion and has each primitive's arguments, from which layouts follow. It
shows where MLX copies: before a reshape that strides cannot express, and before a kernel that needs contiguous rows.
Nothing is computed.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.models import gated_delta

from mlx_mtp.bench import census

Strides = tuple[int, ...]
RESHAPES = ("Reshape", "Flatten", "Unflatten")
EDGE = re.compile(
    r'\{ (\d+) \[label ="(\w+)"|(\S+) -> (\S+)'
)  # of `mx.export_to_dot`: a primitive, or an array next to one
ENSURED = 9  # index of the argument of a CustomKernel that makes its inputs contiguous


class OneOperation:
    """Replaces a Metal kernel by one operation that reads all of its inputs."""

    def __init__(self, **_: Any):
        pass

    def __call__(self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        arrays = [a for a in inputs if isinstance(a, mx.array)]
        launched = mx.negative(mx.depends(arrays[:1], arrays[1:])[0])
        outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        return mx.depends(outputs, [launched])


def one(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return mx.negative(x)


def attention(kernel: Callable[..., Any], q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
    return _launch(kernel, [q, k, v], (*q.shape[:-1], v.shape[-1]))


def dequantize(kernel: Callable[..., Any], w: mx.array, scales: mx.array, *_: Any, group_size: int, **__: Any) -> Any:
    return _launch(kernel, [scales, w], (*scales.shape[:-1], scales.shape[-1] * group_size))


def _launch(kernel: Callable[..., Any], inputs: list[mx.array], shape: Sequence[int]) -> mx.array:
    one_thread = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    (out,) = kernel(inputs=inputs, **one_thread, output_shapes=[shape], output_dtypes=[inputs[0].dtype])
    return out


@contextmanager
def as_on_a_mac(kernel: Callable[..., Any] = mx.fast.metal_kernel) -> Iterator[None]:
    """Make MLX choose kernels, and make functions that are one launch on a GPU one operation, inside the block.

    kernel: creates kernels; those of MLX's own function can be called only while a graph is recorded.
    """
    made = partial(kernel, source=";", ensure_row_contiguous=False)
    attends = partial(attention, made(name="attention", input_names=["q", "k", "v"], output_names=["out"]))
    expands = partial(dequantize, made(name="dequantize", input_names=["scales", "w"], output_names=["out"]))
    replaced = [(mx.metal, "is_available", lambda: True), (mx, "default_device", lambda: mx.Device(mx.gpu))]
    replaced += [(mx.fast, "rms_norm", one), (mx.fast, "rope", one), (mx, "dequantize", expands)]
    replaced += [
        (mx, "contiguous", one),
        (mx.fast, "scaled_dot_product_attention", attends),
        (mx.fast, "metal_kernel", kernel),
    ]
    names, outputs = ["q", "k", "v", "g", "beta", "state_in", "T"], ["y", "state_out"]
    for form in ("", "_masked", "_vec", "_packed"):  # mlx-lm creates these on import if Metal is available
        inputs = [*names, *(["mask"] if form == "_masked" else [])]
        own = kernel(name=f"recurrence{form}", input_names=inputs, output_names=outputs, source=";")
        replaced.append((gated_delta, f"_gated_delta_kernel{form}", own))
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def launches(fn: Callable[..., Any], make: Callable[[], Sequence[mx.array]]) -> Counter:
    """Return the launches of fn(*make()) by primitive; "Copy" is a copy before a reshape or a kernel.

    make: returns arrays that fn may change; both functions are called twice, once per graph.
    """
    arrays = make()
    with as_on_a_mac(OneOperation):
        found = census.operations(*fn(*arrays))
    with as_on_a_mac():
        return found + Counter(Copy=copies(fn, *make()))


def total(fn: Callable[..., Any], make: Callable[[], Sequence[mx.array]]) -> int:
    return launches(fn, make).total()


def waits(fn: Callable[..., Any], make: Callable[[], Sequence[mx.array]]) -> int:
    """Return the number of launches of fn(*make()) that wait for an earlier one, in the order of the graph.

    MLX puts a barrier before a launch that reads an output of one since the last barrier; others run at the same
    time. A copy counts as such a launch.
    """
    arrays, dot = make(), io.StringIO()
    with as_on_a_mac(OneOperation):
        mx.export_to_dot(dot, *fn(*arrays))
    with as_on_a_mac():
        return barriers(dot.getvalue()) + copies(fn, *make())


def barriers(dot: str) -> int:
    """Return the number of barriers between the launches of a graph that `mx.export_to_dot` wrote."""
    made: dict[str, set[str]] = {}  # the launches that an array, or a view's primitive, comes from
    running, found = set[str](), 0
    views = set[str]()
    for node, name, source, target in EDGE.findall(dot):
        if node:
            made[node] = set()
            views |= {node} if name in census.VIEWS else set()
        elif source in made and source.isdigit():
            made[target] = made[source] if source in views else {source}
            if source not in views | running:
                found, running = (found + 1, {source}) if made[source] & running else (found, running | {source})
        else:
            made[target] |= made.get(source, set())
    return found


def copies(fn: Callable[..., Any], *arrays: mx.array) -> int:
    """Return the number of arrays in fn's graph that MLX copies before a reshape or a kernel."""
    events: list[dict[str, Any]] = []
    mx.export_function(events.append, fn, *arrays)
    layouts: dict[str, Strides] = {}
    return sum(_copies(event, layouts) for event in events if event["type"] == "primitive")


def _copies(event: dict[str, Any], layouts: dict[str, Strides]) -> int:
    """Record the layouts of one primitive's outputs, unless contiguous, and return its number of copies."""
    name, arguments = event["name"], event["arguments"]
    shapes = [shape for _, shape, _ in event["inputs"]]
    strides = [layouts.get(array, rows_first(shape)) for array, shape, _ in event["inputs"]]
    if name == "CustomKernel":
        scattered = [not _same(shape, at, rows_first(shape)) for shape, at in zip(shapes, strides, strict=True)]
        return sum(scattered) if arguments[ENSURED] else 0
    for array, shape, _ in event["outputs"]:
        if name in RESHAPES:
            found = reshaped(shapes[0], strides[0], shape)
            if found is None:
                return 1
        else:
            found = _viewed(name, arguments, shapes, strides, shape)
        layouts[array] = found
    return 0


def _viewed(name: str, arguments: Any, shapes: Sequence[Any], strides: Sequence[Strides], shape: Any) -> Strides:
    """Return the strides of the output of a primitive that is not a reshape."""
    if name == "Slice":
        return tuple(s * step for s, step in zip(strides[0], arguments[2], strict=True))
    if name in ("Split", "StopGradient", "Depends"):
        return strides[0]
    if name == "Transpose":
        return tuple(strides[0][axis] for axis in arguments[0])
    if name == "Broadcast":
        missing = len(shape) - len(shapes[0])
        kept = zip(shapes[0], shape[missing:], strides[0], strict=True)
        return (0,) * missing + tuple(s if old == new else 0 for old, new, s in kept)
    if name == "Squeeze":
        gone = {axis % len(shapes[0]) for axis in arguments[0]}
        return tuple(s for axis, s in enumerate(strides[0]) if axis not in gone)
    if name == "ExpandDims":
        added, kept = {axis % len(shape) for axis in arguments[0]}, iter(strides[0])
        return tuple(0 if axis in added else next(kept) for axis in range(len(shape)))
    layouts = {at for of, at in zip(shapes, strides, strict=True) if of == shape}
    if len(layouts) == 1 and all(of == shape or prod(of) == 1 for of in shapes) and _dense(shape, *layouts):
        return layouts.pop()  # elementwise: the layout of its input
    return rows_first(shape)


def rows_first(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def reshaped(shape: Sequence[int], strides: Strides, new: Sequence[int]) -> Strides | None:
    """Return strides for a new shape of the same buffer, as MLX does; None if it copies."""
    if not prod(shape) or _same(shape, strides, rows_first(shape)):
        return rows_first(new)
    sizes, steps = _collapsed(shape, strides)
    found: list[int] = []
    at = 0
    for n in new:
        if at < len(sizes) and sizes[at] % n == 0:
            sizes[at] //= n
            found.append(sizes[at] * steps[at])
            at += sizes[at] <= 1
        elif n == 1:
            found.append(found[-1])
        else:
            return None
    return tuple(found)


def _collapsed(shape: Sequence[int], strides: Strides) -> tuple[list[int], list[int]]:
    """Return sizes and strides after joining contiguous dimensions."""
    sizes: list[int] = []
    steps: list[int] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if sizes and steps[-1] == n * stride:
            sizes[-1], steps[-1] = sizes[-1] * n, stride
        else:
            sizes.append(n)
            steps.append(stride)
    return sizes, steps


def _same(shape: Sequence[int], a: Strides, b: Strides) -> bool:
    """Return whether strides agree in all dimensions of size above 1."""
    return all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


def _dense(shape: Sequence[int], strides: Strides) -> bool:
    """Return whether an array fills its buffer, in any order of dimensions."""
    order = sorted((stride, n) for n, stride in zip(shape, strides, strict=True) if n > 1)
    return all(stride == prod(n for _, n in order[:i]) for i, (stride, _) in enumerate(order))
