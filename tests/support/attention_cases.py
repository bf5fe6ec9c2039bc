"""Create attention cases of a verify: caches with NaN in slots that must not be read, and float64 references."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from metal_cases import exact

from mlx_mtp.kernels import verify_attention

WILD = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)


@dataclass(frozen=True)
class Case:
    """Attention at Hkv * G heads of L queries from position `offset` on; gate: None, "head" or "value"."""

    Hkv: int = 1
    G: int = 2
    L: int = 3
    D: int = 32
    Dv: int = 32
    dtype: mx.Dtype = mx.float32
    offset: int = 20
    slots: int = 64
    window: int | None = None
    start: int = 0
    sinks: bool = False
    gate: str | None = None
    bits: int | None = None
    group: int = 32

    @property
    def scale(self) -> float:
        return self.D**-0.5

    def slot(self, position):
        return position if self.window is None else position % self.slots

    def seen(self, i: int) -> np.ndarray:
        """The positions that query i sees, in order."""
        own = self.offset + i
        first = 0 if self.window is None else max(0, own - self.window + 1)
        return np.arange(max(first, min(self.start, own)), own + 1)


@dataclass
class Drawn:
    """The arrays of a case; keys and values by position, before they are stored in slots."""

    case: Case
    q: mx.array
    keys: mx.array
    values: mx.array
    sinks: mx.array | None
    gate: mx.array | None

    def rows(self, first: int, last: int) -> "Drawn":
        """Queries first to last - 1 alone, at their own position."""
        case = replace(self.case, offset=self.case.offset + first, L=last - first)
        gate = None if self.gate is None else self.gate[:, first:last]
        return Drawn(case, self.q[:, :, first:last], self.keys, self.values, self.sinks, gate)


def draw(case: Case, seed: int = 0) -> Drawn:
    mx.random.seed(seed)
    heads, n = case.Hkv * case.G, case.offset + case.L
    q = (1.5 * mx.random.normal((1, heads, case.L, case.D))).astype(case.dtype)
    keys = mx.random.normal((1, case.Hkv, n, case.D)).astype(case.dtype)
    values = (mx.random.normal((1, case.Hkv, n, case.Dv)) + 0.5).astype(case.dtype)
    sinks = mx.random.normal((heads,)).astype(case.dtype) if case.sinks else None
    width = {None: 0, "head": heads, "value": heads * case.Dv}[case.gate]
    gate = mx.random.normal((1, case.L, width)).astype(case.dtype) if width else None
    return Drawn(case, q, keys, values, sinks, gate)


def stored(x: mx.array, case: Case, seen: np.ndarray, slots: int):
    """Return a buffer with x of the positions `seen` in their slots; other slots hold NaN and infinities."""
    buffer = np.resize(WILD, (*x.shape[:2], slots, x.shape[3]))
    buffer[:, :, case.slot(seen)] = np.array(x.astype(mx.float32))[:, :, seen]
    if case.bits is None:
        return mx.array(buffer).astype(case.dtype)
    w, scales, biases = mx.quantize(mx.array(np.nan_to_num(buffer)).astype(case.dtype), case.group, case.bits)
    unseen = np.ones((slots, 1), bool)
    unseen[case.slot(seen)] = False
    return w, mx.where(mx.array(unseen), float("nan"), scales), mx.where(mx.array(unseen), float("inf"), biases)


def attended(drawn: Drawn, *, slots: int | None = None, limit: int | None = None, hidden: int = 0) -> mx.array:
    """Return verify_attention over buffers with only the visible positions, without the last `hidden` of them."""
    case = drawn.case
    last = case.offset + case.L - hidden
    seen = np.arange(case.seen(0)[0], last)
    k, v = (stored(x, case, seen, slots or case.slots) for x in (drawn.keys, drawn.values))
    return verify_attention(
        *(drawn.q, k, v, mx.array([case.offset])),
        scale=case.scale,
        limit=limit or case.offset + case.L,
        window=case.window,
        start=case.start,
        sinks=drawn.sinks,
        gate=drawn.gate,
        group_size=case.group,
        bits=case.bits,
    )


def kept(x: mx.array, case: Case) -> mx.array:
    """Return a cache's version of x, in float32 if it is quantized."""
    if case.bits is None:
        return x
    w, *rest = mx.quantize(x, case.group, case.bits)
    return mx.dequantize(w, *(r.astype(mx.float32) for r in rest), case.group, case.bits, dtype=mx.float32)


def in_float64(drawn: Drawn) -> np.ndarray:
    """Return [L, Hq * Dv]: each query over exactly its visible positions."""
    case, q = drawn.case, exact(drawn.q)
    k, v = (exact(kept(x, case)) for x in (drawn.keys, drawn.values))
    out = np.empty((case.L, case.Hkv * case.G, case.Dv))
    for i in range(case.L):
        for h in range(case.Hkv * case.G):
            seen = case.seen(i)
            scores = k[0, h // case.G, seen] @ q[0, h, i] * case.scale
            sink = [] if drawn.sinks is None else [exact(drawn.sinks)[h]]
            p = np.exp(np.append(scores, sink) - max([scores.max(), *sink]))
            out[i, h] = p[: len(seen)] @ v[0, h // case.G, seen] / p.sum()
    if drawn.gate is not None:
        out /= 1 + np.exp(-exact(drawn.gate).reshape(case.L, out.shape[1], -1))
    return out.reshape(case.L, -1)


def by_stock(drawn: Drawn) -> mx.array:
    """Return [L, Hq * Dv], computed with MLX's own operations in the same type."""
    case, rows = drawn.case, []
    for i in range(case.L):
        seen = mx.array(case.seen(i))
        k, v = (kept(x, case).astype(case.dtype)[:, :, seen] for x in (drawn.keys, drawn.values))
        q = drawn.q[:, :, i : i + 1]
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=case.scale, sinks=drawn.sinks)
        rows.append(y.swapaxes(1, 2).reshape(1, 1, case.Hkv * case.G, case.Dv))
    y = mx.concatenate(rows, axis=1)
    if drawn.gate is not None:
        y = y * mx.sigmoid(drawn.gate).reshape(1, case.L, case.Hkv * case.G, -1)
    return y.reshape(case.L, -1)
