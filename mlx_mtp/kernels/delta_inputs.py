"""Compute the inputs of a gated-delta layer's recurrence: convolution, norms of q and k, and gates, in one launch.

Rows are summed as in MLX's depthwise kernel: in float32, from the oldest tap on, rounded once. Everything after the
sums is rounded as in MLX's ops: SiLU, norm and beta in the rows' types, the decay g in float32.
"""

from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from ._source import BLOCK, MOST_BLOCKS, constants, floats, launch, on_metal

EPS = 1e-6  # added to a head's sum of squares
SIMDGROUPS = 4


class Gates(NamedTuple):
    """a and b of the rows, [B, T, Hv] or, in groups, [B, T, G, Hv/G]; A_log and dt_bias [Hv] of the layer."""

    a: mx.array
    b: mx.array
    A_log: mx.array
    dt_bias: mx.array


class DeltaInputs(NamedTuple):
    """q, k [B, T, Hk, D] and v [B, T, C - 2 Hk D]; g and beta [B, T, Hv].

    rows [B, taps-1+T, C]: the taps-1 rows before the new ones, then the new ones; the next call's `before`.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    rows: mx.array


def delta_inputs_ref(
    x: mx.array,
    before: mx.array,
    weight: mx.array,
    gates: Gates,
    *,
    key_heads: int,
    head_dim: int,
    accepted: mx.array | None = None,
) -> DeltaInputs:
    """Return q, k, v, gates and rows by MLX's ops, with sums in float32: the reference of `delta_inputs`."""
    if accepted is not None:
        kept = accepted[:, None] + mx.arange(weight.shape[1] - 1)
        before = mx.take_along_axis(before, kept[..., None], axis=1)
    x = _grouped(x)
    keys, groups = key_heads * head_dim, x.shape[2]
    parts = mx.split(x, [keys // groups, 2 * keys // groups], axis=-1)
    rows = mx.concatenate([before, mx.concatenate([part.flatten(2) for part in parts], axis=-1)], axis=1)
    sums = mx.conv1d(rows.astype(mx.float32), weight.astype(mx.float32), groups=weight.shape[0])
    q, k, v = mx.split(nn.silu(sums.astype(x.dtype)), [keys, 2 * keys], axis=-1)
    q, k = (
        scale * mx.fast.rms_norm(heads.reshape(*x.shape[:2], key_heads, head_dim), None, EPS / head_dim)
        for heads, scale in zip((q, k), _scales(head_dim), strict=True)
    )
    g = mx.exp(-mx.exp(gates.A_log.astype(mx.float32)) * nn.softplus(gates.a.flatten(2) + gates.dt_bias))
    return DeltaInputs(q, k, v, g, mx.sigmoid(gates.b.flatten(2)), rows)


def _grouped(x: mx.array) -> mx.array:
    return x if x.ndim == 4 else x[:, :, None]


def _scales(head_dim: int) -> tuple[float, float]:
    """Return the factors of q and k after an RMS norm: to unit length, and for q also the recurrence's scale."""
    return (head_dim**-0.5) ** 2, head_dim**-0.5


def delta_inputs(
    x: mx.array,
    before: mx.array,
    weight: mx.array,
    gates: Gates,
    *,
    key_heads: int,
    head_dim: int,
    accepted: mx.array | None = None,
) -> DeltaInputs:
    """Return the DeltaInputs of new rows of B sequences, which follow the first `accepted` rows of a tape.

    The SiLU of a causal depthwise convolution is split into q, k and v; q and k are normed to unit length per head,
    and q is scaled by head_dim ** -0.5.

    x: [B, T, C] float16, bfloat16 or float32; or [B, T, G, C/G], the heads in G groups, each with its q, k and v.
    before: [B, taps-1+P, C], the rows before and on the tape of P rows, q, k and v of all heads; rows after the
        accepted may hold anything. weight: [C, taps, 1]. before and weight have x's dtype.
    gates: of any of these dtypes; g = exp(-exp(A_log) softplus(a + dt_bias)) is float32, beta = sigmoid(b) has b's
    dtype.
    accepted: [B] int32, from 0 to P. None: there is no tape, P = 0. Any array may be a view. Raises ValueError if
    `before` has too few rows or a tape without `accepted`, or x does not have the heads' channels.
    """
    tape = before.shape[1] - (weight.shape[1] - 1)
    if tape < 0 or (tape > 0 and accepted is None):
        needed = f"{weight.shape[1] - 1} rows" + (" without `accepted`" if tape > 0 else " or more")
        raise ValueError(f"before has {before.shape[1]} rows; it must have {needed}")
    x, gates = _grouped(x), gates._replace(a=_grouped(gates.a), b=_grouped(gates.b))
    C, keys = weight.shape[0], 2 * key_heads * head_dim
    if x.shape[2] * x.shape[3] != C or keys > C or key_heads % x.shape[2]:
        heads = f"{C} channels, {keys} of them q and k of {key_heads} heads"
        raise ValueError(f"x has shape {x.shape}; it must be [B, T, C] or [B, T, G, C/G] for {heads}")
    alike = x.dtype == before.dtype == weight.dtype and floats(x, *gates)
    if not (on_metal() and alike and head_dim <= BLOCK * MOST_BLOCKS):
        return delta_inputs_ref(x, before, weight, gates, key_heads=key_heads, head_dim=head_dim, accepted=accepted)
    taps, (B, T), Hv, Hk, D = weight.shape[1], x.shape[:2], gates.A_log.size, key_heads, head_dim
    values, blocks = C - keys, -(-D // BLOCK)
    units = 2 * Hk - (-values // (blocks * BLOCK)) - (-Hv // 32)
    of_keys = (B, T, Hk, D), x.dtype
    inputs = {"before": before, "accepted": constants(mx.int32, *[0] * B) if accepted is None else accepted}
    inputs |= {"x": x, "w": weight, **gates._asdict(), "layout": constants(mx.int32, Hk, D)}
    inputs |= {"scales": constants(x.dtype, *_scales(D)), "eps": constants(mx.float32, EPS * _scales(D)[1] ** 2)}
    outputs = {"q": of_keys, "k": of_keys, "v": ((B, T, values), x.dtype), "g": ((B, T, Hv), mx.float32)}
    outputs |= {"beta": ((B, T, Hv), gates.b.dtype), "rows": ((B, taps - 1 + T, C), x.dtype)}
    template = {"T": x.dtype, "A": mx.result_type(gates.a, gates.dt_bias), "B": gates.b.dtype, "BLOCKS": blocks}
    grid, group = (32, units, B * (taps - 1 + T)), (32, SIMDGROUPS, 1)
    return DeltaInputs(*launch("delta_inputs", inputs, outputs, template=template, grid=grid, group=group))
