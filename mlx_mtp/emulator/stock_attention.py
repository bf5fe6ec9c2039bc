"""Launch MLX's own attention for a few queries in two passes, as MLX does; one pass is `stock.sdpa_vector`.

Geometry and choice follow MLX 0.32's `scaled_dot_product_attention.cpp`.
"""

from dataclasses import replace

import mlx.core as mx

from .options import EmulatorOptions
from .stock import NO_MASK, include, launched, stock_kernel
from .traffic import Traffic

MOST_ROWS = 32  # queries times heads of a KV head; beyond, products and softmax are operations of their own
PARTS = ("partials", "sums", "maxs")
FIRST = """
    sdpa_vector_2pass_1<T, D, V>(queries, keys, values, partials, sums, maxs, S, size_t(keys_strides[KV_AXIS]),
        size_t(keys_strides[2]), size_t(values_strides[KV_AXIS]), size_t(values_strides[2]), scale, nullptr, nullptr,
        S, S, S, nullptr, threads_per_threadgroup, thread_position_in_threadgroup, threadgroup_position_in_grid,
        threadgroups_per_grid, thread_index_in_simdgroup);
"""
SECOND = """
    sdpa_vector_2pass_2<T, V>(partials, sums, maxs, out, BLOCKS, threadgroup_position_in_grid, threadgroups_per_grid,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


def fused(rows: int, group: int) -> bool:
    """Tell whether MLX has one of these kernels for that many queries and heads of a KV head."""
    return rows <= 8 and rows * group <= MOST_ROWS


def sdpa_vector_2pass(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool = False,
    blocks: int = 32,
    options: EmulatorOptions | None = None,
) -> tuple[mx.array, Traffic, Traffic]:
    """Attend from q (1, H, L, D) to k, v (1, KV, S, D), no mask: (1, H, L, D), and the traffic of both passes.

    `blocks`, a multiple of 32: to how many the keys are dealt. MLX takes 32 to 1024 by chip, S, L and H / KV.
    """
    (b, h, rows, d), (kv, slots), width, dtype = q.shape, k.shape[1:3], v.shape[-1], q.dtype
    assert b == 1, f"{b} sequences"
    constants = {**NO_MASK, "do_causal": causal, "blocks": blocks}
    options = replace(options or EmulatorOptions(), function_constants=constants)
    header = include("utils", "sdpa_vector")
    first = stock_kernel("sdpa_vector_2pass_1", ("queries", "keys", "values", "S", "scale"), PARTS, FIRST, header)
    second = stock_kernel("sdpa_vector_2pass_2", (*PARTS, "BLOCKS"), ("out",), SECOND, header)
    shape, template = (b, h, rows, blocks), [("T", dtype), ("V", width)]
    of_keys = [*template, ("D", d), ("KV_AXIS", 0 if kv == 1 else 1)]
    parts = [((*shape, width), dtype), (shape, mx.float32), (shape, mx.float32)]
    more = {"inputs": [q, k, v, slots, scale], "template": of_keys, "options": options}
    partials, asked = launched(first, (kv, b, blocks), (32, h // kv, rows), parts, **more)
    more = {"inputs": [*partials, blocks], "template": template, "options": options}
    output = (b, h, rows, width), dtype
    (y,), asked_last = launched(second, (b * h, rows, 1), (1024, 1, 1), [output], **more)
    return y, asked, asked_last
