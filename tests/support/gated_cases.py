"""Create, cut and spoil the rows of a gated delta rule."""

import mlx.core as mx
import numpy as np
from metal_cases import exact

NAN = float("nan")


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def make_rows(T, *, dk=64, dv=8, hk=2, hv=4, B=1, dtype=mx.float32, gate="scalar", slow=False):
    """Return q and (k, v, g, beta) of T rows; `slow`: gates near 1, so that a state decays slowly."""
    q, k = (mx.random.normal((B, T, hk, dk)).astype(dtype) * dk**-0.5 for _ in range(2))
    v = mx.random.normal((B, T, hv, dv)).astype(dtype)
    g = mx.random.uniform(0.98 if slow else 0.2, 1.0, (B, T, hv, dk) if gate == "vector" else (B, T, hv))
    g = g.astype(dtype) if gate == "rounded" else g
    return q, (k, v, g, mx.random.uniform(0.05, 1.0, (B, T, hv)).astype(dtype))


def cut(rows, start, end):
    return tuple(x[:, start:end] for x in rows)


def spoiled(rows, n):
    """Return the rows with NaN from row n on."""
    return tuple(mx.concatenate([x[:, :n], mx.full(x[:, n:].shape, NAN, x.dtype)], axis=1) for x in rows)


def exactly(q, rows, state: np.ndarray):
    """Return y and the state after the rows in float64, computed row by row."""
    q, k, v, g, beta = (exact(x) for x in (q, *rows))
    (B, T, Hk, _), Hv, Dv = q.shape, v.shape[2], v.shape[3]
    y, state = np.zeros((B, T, Hv, Dv)), np.array(state, np.float64)
    for b, t, h in np.ndindex(B, T, Hv):
        key, query = k[b, t, h // (Hv // Hk)], q[b, t, h // (Hv // Hk)]
        decayed = state[b, h] * g[b, t, h]
        state[b, h] = decayed + np.outer((v[b, t, h] - decayed @ key) * beta[b, t, h], key)
        y[b, t, h] = state[b, h] @ query
    return y, state
