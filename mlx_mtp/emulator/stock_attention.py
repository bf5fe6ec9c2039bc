"""MLX's own attention for a few queries in two passes, launched as MLX launches it; one pass is `stock.sdpa_vector`.

Geometry and choice follow MLX 0.32's `scaled_dot_product_attention.cpp`.
"""

import functools
from dataclasses import replace

import mlx.core as mx

from .kernel import MetalKernel, Options, metal_kernel
from .stock import include
from .traffic import Traffic

MOST_ROWS = 32  # queries times heads of a KV head; beyond, products and softmax are operations of their own
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


@functools.cache
def _passes() -> tuple[MetalKernel, MetalKernel]:
    header = include("utils", "sdpa_vector")
    queries = ["queries", "keys", "values", "S", "scale"]
    first = metal_kernel("sdpa_vector_2pass_1", queries, ["partials", "sums", "maxs"], FIRST, header=header)
    parts = ["partials", "sums", "maxs", "BLOCKS"]
    return first, metal_kernel("sdpa_vector_2pass_2", parts, ["out"], SECOND, header=header)


def fused(rows: int, group: int) -> bool:
    """Whether MLX has one of these kernels for that many queries and heads of a KV head."""
    return rows <= 8 and rows * group <= MOST_ROWS


def sdpa_vector_2pass(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool = False,
    blocks: int = 32,
    options: Options | None = None,
) -> tuple[mx.array, Traffic, Traffic]:
    """Attention of q (1, H, L, D) over k, v (1, KV, S, D), no mask: (1, H, L, D), and the traffic of both passes.

    `blocks`, a multiple of 32: to how many the keys are dealt. MLX takes 32 to 1024 by chip, S, L and H / KV.
    """
    (b, h, rows, _), (kv, slots), width = q.shape, k.shape[1:3], v.shape[-1]
    assert b == 1, f"{b} sequences"
    constants = dict.fromkeys(["has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks"], False)
    options = replace(options or Options(), function_constants={**constants, "do_causal": causal, "blocks": blocks})
    first, second = _passes()
    shape = (b, h, rows, blocks)
    template: list[tuple[str, object]] = [("T", q.dtype), ("V", width)]
    partials = first(
        inputs=[q, k, v, slots, scale],
        template=[*template, ("D", q.shape[-1]), ("KV_AXIS", 0 if kv == 1 else 1)],
        grid=(32 * kv, h // kv * b, rows * blocks),
        threadgroup=(32, h // kv, rows),
        output_shapes=[(*shape, width), shape, shape],
        output_dtypes=[q.dtype, mx.float32, mx.float32],
        options=options,
    )
    (y,) = second(
        inputs=[*partials, blocks],
        template=template,
        grid=(1024 * b * h, rows, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[(b, h, rows, width)],
        output_dtypes=[q.dtype],
        options=options,
    )
    assert first.traffic is not None
    assert second.traffic is not None
    return y, first.traffic, second.traffic
