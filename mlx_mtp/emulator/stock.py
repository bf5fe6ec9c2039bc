"""MLX's own Metal kernels, from the headers of the installed wheel, launched as MLX launches them.

Geometry and choice of kernel follow MLX 0.32's `quantized.cpp` and `scaled_dot_product_attention.cpp`.
"""

import functools
from collections.abc import Callable

import mlx.core as mx

from .kernel import MetalKernel, Options, metal_kernel
from .traffic import Traffic

QUANTIZED = ("utils", "steel/gemm/gemm", "quantized_utils", "quantized")
FP_QUANTIZED = (*QUANTIZED[:-1], "fp_quantized")
POSITION = "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
NO_BATCH = "K, nullptr, nullptr, K, nullptr, nullptr, nullptr, nullptr"
MATRIX = ("w", "scales", "biases", "x")
KERNELS = ("qmv_fast", "qmv", "qmv_quad", "qmv_wide")


def include(*headers: str) -> str:
    """Lines that include MLX's kernel headers, for the `header` of a kernel."""
    return "".join(f'#include "mlx/backend/metal/kernels/{h}.h"\n' for h in headers)


@functools.cache
def _kernel(name: str, inputs: tuple[str, ...], output: str, body: str, headers: tuple[str, ...]) -> MetalKernel:
    return metal_kernel(name, inputs, [output], body, header=include(*headers))


def _run(
    kernel: MetalKernel,
    inputs: list,
    template: list,
    groups: tuple,
    group: tuple,
    shape: tuple,
    options: Options | None,
) -> tuple[mx.array, Traffic]:
    x = inputs[kernel.input_names.index("x" if "x" in kernel.input_names else "queries")]
    (y,) = kernel(
        inputs=inputs,
        template=template,
        grid=tuple(n * t for n, t in zip(groups, group, strict=True)),
        threadgroup=group,
        output_shapes=[shape],
        output_dtypes=[x.dtype],
        options=options,
    )
    assert kernel.traffic is not None
    return y, kernel.traffic


def fast_alignment(bits: int) -> int:
    """The K whose multiples `qmv_fast` takes."""
    pack = 8 if bits in (3, 5) else 4 if bits == 6 else 32 // bits
    return pack * (1 if bits == 2 else 2) * 32


def chosen(k: int, n: int, bits: int) -> str:
    """The kernel that MLX picks for one row."""
    if k in (64, 128) and bits in (2, 4, 8):
        return "qmv_quad"
    return "qmv_fast" if k % fast_alignment(bits) == 0 else "qmv"


