"""Compute the experts of a few rows, from router logits to the weighted sum; each distinct expert is read once."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from ._quantized import (
    DEVICE,
    Quantized,
    arrays,
    check_columns,
    dequantized,
    format_template,
    lane_values,
    served,
    small,
)
from ._routing import Pairs, Routing, room, routable, route_metal, route_ref
from ._source import DTYPES, constants, launch, on_metal
from .verify_qmm import activated

COLUMNS = 4  # weight rows per simdgroup
VISITS = (1, 4, 8)  # compiled sizes of a group of rows that visit the same expert
SPLIT_INNER, SPLIT_DOWN = 2, 4  # the sizes if rows are split
INNER_SIMDGROUPS, DOWN_SIMDGROUPS = 2, 4  # per threadgroup


@dataclass(frozen=True)
class Experts:
    """The weights of all experts: w [E, N, K * bits / 32], scales and biases [E, N, K / group_size].

    gate and up have one format and [E, I, H], down has [E, H, I]. The activation is silu(gate) * up, without a gate
    relu(up)². Raises ValueError if they do not match.
    """

    gate: Quantized | None
    up: Quantized
    down: Quantized

    def __post_init__(self):
        up = self.up
        if self.gate is not None and (self.gate.format != up.format or self.gate.w.shape != up.w.shape):
            raise ValueError(f"gate is {_named(self.gate)} and up {_named(up)}; they must be alike")
        e, i, _ = up.w.shape
        if self.down.w.shape[:2] != (e, up.k) or self.down.k != i:
            name = "up" if self.gate is None else "gate"
            raise ValueError(f"down is {_named(self.down)}; with {name} {_named(up)} it must be [{e}, {up.k}, {i}]")

    @cached_property
    def stored(self) -> list[Quantized]:
        """The matrices that exist: without `gate` two."""
        return [w for w in (self.gate, self.up, self.down) if w is not None]

    @cached_property
    def known(self) -> bool:
        """Whether the kernels support the formats, and the arrays are in device memory."""
        return all(served(w.mode, w.bits, w.group_size) and not small(w) for w in self.stored)

    def dtype(self, x: mx.array) -> mx.Dtype:
        """Return the type in which MLX computes the products."""
        affine = [(w.scales, w.biases) for w in self.stored if w.biases is not None]
        return mx.result_type(x, *(a for pair in affine for a in pair))


def _named(weights: Quantized) -> str:
    e, n, _ = weights.w.shape
    return f"[{e}, {n}, {weights.k}] of {weights.bits} bits ({weights.mode}, {weights.group_size})"


def verify_moe_ref(
    x: mx.array,
    logits: mx.array,
    experts: Experts,
    routing: Routing,
    *,
    bias: mx.array | None = None,
    limit: float | None = None,
    shared: mx.array | None = None,
    shared_gate: mx.array | None = None,
) -> mx.array:
    """Return the weighted sum of the chosen experts, dequantized, in float32: the reference of `verify_moe`.

    The sum is rounded once, before the shared output is added. Arguments are the same, without `split`.
    """
    visited, weights = route_ref(logits, routing, bias)
    rows = x.astype(mx.float32)[:, None, :, None]
    up = _of(visited, experts.up) @ rows
    if experts.gate is None:
        inner = mx.square(mx.maximum(up, 0))
    else:
        inner = activated(_of(visited, experts.gate) @ rows, up, limit)
    products = (_of(visited, experts.down) @ inner).squeeze(-1)
    y = (products * weights[..., None]).sum(axis=1).astype(x.dtype)
    if shared is not None:
        y = y + (shared if shared_gate is None else mx.sigmoid(shared_gate) * shared)
    return y.astype(x.dtype)


def _of(visited: mx.array, weights: Quantized) -> mx.array:
    """Return the weights of the visited experts, [M, top_k, N, K] in float32."""
    biases = None if weights.biases is None else weights.biases[visited]
    return dequantized(replace(weights, w=weights.w[visited], scales=weights.scales[visited], biases=biases))


def visitors(m: int, most: int = VISITS[-1]) -> int:
    """Return the number of an expert's rows processed together, for m rows: one of VISITS or, if less, `most`."""
    return min(next((rows for rows in VISITS if rows >= m), most), most)


def moe_splits(m: int) -> bool:
    """Return whether verify_moe with `split`, for m rows, processes fewer rows of an expert together."""
    return visitors(m) > SPLIT_INNER


def _template(weights: Quantized, dtype: mx.Dtype, rows: int) -> dict[str, object]:
    """Return the template arguments that the products with up and down share; `rows` are processed together.

    VALUES, the values of K that a lane reads at a time, is that of MLX 0.32.4's gather_qmv_fast or, where that does
    not support K, gather_qmv; for block formats 16. N is a multiple of 8.
    """
    return {**format_template(weights, dtype), "VALUES": lane_values(weights), "ROWS": rows}


