"""Launch MLX's own products and attention, from the headers of the installed wheel, as MLX launches them.

Geometry and choice of kernel follow MLX 0.32's `quantized.cpp`, `matmul.cpp` and `scaled_dot_product_attention.cpp`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .kernel import metal_kernel
from .launch import Traffic, Triple
from .options import EmulatorOptions

BODIES = Path(__file__).with_name("stock_metal")
MOST_QUERIES = 8
MOST_ROWS = 32  # queries times heads per KV head; beyond these MLX uses separate operations
QUANTIZED = ("utils", "steel/gemm/gemm", "quantized_utils")
POSITION = "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
NO_BATCH = "K, nullptr, nullptr, K, nullptr, nullptr, nullptr, nullptr"
KERNELS = ("qmv_fast", "qmv", "qmv_quad", "qmv_wide")
NO_MASK = dict.fromkeys(["has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks"], False)


def include(*headers: str) -> str:
    """Return lines that include MLX's kernel headers, for the `header` of a kernel."""
    return "".join(f'#include "mlx/backend/metal/kernels/{h}.h"\n' for h in headers)


_kernel = functools.cache(metal_kernel)


def launched(
    name: str, inputs: Mapping, outputs: Mapping, header: str, body: str = "", *, groups: Triple, **more: Any
) -> tuple[Any, ...]:
    """Launch a kernel that calls one of MLX's functions; return its outputs, then the traffic.

    groups: numbers of threadgroups. outputs: (shape, dtype) by name. body: by default BODIES/<name>.metal. more:
    `threadgroup`, `template`, `options`.
    """
    body = body or (BODIES / f"{name}.metal").read_text()
    kernel = _kernel(name, tuple(inputs), tuple(outputs), body, header)
    grid = [n * threads for n, threads in zip(groups, more["threadgroup"], strict=True)]
    shapes, dtypes = zip(*outputs.values(), strict=True)
    made = kernel(inputs=[*inputs.values()], output_shapes=shapes, output_dtypes=dtypes, grid=grid, **more)
    return *made, kernel.traffic


def fast_alignment(bits: int) -> int:
    """Return the number that K must be a multiple of for `qmv_fast` to be chosen."""
    pack = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    return pack * (1 if bits == 2 else 2) * 32


def chosen(k: int, n: int, bits: int) -> str:
    """Return the name of MLX's kernel for one row of a quantized product with an (n, k) matrix."""
    if k in (64, 128) and bits in (2, 4, 8):
        return "qmv_quad"
    return "qmv_fast" if k % fast_alignment(bits) == 0 else "qmv"


def _matrices(w: mx.array, scales: mx.array, biases: mx.array | None) -> tuple[str, str, dict[str, Any]]:
    """Return a format's function prefix, headers and inputs; without biases it is a floating-point format."""
    if biases is None:
        return "fp", include(*QUANTIZED, "fp_quantized"), {"w": w, "scales": scales}
    return "affine", include(*QUANTIZED, "quantized"), {"w": w, "scales": scales, "biases": biases}