def quantized_matvec(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    kernel: str,
    options: Options | None = None,
) -> tuple[mx.array, Traffic]:
    """x (M, K) times the rows of a quantized (N, K) matrix by `kernel`: qmv_fast, qmv, qmv_quad or qmv_wide.

    Without biases the format is a floating-point one: mxfp4, mxfp8 or nvfp4, by bits and group size. Returns the
    product (M, N) and the launch's traffic.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; it must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    (m, k), n = x.shape, w.shape[0]
    affine = biases is not None
    template: list[tuple[str, object]] = [("T", x.dtype), ("GS", group_size), ("BITS", bits)]
    inputs, names = [w, scales, *([biases] if affine else []), x, k, n], [*MATRIX, "K", "N"]
    data = "w, scales, biases, x, y, K, N"
    function = f"{'affine' if affine else 'fp'}_{kernel}"
    if not affine:
        names.remove("biases")
        data = "w, scales, x, y, K, N" if kernel in ("qmv_quad", "qmv_wide") else "w, scales, nullptr, x, y, K, N"
    no_batch = NO_BATCH if affine else NO_BATCH.removesuffix(", nullptr")
    if kernel == "qmv_quad":
        place = "threadgroup_position_in_grid, thread_index_in_threadgroup / 4, thread_index_in_threadgroup % 4"
        body = f"{function}<T, GS, BITS, D, false>({data}, {no_batch}, {place});"
        template.append(("D", k))
        groups, group = (m, -(-n // 64), 1), (32, 1, 1)
    elif kernel == "qmv_wide":
        vectors = -(-m // -(-m // 5))  # the fewest tiles of at most 5 rows, evenly filled
        k_lanes = 8 if affine else 16
        body = f"{function}<T, GS, BITS, NV, KL, false>({data}, M, {no_batch}, {POSITION});"
        template += [("NV", vectors), ("KL", k_lanes)]
        inputs.append(m)
        names.append("M")
        groups, group = (-(-m // vectors), -(-n // (64 // k_lanes)), 1), (32, 2, 1)
    else:
        partial = ", true" if kernel == "qmv_fast" and n % 8 else ""
        body = f"{function}<T, GS, BITS, false{partial}>({data}, {no_batch}, {POSITION});"
        groups, group = (m, -(-n // 8), 1), (32, 2, 1)
    made = _kernel(kernel, tuple(names), "y", body, QUANTIZED if affine else FP_QUANTIZED)
    return _run(made, inputs, template, groups, group, (m, n), options)


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
    options: Options | None = None,
) -> tuple[mx.array, Traffic]:
    """Row lhs_indices[i] of x (B, 1, K) times matrix rhs_indices[i] of w (E, N, K), for each pair: (pairs, 1, N).

    Without biases the format is a floating-point one, by bits and group size.
    """
    k, n = x.shape[-1], w.shape[-2]
    affine = biases is not None
    name = "gather_qmv_fast" if n % 8 == 0 and k % fast_alignment(bits) == 0 else "gather_qmv"
    data, strides = ("biases", "scales_strides, biases_strides") if affine else ("nullptr", "scales_strides")
    body = f"""{"affine" if affine else "fp"}_{name}<T, GS, BITS>(
        w, scales, {data}, x, lhs_indices, rhs_indices, y, K, N,
        BATCH, x_shape, x_strides, BATCH, w_shape, w_strides, {strides},
        BATCH, lhs_indices_shape, lhs_indices_strides, rhs_indices_strides, {POSITION});"""
    names = tuple(m for m in MATRIX if affine or m != "biases")
    headers = QUANTIZED if affine else FP_QUANTIZED
    kernel = _kernel(name, (*names, "lhs_indices", "rhs_indices", "K", "N", "BATCH"), "y", body, headers)
    pairs = rhs_indices.size
    inputs = [w, scales, *([biases] if affine else []), x]
    inputs += [lhs_indices.astype(mx.uint32), rhs_indices.astype(mx.uint32), k, n, 1]
    template = [("T", x.dtype), ("GS", group_size), ("BITS", bits)]
    return _run(kernel, inputs, template, (1, -(-n // 8), pairs), (32, 2, 1), (pairs, 1, n), options)


def sdpa_vector(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool = False, options: Options | None = None
) -> tuple[mx.array, Traffic]:
    """Attention of q (B, H, L, D) over k, v (B, KV, S, D) in one pass, no mask: (B, H, L, D), and the traffic."""
    b, h, rows, d = q.shape
    body = """sdpa_vector<T, D, V>(queries, keys, values, out, gqa_factor, S, size_t(keys_strides[KV_AXIS]),
        size_t(keys_strides[2]), size_t(values_strides[KV_AXIS]), size_t(values_strides[2]), scale,
        nullptr, nullptr, gqa_factor, gqa_factor, gqa_factor, nullptr, gqa_factor,
        threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);"""
    names = ("queries", "keys", "values", "gqa_factor", "S", "scale")
    kernel = _kernel("sdpa_vector", names, "out", body, ("utils", "sdpa_vector"))
    constants = dict.fromkeys(["has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks"], False)
    base = options or Options()
    options = Options(**{**vars(base), "function_constants": {**constants, "do_causal": causal, "blocks": 1}})
    template = [("T", q.dtype), ("D", d), ("V", v.shape[-1]), ("KV_AXIS", 0 if k.shape[1] == 1 else 1)]
    inputs = [q, k, v, h // k.shape[1], k.shape[2], scale]
    return _run(kernel, inputs, template, (b * h, rows, 1), (1024, 1, 1), (b, h, rows, v.shape[-1]), options)


def _quantized_case(kernel: str, n: int, k: int, bits: int, group_size: int) -> Callable[[int], Traffic]:
    def measure(m: int) -> Traffic:
        x, w = mx.ones((m, k)), mx.quantize(mx.ones((n, k)), group_size, bits)
        return quantized_matvec(x, *w, group_size=group_size, bits=bits, kernel=kernel)[1]

    return measure


def _gather_case(n: int, k: int, experts: int, top_k: int) -> Callable[[int], Traffic]:
    def measure(m: int) -> Traffic:
        w = mx.quantize(mx.ones((experts, n, k)), 64, 4)
        pairs = mx.arange(m * top_k)
        # Neighbouring rows share no expert, as far as there are enough of them.
        return gather_qmv(mx.ones((m, 1, k)), *w, pairs // top_k, pairs % experts, group_size=64, bits=4)[1]

    return measure


def _attention_case(heads: int, kv_heads: int, length: int, dims: int) -> Callable[[int], Traffic]:
    def measure(m: int) -> Traffic:
        kv = mx.ones((1, kv_heads, length, dims))
        return sdpa_vector(mx.ones((1, heads, m, dims)), kv, kv, scale=dims**-0.5, causal=m > 1)[1]

    return measure


def stock_kernels(n: int = 64, k: int = 1024) -> dict[str, Callable[[int], Traffic]]:
    """Stock MLX at M rows, by name: 4-bit products with an (n, k) matrix, 2 of 8 experts, and attention over 128 rows
    with 8 heads on 2 KV heads. What is measured is counted, never timed."""
    odd = k - 64 if k % 512 == 0 else k  # a K that qmv_fast does not take
    return {
        "qmv_fast": _quantized_case("qmv_fast", n, k, 4, 64),
        "qmv": _quantized_case("qmv", n, odd, 4, 64),
        "qmv_wide": _quantized_case("qmv_wide", n, k, 4, 64),
        "gather_qmv": _gather_case(n, k, 8, 2),
        "sdpa_vector": _attention_case(8, 2, 128, 64),
    }
