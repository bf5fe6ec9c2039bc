"""Compare MLX's own Metal kernels, from the wheel's headers, with float64, and count their traffic."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import exact, launch, linux_only, relative_error
from sweep import sweep

from mlx_mtp import emulator
from mlx_mtp.emulator import stock

pytestmark = linux_only


def quantized(m, n, k, bits, group_size=64, dtype=mx.float32):
    mx.random.seed(m * n + k)
    w = mx.quantize(mx.random.normal((n, k)).astype(dtype), group_size, bits)
    x = mx.random.normal((m, k)).astype(dtype)
    full = [v.astype(mx.float32) if v.dtype == dtype else v for v in w]
    return x, w, exact(x) @ exact(mx.dequantize(*full, group_size, bits)).T


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k", "bits"),
    [
        ("qmv_fast", 1, 13, 512, 4),
        ("qmv_fast", 1, 16, 512, 3),
        ("qmv_fast", 2, 8, 256, 8),
        ("qmv", 2, 5, 192, 3),
        ("qmv_quad", 2, 64, 128, 4),
        ("qmv_wide", 7, 24, 1024, 4),
        pytest.param("qmv_fast", 3, 24, 512, 4, marks=sweep),
        pytest.param("qmv", 3, 24, 448, 4, marks=sweep),
        pytest.param("qmv", 2, 13, 320, 6, marks=sweep),
        pytest.param("qmv_wide", 4, 21, 512, 8, marks=sweep),
    ],
)
def test_quantized_matvec(kernel, m, n, k, bits):
    x, w, want = quantized(m, n, k, bits)
    y, _ = stock.quantized_matvec(x, *w, group_size=64, bits=bits, kernel=kernel)
    assert relative_error(y, want) < 1e-6
    cpu = mx.quantized_matmul(x, *w, transpose=True, group_size=64, bits=bits)
    assert relative_error(y, exact(cpu)) < 2e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_quantized_matvec_in_16_bits(dtype):
    x, w, want = quantized(2, 16, 512, 4, dtype=dtype)
    y, _ = stock.quantized_matvec(x, *w, group_size=64, bits=4, kernel="qmv_fast")
    assert y.dtype == dtype
    assert relative_error(y, want) < (2**-11 if dtype == mx.float16 else 2**-8)


def test_the_kernel_chosen_for_one_row():
    assert [stock.chosen(k, 64, b) for k, b in ((64, 4), (128, 3), (512, 4), (768, 4), (256, 8), (256, 6))] == [
        "qmv_quad", "qmv", "qmv_fast", "qmv", "qmv_fast", "qmv_fast"
    ]  # fmt: skip


def test_gather_qmv():
    mx.random.seed(0)
    w = mx.quantize(mx.random.normal((4, 16, 512)), 64, 4)
    x, lhs, rhs = mx.random.normal((3, 1, 512)), mx.array([0, 0, 1, 1, 2, 2]), mx.array([1, 3, 0, 1, 2, 2])
    y, traffic = stock.gather_qmv(x, *w, lhs, rhs, group_size=64, bits=4)
    matrices = exact(mx.dequantize(*w, 64, 4))
    want = np.stack([exact(x)[i] @ matrices[j].T for i, j in zip(lhs.tolist(), rhs.tolist(), strict=True)])
    assert relative_error(y, want) < 1e-6
    assert traffic["w"].reread == 1.5  # six visits of four experts


@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 2), (True, 1)])
def test_sdpa_vector(causal, kv_heads):
    mx.random.seed(0)
    q, k, v = (mx.random.normal(s) for s in ((1, 4, 3, 64), (1, kv_heads, 50, 64), (1, kv_heads, 50, 64)))
    y, traffic = stock.sdpa_vector(q, k, v, scale=0.125, causal=causal)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal" if causal else None)
    assert relative_error(y, exact(want)) < 2e-6
    assert traffic.max_barriers == 1 + 2 * 2
    assert traffic.threadgroup_bytes == 4 * (32 * 32 + 32 + 32)


def test_softmax_logsumexp_and_rows():
    header = stock.include("utils", "softmax", "logsumexp")
    ids = "gid, lid, thread_index_in_simdgroup, simdgroup_index_in_threadgroup"
    body = f"""
        uint gid = threadgroup_position_in_grid.x, lid = thread_position_in_threadgroup.x;
        if (gid < 2) softmax_single_row<float>(a, out, N, {ids});
        else logsumexp<float>(a, out + 2 * N - 2, N, {ids});
    """
    x = mx.random.normal((4, 300))
    y = launch(body, x, out=(602,), grid=4 * 96, group=96, template=[("N", 300)], header=header)
    assert relative_error(y[:600], exact(mx.softmax(x[:2], axis=-1)).ravel()) < 1e-6
    assert relative_error(y[600:], exact(mx.logsumexp(x[2:], axis=-1))) < 1e-6


GEMV = """
    threadgroup float memory[1024];
    GEMVKernel<float, 4, 1, 1, 32, 4, 4, false>::run(a, b, out, out, K, N, K, 1.0f, 0.0f, 1, memory,
        threadgroup_position_in_grid, thread_position_in_threadgroup, simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);
