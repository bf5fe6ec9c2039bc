"""Attend from a few queries to a KV cache in one pass; each query has the bits that it has alone."""

import math
from typing import NamedTuple

import mlx.core as mx

from ._quantized import DEVICE
from ._source import Maybe, constants, floats, launch, on_metal, padded

StoredKeys = mx.array | tuple[mx.array, ...]  # keys or values: unquantized, or the results of mx.quantize

NAMES = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")
FIRST_CHUNKS = 1024  # first positions, in the smallest chunks
LEAST_CHUNK, MOST_LEAST, MOST_CHUNK = 32, 256, 512  # positions per chunk
GROUPS = 64  # threadgroups at FIRST_CHUNKS positions, enough for a GPU with many cores
SPLIT_BLOCKS = 4  # maximum blocks of 8 rows per threadgroup if rows are split
MEMORY = 32768  # bytes of threadgroup memory


class Chunks(NamedTuple):
    """Sizes of the chunks of positions, one per threadgroup: `least` positions up to FIRST_CHUNKS, doubling with each
    doubling of the position, up to `most`. See kernels/chunks.h.

    Sizes depend on the model's KV heads and window (in latent attention on Dv and type) only, so that bits depend
    neither on the length, which differs between a plain step and a verify, nor on the GPU. Small chunks give short
    sequences enough threadgroups; large chunks keep the partial results of long ones few.
    """

    least: int
    most: int

    @classmethod
    def of(cls, kv_heads: int, window: int | None = None) -> "Chunks":
        """Return sizes for about GROUPS threadgroups per sequence at FIRST_CHUNKS positions, or in a smaller window.

        `least` is a power of two from LEAST_CHUNK to MOST_LEAST; with a window all chunks have it.
        So with few KV heads there are fewer threadgroups, with many KV heads more.
        """
        least = min(window or FIRST_CHUNKS, FIRST_CHUNKS) * kv_heads // GROUPS
        least = min(max(1 << least.bit_length() >> 1, LEAST_CHUNK), MOST_LEAST)
        return cls(least, MOST_CHUNK if window is None else least)

    def up_to(self, limit: int) -> int:
        """Return the number of chunks of the positions below `limit`."""
        count, begin, size, end = 0, 0, self.least, FIRST_CHUNKS
        while size < self.most and limit > end:
            count, begin, size, end = count + (end - begin) // size, end, 2 * size, 2 * end
        return count - (begin - limit) // size


def _parts(stored: StoredKeys) -> tuple[mx.array, ...]:
    return (stored,) if isinstance(stored, mx.array) else tuple(stored)


def _plain(stored: StoredKeys, group_size: int, bits: int | None) -> mx.array:
    """Return keys or values in float32."""
    w, *rest = _parts(stored)
    if not rest:
        return w.astype(mx.float32)
    scales, biases = (x.astype(mx.float32) for x in rest)
    return mx.dequantize(w, scales, biases, group_size=group_size, bits=bits, dtype=mx.float32)


def _visible(offset: mx.array, rows: int, slots: int, window: int | None, start: int | mx.array) -> mx.array:
    """Return a boolean [N, L, S]: the slots that each sequence's queries attend to."""
    offset = mx.array(offset).reshape(-1, 1, 1)
    start = start.reshape(-1, 1, 1) if isinstance(start, mx.array) else start
    queries, slot = offset + mx.arange(rows)[:, None], mx.arange(slots)
    last = offset + (rows - 1)
    positions = slot if window is None else last - (last - slot) % slots
    mask = (positions <= queries) & (positions >= mx.minimum(start, queries))
    return mask if window is None else mask & (positions > queries - window)