def _inner_metal(x: mx.array, experts: Experts, pairs: Pairs, limit: float | None, split: bool) -> mx.array:
    """Return `down`'s input, [pairs, I]: the activation of gate and up for each pair of a row and its expert."""
    n, count, op = experts.up.w.shape[1], pairs.tokens.size, "moe_relu2"
    inputs = {**arrays(experts.up, x.dtype, "up"), "x": x}
    if experts.gate is not None:
        op, inputs = "moe_glu", {**arrays(experts.gate, x.dtype, "gate"), **inputs}
        inputs["limit"] = constants(x.dtype, math.inf if limit is None else limit)
    inputs |= {"tokens": pairs.tokens, "experts": pairs.experts, "starts": pairs.starts}
    rows = visitors(x.shape[0], SPLIT_INNER if split else VISITS[-1])
    template = _template(experts.up, x.dtype, rows)
    grid, group = (32, n // COLUMNS, count), (32, INNER_SIMDGROUPS, 1)
    return launch(op, inputs, {"h": ((count, n), x.dtype)}, template=template, grid=grid, group=group)[0]


def _down_metal(
    h: mx.array,
    down: Quantized,
    pairs: Pairs,
    routing: Routing,
    shared: tuple[mx.array | None, mx.array | None],
    split: bool,
) -> mx.array:
    m, n, kind = h.shape[0] // routing.top_k, down.w.shape[1], sum(a is not None for a in shared)
    of_shared = h if shared[0] is None else shared[0].astype(h.dtype)
    of_gate = constants(h.dtype, 0.0) if shared[1] is None else shared[1].astype(h.dtype)
    inputs = {**arrays(down, h.dtype), "h": h, "weights": pairs.weights, "experts": pairs.experts}
    inputs |= {"starts": pairs.starts, "places": pairs.places}
    inputs |= {"sizes": routing.sizes, "shared": of_shared, "shared_gate": of_gate, "kind": constants(mx.int32, kind)}
    template = {
        **_template(down, h.dtype, visitors(m, SPLIT_DOWN if split else VISITS[-1])),
        "SIMDGROUPS": DOWN_SIMDGROUPS,
        "PAIRS": room(m, routing.top_k),
    }
    grid, group = (32, DOWN_SIMDGROUPS * n // COLUMNS, 1), (32, DOWN_SIMDGROUPS, 1)
    return launch("moe_down", inputs, {"y": ((m, n), h.dtype)}, template=template, grid=grid, group=group)[0]


def verify_moe(
    x: mx.array,
    logits: mx.array,
    experts: Experts,
    routing: Routing,
    *,
    bias: mx.array | None = None,
    limit: float | None = None,
    shared: mx.array | None = None,
    shared_gate: mx.array | None = None,
    split: bool = False,
) -> mx.array:
    """Return the weighted sum of the experts that x [M, H] visits by its logits [M, E]: [M, H] in x's dtype.

    `bias` [E] affects a sigmoid's selection; `limit`, allowed only with a gate, is the maximum of silu(gate), and up
    is clipped to -limit..limit; `shared` [M, H] is added last, multiplied with sigmoid(shared_gate [M, 1]) if that is
    given.

    On Metal, up to 16 rows, 512 experts, 32 groups and a top_k of 32 take three launches. Each distinct expert's
    weights are requested once per 8 rows that visit it; with `split`, gate and up once per 2, and down once per 4. A
    product has the bits of MLX's gather_qmv, and a row those that it has alone. For other sizes, types or formats,
    and elsewhere, the reference runs. Raises ValueError if x, logits or the routing do not fit the experts, and for a
    bias with softmax, a limit without a gate, or a shared_gate without `shared`.
    """
    check_columns(x, experts.up)
    rows, count = x.shape[0], experts.up.w.shape[0]
    if logits.shape != (rows, count):
        raise ValueError(f"logits are {logits.shape}; {rows} rows and {count} experts need {(rows, count)}")
    if shared_gate is not None and shared is None:
        raise ValueError(
            "shared_gate is given without shared, the output that it gates; give shared too, or leave out shared_gate"
        )
    if bias is not None and routing.kind == "softmax":
        raise ValueError("a bias is given; softmax routing has none: leave it out")
    if limit is not None and experts.gate is None:
        raise ValueError(f"limit={limit} is given; experts without a gate have none: leave it out")
    routing.check(count)
    dtype = experts.dtype(x)
    known = experts.known and dtype in DTYPES and x.size >= DEVICE and routable(logits, routing)
    if not (on_metal() and known):
        more = {"bias": bias, "limit": limit, "shared": shared, "shared_gate": shared_gate}
        return verify_moe_ref(x, logits, experts, routing, **more)
    pairs = route_metal(logits, routing, bias)
    h = _inner_metal(x.astype(dtype), experts, pairs, limit, split)
    return _down_metal(h, experts.down, pairs, routing, (shared, shared_gate), split).astype(x.dtype)