def quantized_matvec(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    kernel: str,
    options: EmulatorOptions | None = None,
) -> tuple[mx.array, Traffic]:
    """Multiply x (M, K) by the rows of a quantized (N, K) matrix with `kernel`; return (M, N) and the traffic.

    `kernel` is qmv_fast, qmv, qmv_quad or qmv_wide; ValueError for another. Without biases the format is mxfp4, mxfp8
    or nvfp4, by bits and group size.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; it must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    (m, k), n, affine = x.shape, w.shape[0], biases is not None
    form, header, inputs = _matrices(w, scales, biases)
    inputs |= {"x": x, "K": k, "N": n}
    template: list[tuple[str, object]] = [("T", x.dtype), ("GS", group_size), ("BITS", bits)]
    no_biases = "" if kernel in ("qmv_quad", "qmv_wide") else "nullptr, "
    data = f"w, scales, {'biases, ' if affine else no_biases}x, y, K, N"
    batch, place, last = NO_BATCH if affine else NO_BATCH.removesuffix(", nullptr"), POSITION, ""
    groups, group = (m, -(-n // 8), 1), (32, 2, 1)
    if kernel == "qmv_quad":
        place = "threadgroup_position_in_grid, thread_index_in_threadgroup / 4, thread_index_in_threadgroup % 4"
        template.append(("D", k))
        last, groups, group = "D, ", (m, -(-n // 64), 1), (32, 1, 1)
    elif kernel == "qmv_wide":
        vectors = -(-m // -(-m // 5))  # the minimum number of tiles of at most 5 rows, evenly filled
        k_lanes = 8 if affine else 16
        template += [("NV", vectors), ("KL", k_lanes)]
        inputs["M"], batch = m, f"M, {batch}"
        last, groups = "NV, KL, ", (-(-m // vectors), -(-n // (64 // k_lanes)), 1)
    partial = ", true" if kernel == "qmv_fast" and n % 8 else ""
    body = f"{form}_{kernel}<T, GS, BITS, {last}false{partial}>({data}, {batch}, {place});"
    more = {"groups": groups, "threadgroup": group, "template": template, "options": options}
    return launched(kernel, inputs, {"y": ((m, n), x.dtype)}, header, body, **more)


def gather_qmv(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    lhs_indices: mx.array,
    rhs_indices: mx.array,
    *,
    group_size: int,
    bits: int,
    options: EmulatorOptions | None = None,
) -> tuple[mx.array, Traffic]:
    """Multiply row lhs_indices[i] of x (B, 1, K) by matrix rhs_indices[i] of w (E, N, K), for each pair.

    Returns (pairs, 1, N) and the traffic. Without biases the format is a floating-point one, by bits and group size.
    """
    k, n, pairs = x.shape[-1], w.shape[-2], rhs_indices.size
    form, header, inputs = _matrices(w, scales, biases)
    name = "gather_qmv_fast" if n % 8 == 0 and k % fast_alignment(bits) == 0 else "gather_qmv"
    strides = ", ".join(f"{part}_strides" for part in ("scales", "biases") if part in inputs)
    body = f"""{form}_{name}<T, GS, BITS>(
        w, scales, {"biases" if "biases" in inputs else "nullptr"}, x, lhs_indices, rhs_indices, y, K, N,
        BATCH, x_shape, x_strides, BATCH, w_shape, w_strides, {strides},
        BATCH, lhs_indices_shape, lhs_indices_strides, rhs_indices_strides, {POSITION});"""
    indices = {"lhs_indices": lhs_indices.astype(mx.uint32), "rhs_indices": rhs_indices.astype(mx.uint32)}
    inputs |= {"x": x, **indices, "K": k, "N": n, "BATCH": 1}
    template = [("T", x.dtype), ("GS", group_size), ("BITS", bits)]
    more = {"groups": (1, -(-n // 8), pairs), "threadgroup": (32, 2, 1), "template": template, "options": options}
    return launched(name, inputs, {"y": ((pairs, 1, n), x.dtype)}, header, body, **more)


def fused(rows: int, group: int) -> bool:
    """Return whether MLX has one of its `sdpa_vector` kernels for `rows` queries and `group` heads per KV head."""
    return rows <= MOST_QUERIES and rows * group <= MOST_ROWS


def attention_launch(q: mx.array, k: mx.array, v: mx.array, **constants: Any) -> tuple:
    """Return the template, options, output and header of attention from q to k and v without a mask array."""
    template = [("T", q.dtype), ("V", v.shape[-1]), ("D", q.shape[-1]), ("KV_AXIS", int(k.shape[1] > 1))]
    options = EmulatorOptions(function_constants={**NO_MASK, **constants})
    return template, options, {"out": ((*q.shape[:3], v.shape[-1]), q.dtype)}, include("utils", "sdpa_vector")


def sdpa_vector(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool = False
) -> tuple[mx.array, Traffic]:
    """Attend from q (B, H, L, D) to k, v (B, KV, S, D) in one pass: (B, H, L, D), and the traffic.

    causal: the L rows are the last of S positions, and each attends up to its own; else each attends to all.
    """
    (b, h, rows, _), kv = q.shape, k.shape[1]
    template, options, output, header = attention_launch(q, k, v, do_causal=causal, blocks=1)
    inputs = {"queries": q, "keys": k, "values": v, "gqa_factor": h // kv, "S": k.shape[2], "scale": scale}
    more = {"groups": (b * h, rows, 1), "threadgroup": (1024, 1, 1), "template": template, "options": options}
    return launched("sdpa_vector", inputs, output, header, **more)


def stock_kernels(n: int = 64, k: int = 1024) -> dict[str, Callable[[int], Traffic]]:
    """Return functions of M that count the traffic of MLX's kernels at M rows, by name; in bfloat16.

    They are products with an (n, k) matrix, of 4 bits except for gemv; a product with 4 of 16 experts of 64 x 64; and
    attention to 256 positions with 4 heads on one KV head. For qmv k is 64 less if it is a multiple of 512, where MLX
    would not choose it.
    """
    products = {name: functools.partial(_matvec_case, name, n, k) for name in ("qmv_fast", "qmv_wide")}
    products["qmv"] = functools.partial(_matvec_case, "qmv", n, k - 64 if k % 512 == 0 else k)
    return {
        **products,
        "gemv": lambda m: gemv(_ones(m, k), _ones(n, k))[1],
        "gather_qmv": _gather_case,
        "sdpa_vector": _attention_case,
    }


def _ones(*shape: int) -> mx.array:
    return mx.ones(shape, mx.bfloat16)


def _matvec_case(kernel: str, n: int, k: int, m: int) -> Traffic:
    w = mx.quantize(_ones(n, k), 64, 4)
    return quantized_matvec(_ones(m, k), *w, group_size=64, bits=4, kernel=kernel)[1]


def _gather_case(m: int, experts: int = 16, top_k: int = 4) -> Traffic:
    w, pairs = mx.quantize(_ones(experts, 64, 64), 64, 4), mx.arange(m * top_k)
    # Neighbouring rows share no expert unless there are too few.
    return gather_qmv(_ones(m, 1, 64), *w, pairs // top_k, pairs % experts, group_size=64, bits=4)[1]


def _attention_case(m: int) -> Traffic:
    kv = _ones(1, 1, 256, 64)
    return sdpa_vector(_ones(1, 4, m, 64), kv, kv, scale=64**-0.5, causal=m > 1)[1]


def tile(k: int, n: int) -> dict[str, int]:
    """Return MLX's tile for one row and an (n, k) matrix: the template arguments of GEMVKernel."""
    tm = 1 if n < 4 else 4
    if k <= 64:
        return {"BM": 1, "BN": 1, "SM": 8, "SN": 4, "TM": tm}
    if k >= 16 * n:
        return {"BM": 1, "BN": 8, "SM": 1, "SN": 32, "TM": tm}
    return {"BM": 8 if n >= 4096 else 4, "BN": 1, "SM": 1, "SN": 32, "TM": tm}