def verify_attention_ref(
    q: mx.array,
    keys: StoredKeys,
    values: StoredKeys,
    offset: mx.array,
    *,
    scale: float,
    window: int | None = None,
    start: int | mx.array = 0,
    cache_rows: Maybe = None,
    sinks: mx.array | None = None,
    gate: mx.array | None = None,
    group_size: int = 64,
    bits: int | None = None,
) -> mx.array:
    """Attend to whole KV buffers with a mask, in float32, rounded before a gate: reference of `verify_attention`.

    Arguments and the result [N, L, Hq * Dv] are the same, without `limit` and `split`.
    """
    k, v = (_plain(x, group_size, bits) for x in (keys, values))
    if cache_rows is not None:
        k, v = k[cache_rows], v[cache_rows]
    N, Hq, L, _ = q.shape
    Hkv, S, Dv = v.shape[1:]
    mask = _visible(offset, L, S, window, start)[:, None, None]
    grouped = q.astype(mx.float32).reshape(N, Hkv, Hq // Hkv, L, -1)
    scores = mx.where(mask, scale * (grouped @ k[:, :, None].swapaxes(-1, -2)), -float("inf"))
    if sinks is not None:
        extra = sinks.astype(mx.float32).reshape(1, Hkv, -1, 1, 1)
        scores = mx.concatenate([mx.broadcast_to(extra, (*scores.shape[:-1], 1)), scores], axis=-1)
    p = mx.softmax(scores, axis=-1)[..., -S:]
    # A slot that no query attends to may hold anything, and 0 times infinity is not 0.
    v = mx.where(mx.any(mask, axis=-2)[..., None], v[:, :, None], 0.0)
    y = (p @ v).reshape(N, Hq, L, Dv).swapaxes(1, 2).astype(q.dtype)
    if gate is not None:
        y = y * mx.sigmoid(gate.astype(q.dtype).reshape(N, L, Hq, -1))
    return y.reshape(N, L, Hq * Dv)


def geometry(rows: int, Dv: int, split: bool = False) -> tuple[int, dict[str, int]]:
    """Return (threadgroups that share R = `rows` rows of a KV head, template arguments); no bits depend on them.

    Registers and threadgroup memory limit the rows of a threadgroup. With `split` a threadgroup has at most
    SPLIT_BLOCKS (4) blocks of 8 rows; each threadgroup requests keys and values.
    """
    wide = Dv > 256  # fewer threads share its columns, because a GPU may refuse a threadgroup of 512
    parts = 8 if wide and Dv % 64 == 0 else 4 if Dv > 192 else 2
    blocks, most = -(-rows // 8), 16 if Dv <= 192 else 2 if wide else 8
    most = min(most, SPLIT_BLOCKS) if split else most
    groups = -(-blocks // most)
    blocks = -(-blocks // groups)
    roomy = Dv // (8 * parts) > 4 and 8 * blocks * (64 + 4 + 2) * 4 <= MEMORY
    return groups, {"TILE": 64 if roomy else 32, "BLOCKS": blocks, "PARTS": parts}


def attention_splits(rows: int, Dv: int) -> bool:
    """Return whether `split` divides R rows of a KV head among more threadgroups, each with fewer registers."""
    return geometry(rows, Dv)[1]["BLOCKS"] > SPLIT_BLOCKS


def _width(parts: tuple[mx.array, ...], bits: int | None) -> int:
    return parts[0].shape[-1] * (32 // bits if bits else 1)


def _supported(q: mx.array, keys: StoredKeys, values: StoredKeys, group_size: int, bits: int | None) -> bool:
    """Return whether the kernel supports these: multiples of 32 dimensions, Dv <= 512, one type, a known format.

    Arrays of fewer than eight elements, which MLX passes in constant memory, are not supported.
    """
    k, v = _parts(keys), _parts(values)
    widths = q.shape[-1] % 32 == 0 and _width(v, bits) % 32 == 0 and _width(v, bits) <= 512
    stored = k + v if bits is None else k[1:] + v[1:]
    typed = floats(q) and all(x.dtype == q.dtype for x in stored)
    packed = bits is None or (bits in (4, 8) and group_size in (32, 64, 128))
    return widths and typed and packed and min(x.size for x in k + v) >= DEVICE


def _check(
    q: mx.array,
    k: tuple[mx.array, ...],
    v: tuple[mx.array, ...],
    offset: mx.array,
    start: int | mx.array,
    cache_rows: Maybe,
    gate: Maybe,
    bits: int | None,
) -> None:
    heads, kv_heads = q.shape[1], k[0].shape[1]
    if len(k) != (1 if bits is None else 3) or len(v) != len(k):
        raise ValueError(f"bits is {bits}, keys are {len(k)} arrays, values {len(v)}; without bits 1 each, else 3")
    count = len(q)
    if (cache_rows is None and count != len(k[0])) or heads % kv_heads:
        needed = "each sequence needs a cache, and each KV head a whole number of query heads"
        raise ValueError(f"q has shape {q.shape}, keys {k[0].shape}; {needed}")
    for name, given in (("offset", offset), ("start", start), ("cache_rows", cache_rows)):
        if isinstance(given, mx.array) and given.shape != (count,):
            raise ValueError(f"{name} has shape {given.shape}; {count} sequences need {(count,)}")
    if q.shape[-1] != _width(k, bits):
        raise ValueError(f"q has {q.shape[-1]} columns; the keys have {_width(k, bits)}")
    rows, width = q.shape[2], _width(v, bits)
    shapes = (count, rows, heads), (count, rows, heads * width), (count, rows, heads, width)
    if gate is not None and gate.shape not in shapes:
        raise ValueError(f"gate has shape {gate.shape}; it must be {shapes[0]}, {shapes[1]} or {shapes[2]}")


def merge(
    partials: mx.array,
    ml: mx.array,
    rows: int,
    dtype: mx.Dtype,
    *,
    sequences: int = 1,
    sinks: Maybe = None,
    gate: Maybe = None,
) -> mx.array:
    """Launch the merge of partial results: return [N, L, Hq * Dv] of `dtype` for L = `rows` queries of N `sequences`.

    partials: [N * Hkv, chunks, R, Dv] float32, each chunk's sums of p v; R = G * L, row g * L + i, Hq = Hkv * G.
    ml: [N * Hkv, chunks, R, 2] float32, each chunk's largest score and sum of p, 0 if a row attends to none of it.
    sinks: [Hq]. gate: logits [N, L, Hq], [N, L, Hq * Dv], or [N, L, Hq, Dv]; this, of `dtype`, is never copied.
    """
    pairs, _, R, Dv = partials.shape
    heads = pairs // sequences * R // rows
    shape = sequences, rows, heads
    gated = 0 if gate is None else 1 if gate.size == math.prod(shape) else 2
    inputs = {"partials": partials, "ml": ml, "sinks": ml if sinks is None else sinks}
    inputs["gate"] = constants(dtype, *[0.0] * DEVICE) if gate is None else gate.astype(dtype).reshape(*shape, -1)
    inputs["shares"] = constants(mx.int32, sequences, gated)
    y, template = ((sequences, rows, heads * Dv), dtype), {"T": dtype, "SINKS": sinks is not None}
    grid, group = (Dv, sequences * heads, rows), (32, 1, 1)
    return launch("attention_merge", inputs, {"y": y}, template=template, grid=grid, group=group)[0]


def attention_served(
    q: mx.array, keys: StoredKeys, values: StoredKeys, *, group_size: int = 64, bits: int | None = None
) -> bool:
    """Return whether to call `verify_attention`: False if, on Metal, its kernel does not support these arrays.

    Its reference would run, which is slow and whose bits depend on the other rows. Always True without Metal.
    """
    return not on_metal() or _supported(q, keys, values, group_size, bits)


def verify_attention(
    q: mx.array,
    keys: StoredKeys,
    values: StoredKeys,
    offset: mx.array,
    *,
    scale: float,
    limit: int,
    window: int | None = None,
    start: int | mx.array = 0,
    cache_rows: Maybe = None,
    sinks: mx.array | None = None,
    gate: mx.array | None = None,
    group_size: int = 64,
    bits: int | None = None,
    split: bool = False,
) -> mx.array:
    """Attend from L consecutive queries of N sequences to KV buffers that contain their rows: [N, L, Hq * Dv].

    q: [N, Hq, L, D] float16, bfloat16 or float32, Hq = G * Hkv.
    keys, values: [C, Hkv, S, D] and [C, Hkv, S, Dv] of q's dtype, or with `bits` (4 or 8) the results of mx.quantize.
    cache_rows: int32 [N], the index of each sequence's cache among C; without it C = N, in the same order.
    offset: int32 [N], the position of each sequence's first query; `limit` >= offset + L. Position p is in slot p.
        With a `window` a query attends to that many positions, its own the last, and p is in slot p % S,
        S >= window + L - 1.
    start: the first position that queries attend to, besides their own; one for all, or int32 [N]. sinks: [Hq],
        logits that join each softmax.
    gate: logits [N, L, Hq], [N, L, Hq * Dv] or [N, L, Hq, Dv]; the rounded output is multiplied with their sigmoid.

    On Metal a row has the bits of its query alone, whatever the other sequences are, and keys and values are
    requested once for all queries and heads of a KV head (up to 128 rows with L `padded`; Dv above 192: 64; above
    256: 16; with `split` at most 32). Elsewhere, and unless `attention_served`, the reference runs. Raises ValueError
    if the number of stored arrays or shapes other than those of values and sinks do not match; limit, S and positions
    are not checked.
    """
    k, v = _parts(keys), _parts(values)
    _check(q, k, v, offset, start, cache_rows, gate, bits)
    if not (on_metal() and _supported(q, keys, values, group_size, bits)):
        seen = {"window": window, "start": start, "cache_rows": cache_rows, "sinks": sinks, "gate": gate}
        stored = {"group_size": group_size, "bits": bits}
        return verify_attention_ref(q, keys, values, offset, scale=scale, **seen, **stored)
    (N, Hq, L, D), Hkv, Dv = q.shape, k[0].shape[1], _width(v, bits)
    R, cut = Hq // Hkv * L, Chunks.of(Hkv, window)
    chunks = cut.up_to(limit)
    if window is not None:
        chunks = min(chunks, (window + L - 3) // cut.least + 2)  # those of window + L - 1 consecutive positions
    _, chosen = geometry(Hq // Hkv * padded(L), Dv, split)
    groups = -(-R // (8 * chosen["BLOCKS"]))
    threads = 32 * Dv // (8 * chosen["PARTS"])
    stored = dict(zip(NAMES, k + v if bits else k * 3 + v * 3, strict=True))
    inputs = {"q": q, **stored, "offset": offset, "sight": constants(mx.int32, window or 0, *cut)}
    inputs["text_start"] = start if isinstance(start, mx.array) else constants(mx.int32, *[start] * N)
    inputs["cache_row"] = constants(mx.int32, *range(N)) if cache_rows is None else cache_rows
    inputs["scale"] = constants(mx.float32, scale)
    outputs = {"partials": ((N * Hkv, chunks, R, Dv), mx.float32), "ml": ((N * Hkv, chunks, R, 2), mx.float32)}
    template: dict[str, object] = {"T": q.dtype, "D": D, "DV": Dv, "BITS": bits or 0, "GROUP": group_size, **chosen}
    grid, group = (threads * chunks, N * Hkv, groups), (threads, 1, 1)
    partials, ml = launch("verify_attention", inputs, outputs, template=template, grid=grid, group=group)
    return merge(partials, ml, L, q.dtype, sequences=N, sinks=sinks, gate=gate)
