"""Merge the partial results of an attention whose keys were taken in chunks: its last launch."""

import mlx.core as mx

from ._source import kernel


def merge(
    partials: mx.array,
    ml: mx.array,
    rows: int,
    dtype: mx.Dtype,
    *,
    sinks: mx.array | None = None,
    gate: mx.array | None = None,
) -> mx.array:
    """Launch the merge: [1, L, Hq * Dv] of `dtype`, from the partial results of `rows` = L queries.

    partials: [Hkv, chunks, R, Dv] float32, the sums of p v of each chunk; R = G * L, row g * L + i, Hq = Hkv * G.
    ml: [Hkv, chunks, R, 2] float32, a chunk's largest score and its sum of p, which is 0 where a row sees nothing.
    sinks: [Hq]. gate: logits, [1, L, Hq] or [1, L, Hq * Dv].
    """
    Hkv, _, R, Dv = partials.shape
    assert R % rows == 0, f"{R} rows of {rows} queries"
    heads = Hkv * R // rows
    assert gate is None or gate.size in (rows * heads, rows * heads * Dv), f"a gate of shape {gate.shape}"
    gated = 0 if gate is None else 1 if gate.size == rows * heads else 2
    made = kernel("attention_merge", ("partials", "ml", "sinks", "gate"), ("y",), ("activations",))
    (y,) = made(
        inputs=[partials, ml, ml if sinks is None else sinks, ml if gate is None else gate.astype(dtype)],
        template=[("T", dtype), ("SINKS", sinks is not None), ("GATE", gated)],
        grid=(Dv, heads, rows),
        threadgroup=(min(Dv, 256), 1, 1),
        output_shapes=[(1, rows, heads * Dv)],
        output_dtypes=[dtype],
    )
    return y
