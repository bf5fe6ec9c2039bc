"""Compute absorbed multi-head latent attention: one latent serves as keys and as values of all heads.

Three launches: the scores of every row and key; softmax weights and their sums with the values, per chunk of keys;
the merge of the chunks. A row has the bits that it has alone. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

import mlx.core as mx

from ._quantized import DEVICE
from ._source import Maybe, constants, floats, launch, on_metal
from .verify_attention import Chunks, merge

Parts = tuple[mx.array, mx.array]  # queries or keys: latent part, rotated part
MOST_CHUNK = 256  # maximum keys per chunk, so that their values fit in MEMORY
MEMORY = 32768  # bytes of threadgroup memory
SIMDGROUPS = 16  # maximum per threadgroup


def verify_latent_attention_ref(
    q: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    offset: mx.array,
    *,
    scale: float,
    start: int | mx.array = 0,
    chosen: Maybe = None,
) -> mx.array:
    """Compute softmax(scale * (q latent^T + q_pe k_pe^T)) latent in float32, each row over its visible positions.

    The result has q's dtype.
    """
    dtype, (L, S) = q.dtype, (q.shape[2], latent.shape[2])
    q, q_pe, latent, k_pe = (x.astype(mx.float32) for x in (q, q_pe, latent, k_pe))
    scores = scale * (q @ latent.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2))
    last, positions = offset + mx.arange(L)[:, None], mx.arange(S)
    seen = (positions <= last) & (positions >= mx.minimum(start, last))
    if chosen is not None:
        seen &= mx.put_along_axis(mx.zeros((L, S), mx.bool_), chosen, mx.array(True), axis=-1)
    weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
    # A row's zero weights must give 0 for values that are not finite; where it sees them, its scores are not finite.
    return (weights @ mx.where(mx.isfinite(latent), latent, 0.0)).astype(dtype)


def _keys(dtype: mx.Dtype) -> int:
    """Return the number of keys in a tile, whose values a threadgroup holds."""
    return 16 if dtype.size == 2 else 8


def _simdgroups(rows: int, of: int) -> int:
    return min(-(-rows // of), SIMDGROUPS)


def _scores_metal(
    q: Parts, keys: Parts, offset: mx.array, scale: float, limit: int, start: int | mx.array, chosen: Maybe
) -> tuple[mx.array, mx.array]:
    """Return scores in blocks of 8 keys [blocks, heads * L, 8], and the largest of each tile [tiles, heads * L].

    limit: upper bound of positions, or the number of `chosen` slots.
    """
    (_, heads, L, dv), dr, dtype = q[0].shape, q[1].shape[-1], q[0].dtype
    size, rows = _keys(dtype), heads * L
    together, apart = (rows, 1) if chosen is None else (heads, L)  # rows with the same keys
    fragments = 4 if together >= 256 else 2
    tiles, simdgroups = -(-limit // size), _simdgroups(together, 8 * fragments)
    first = start if isinstance(start, mx.array) else constants(mx.int32, start)
    sight = {"scale": constants(mx.float32, scale), "offset": offset, "start": first}
    sight["chosen"] = offset if chosen is None else chosen
    template = {"T": dtype, "DV": dv, "DR": dr, "KEYS": size, "FRAGMENTS": fragments, "CHOSEN": chosen is not None}
    scores, peaks = launch(
        "latent_scores",
        {"q": q[0], "q_pe": q[1], "latent": keys[0], "k_pe": keys[1], **sight},
        {"scores": ((tiles * size // 8, rows, 8), mx.float32), "peaks": ((tiles, rows), mx.float32)},
        template=template,
        grid=(32 * tiles, simdgroups, apart),
        group=(32, simdgroups, 1),
    )
    return scores, peaks


def _values_metal(
    scores: mx.array, peaks: mx.array, latent: mx.array, offset: mx.array, L: int, limit: int, chosen: Maybe
) -> tuple[mx.array, mx.array]:
    """Return weighted sums of values per chunk [1, chunks, rows, Dv], and `ml` of `merge`."""
    dtype, rows, dv = latent.dtype, scores.shape[1], latent.shape[-1]
    width = 64 if dtype.size == 2 and dv % 64 == 0 else 32
    cut = Chunks.of(dv // width)._replace(most=MOST_CHUNK)
    sizes = constants(mx.int32, L, cut.least)
    together, apart = (rows, 1) if chosen is None else (rows // L, L)
    chunks, simdgroups = cut.up_to(limit), _simdgroups(together, 16)
    inputs = {"scores": scores, "peaks": peaks, "latent": latent, "offset": offset, "sizes": sizes}
    inputs["chosen"] = offset if chosen is None else chosen
    template = {"T": dtype, "DV": dv, "KEYS": _keys(dtype), "CHUNK": MOST_CHUNK, "SLICE": width}
    out, ml = launch(
        "latent_values",
        inputs,
        {"out": ((1, chunks, rows, dv), mx.float32), "ml": ((1, chunks, rows, 2), mx.float32)},
        template={**template, "CHOSEN": chosen is not None},
        grid=(32 * (dv // width), simdgroups * chunks, apart),
        group=(32, simdgroups, 1),
    )
    return out, ml


def _supported(q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array) -> bool:
    """Return whether the kernels support these: one type of 16 or 32 bits, whole fragments, tiles that fit."""
    dv, dr = q.shape[-1], q_pe.shape[-1]
    fits = (dv + dr) * _keys(q.dtype) * q.dtype.size < MEMORY
    same = all(x.dtype == q.dtype for x in (q_pe, latent, k_pe))
    return same and floats(q) and dv % 32 == 0 and dr % 8 == 0 and fits and q.size > 0


def _check_shapes(q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, limit: int, chosen: Maybe) -> None:
    (_, heads, L, dv), S, dr = q.shape, latent.shape[2], q_pe.shape[-1]
    shapes = {"q": (1, heads, L, dv), "q_pe": (1, heads, L, dr), "latent": (1, 1, S, dv), "k_pe": (1, 1, S, dr)}
    for x, (name, shape) in zip((q, q_pe, latent, k_pe), shapes.items(), strict=True):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; with the other arrays it must be {shape}")
    if chosen is not None and (chosen.ndim != 2 or chosen.shape[0] != L):
        raise ValueError(f"chosen has shape {chosen.shape}; it must be ({L}, slots of each row)")
    if not L <= limit <= S:
        raise ValueError(f"limit is {limit}; it must be from {L}, the rows, to {S}, the slots")


def verify_latent_attention(
    q: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    offset: mx.array,
    *,
    scale: float,
    limit: int,
    start: int | mx.array = 0,
    chosen: mx.array | None = None,
) -> mx.array:
    """Attend from L rows to keys [latent, k_pe] and values latent: [1, heads, L, Dv] in q's dtype.

    q: [1, heads, L, Dv], q_pe [1, heads, L, Dr]: absorbed queries, float16, bfloat16 or float32.
    latent: [1, 1, S, Dv], k_pe [1, 1, S, Dr]: whole buffers that contain the rows' own slots.
    offset: [1] int32, the position of the first row; row i attends to positions start to offset + i, at least its
    own.
    limit: upper bound of offset + L, at most S.
    chosen: integers [L, C], ascending: row i attends to the positions in list i that it would attend to without a
        list; None: no lists. A row whose list starts with all its slots has the bits of None.

    A value that is not finite counts as 0; its key's scores are not finite. On Metal, if all types are equal,
    Dv is a multiple of 32, Dr of 8, and their sum less than 1024, a row has the bits that it has alone; else the
    reference runs. Raises ValueError if shapes or limit do not match.
    """
    _check_shapes(q, q_pe, latent, k_pe, limit, chosen)
    if not (on_metal() and _supported(q, q_pe, latent, k_pe)):
        return verify_latent_attention_ref(q, q_pe, latent, k_pe, offset, scale=scale, start=start, chosen=chosen)
    _, heads, L, dv = q.shape
    count = limit if chosen is None else chosen.shape[1]
    if chosen is not None and chosen.size < DEVICE:  # MLX would pass it in constant memory
        chosen = mx.tile(chosen, (DEVICE, 1))
    scores, peaks = _scores_metal((q, q_pe), (latent, k_pe), offset, scale, count, start, chosen)
    out, ml = _values_metal(scores, peaks, latent, offset, L, count, chosen)
    return merge(out, ml, L, q.dtype).reshape(1, L, heads, dv).swapaxes(1, 2)