def gemv(
    x: mx.array, w: mx.array, bias: mx.array | None = None, options: EmulatorOptions | None = None
) -> tuple[mx.array, Traffic]:
    """Multiply each row of x (M, K) by the transpose of w (N, K), and add bias (N,) as addmm does.

    Returns (M, N) and the traffic of M one-row launches along the grid's last axis. "mem_none" is allowed because
    MLX's kernel relies on it if K >= 16 N. For N = 1 MLX runs it only with a bias, and with matrix and vector
    exchanged, which does not change the products. A shuffle counts as two collectives.
    """
    (m, k), n = x.shape, w.shape[0]
    tiled, options = tile(k, n), options or EmulatorOptions()
    inputs = {"x": x, "w": w, "bias": x if bias is None else bias, "K": k, "N": n}
    groups, group = (-(-n // (tiled["BM"] * tiled["SM"] * tiled["TM"])), 1, m), (32, tiled["BN"], tiled["BM"])
    more: dict[str, Any] = {"template": [("T", x.dtype), ("AXPBY", bias is not None), *tiled.items()]}
    more |= {"options": replace(options, allow={*options.allow, "mem_none"})}
    header = (BODIES / "gemv.h").read_text()
    return launched("gemv", inputs, {"y": ((m, n), x.dtype)}, header, groups=groups, threadgroup=group, **more)