"""


def test_gemv():
    a, b = mx.random.normal((32, 200)), mx.random.normal((200,))
    y = launch(GEMV, a, b, out=(32,), grid=2 * 128, group=128, template=[("K", 200), ("N", 32)],
               header=stock.include("utils", "gemv"))  # fmt: skip
    assert relative_error(y, exact(a) @ exact(b)) < 1e-6


def test_gemm_with_simdgroup_matrices():
    body = """
        using Kernel = mlx::steel::GEMMKernel<float, float, 32, 32, 16, 2, 2, false, true, true, true>;
        threadgroup float As[Kernel::tgp_mem_size_a], Bs[Kernel::tgp_mem_size_b];
        // M, N, K, three leading dimensions, tiles, batch strides, swizzle, steps along K, batch dimensions
        const mlx::steel::GEMMParams p = {64, 64, 64, 64, 64, 64, 2, 2, 0, 0, 0, 0, 4, 0};
        Kernel::run(a, b, out, &p, As, Bs, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
                    threadgroup_position_in_grid, thread_position_in_threadgroup);
    """
    a, b = mx.random.normal((64, 64)), mx.random.normal((64, 64))
    header = stock.include("utils", "steel/gemm/gemm")
    kernel = emulator.metal_kernel("gemm", ["a", "b"], ["out"], body, header=header)
    (y,) = kernel(inputs=[a, b], grid=(64, 4, 4), threadgroup=(32, 2, 2), output_shapes=[(64, 64)],
                  output_dtypes=[mx.float32])  # fmt: skip
    assert relative_error(y, exact(a) @ exact(b).T) < 1e-6


def measured(m, optimize=2):
    x, w, _ = quantized(m, 64, 1024, 4)
    options = emulator.Options(optimize=optimize)
    return stock.quantized_matvec(x, *w, group_size=64, bits=4, kernel="qmv_fast", options=options)[1]


@pytest.mark.parametrize("optimize", [1, 2])
def test_traffic_of_qmv_fast(optimize):
    one = measured(1, optimize)
    assert [one[name].reread for name in ("x", "scales", "biases", "w")] == [16.0, 4.0, 4.0, 1.0]
    assert [measured(m, optimize)["w"].reread for m in (1, 2, 4, 8)] == [1.0, 2.0, 4.0, 8.0]
    assert one["y"].bytes_written == one["y"].distinct_written == 64 * 4
    # A lane reads 2 of its own 8 bytes at a time, and 32 lanes are adjacent: 4 lines.
    assert one["w"].lines_per_access == 4.0
    assert (one["w"].group_lines, one["x"].group_lines) == (64 * 512 / 64, 8 * 1024 * 4 / 64)
    assert (one.threads, one.max_barriers, one.max_collectives) == (64 * 8, 0, 4)


def test_counts_are_the_same_at_two_optimisation_levels():
    for name, measure in stock.stock_kernels().items():
        with emulator.emulated(emulator.Options(optimize=1)):
            low = measure(2)
        assert measure(2).buffers == low.buffers, name


def test_traffic_of_the_others():
    kernels = stock.stock_kernels()
    assert [kernels["qmv_wide"](m)["w"].reread for m in (1, 5, 8)] == [1.0, 1.0, 2.0]
    assert kernels["qmv_wide"](5)["x"].reread == 64.0
    assert [kernels["gather_qmv"](m)["w"].reread for m in (1, 4, 8)] == [1.0, 1.0, 2.0]
    assert kernels["sdpa_vector"](1)["keys"].reread == 4.0  # heads per KV head


def test_a_large_product_is_fast():
    x, w, want = quantized(4, 1024, 1024, 4)
    y, traffic = stock.quantized_matvec(x, *w, group_size=64, bits=4, kernel="qmv_fast")
    assert relative_error(y, want) < 1e-6
    assert traffic["w"].bytes_read == 4 * 1024 * 1024 // 2
