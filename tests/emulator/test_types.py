"""Compare scalars, vectors and bits of the emulated language with numpy or with values computed by hand."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import fault_of, launch, linux_only

from mlx_mtp import emulator

pytestmark = linux_only


def floats(*bodies: str, inputs=(), **more) -> list[float]:
    """Return one output element per expression, computed by one thread."""
    body = "\n".join(f"out[{i}] = {b};" for i, b in enumerate(bodies))
    return launch(body, *inputs, out=(len(bodies),), grid=1, **more).tolist()


def test_literals_are_float_and_half_and_bfloat_round_at_each_step():
    assert floats(
        "sizeof(1.0) + sizeof(0.5h) * 10 + sizeof(1.5bf) * 100",
        "1.0 + 0x1p-30 - 1.0",
        "float(half(2048) + half(1) + half(1))",
        "float(bfloat(256) + bfloat(1) + bfloat(1))",
        "float(half(65504) * half(2))",
        "float(1.0h / 3.0h)",
        "float(bfloat(1) / bfloat(3))",
        "float(half(3)) + bfloat(0.5f)",
    ) == [224.0, 0.0, 2048.0, 256.0, float("inf"), float(np.float16(1) / np.float16(3)), 0.333984375, 3.5]


def test_conversions_round_to_nearest_even():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    special = [
        0x3F808000,
        0x3F818000,
        0x33000000,
        0x33000001,
        0x387FE000,
        0x477FEFFF,
        0x477FF000,
        0x7F800001,
        0,
        0x80000000,
    ]
    x = mx.array(np.concatenate([bits, np.array(special, np.uint32)])).view(mx.float32)
    for dtype in (mx.float16, mx.bfloat16):
        name = "half" if dtype == mx.float16 else "bfloat"
        y = launch(f"out[thread_position_in_grid.x] = {name}(a[thread_position_in_grid.x]);", x, dtype=dtype)
        nan = np.isnan(np.array(x))
        got, want = (np.array(v.view(mx.uint16))[~nan] for v in (y, x.astype(dtype)))
        assert np.array_equal(got, want)
        assert np.isnan(np.array(y.astype(mx.float32))[nan]).all()
        back = launch("out[thread_position_in_grid.x] = a[thread_position_in_grid.x];", y)
        assert np.array_equal(np.array(back), np.array(y.astype(mx.float32)), equal_nan=True)


def test_vectors():
    assert floats(
        "float4(float2(1, 2), 3, 4).w + float4(7).x + float3(1, float2(2, 3)).z",
        "float4(1, 2, 3, 4).wzyx[0] * 10 + float4(1, 2, 3, 4).yy[1]",
        "float4(int4(1, 2, 3, 4)).w + float(half4(float4(0.1)).x)",
        "dot(float3(1, 2, 3), float3(4, 5, 6)) + length(float2(3, 4))",
        "(float2(1, 2) + 1).y + (2 * float2(1, 2)).y + (-float2(1, 2)).x + float(int2(7, 8).x / 2)",
        "all(float2(1, 2) < float2(2, 3)) + any(int2(0, 1) == 1) * 10 + select(1, 2, true) * 100",
        "clamp(float2(-1, 9), 0.0f, 4.0f).y + max(int2(1, 5), int2(3, 2)).y + cross(float3(1,0,0), float3(0,1,0)).z",
        "sizeof(float3) + sizeof(packed_float3) * 100 + alignof(float4) * 10000 + sizeof(bool4) * 1000000",
    ) == [14, 42, 4 + float(np.float16(0.1)), 37, 9, 211, 10, 4161216]


def test_swizzles_are_written_through():
    body = """
        float4 v = float4(1, 2, 3, 4);
        v.xy = v.zw;
        v.zw += v.yx * 10;
        v.yw = float2(5, 6);
        packed_float3 p = packed_float3(v.xyz);
        p.y += 1;
        for (int i = 0; i < 4; ++i) out[i] = v[i];
        out[4] = p[1];
        device float4* wide = (device float4*)(out + 8);
        *wide = v.wzyx;
        out[5] = out[6] = out[7] = 0;
    """
    assert launch(body, out=(12,), grid=1).tolist() == [3, 5, 43, 6, 6, 0, 0, 0, 6, 43, 5, 3]


def test_a_swizzle_of_a_twice_named_element_is_not_assigned():
    assert "probe.metal" in fault_of(
        "float4 v; v.xx = float2(1, 2); out[0] = v.x;", out=(1,), kind=emulator.CompileError
    )


def test_bits():
    assert floats(
        "popcount(0xf0f0u) + clz(1u) * 100 + ctz(8) * 10000", "reverse_bits(1u) == 0x80000000u",
        "extract_bits(0xabcdu, 4, 8) == 0xbcu", "extract_bits(-16, 4, 4)", "insert_bits(0u, 0xfu, 4, 4)",
        "as_type<uint>(1.0f) == 0x3f800000u", "as_type<half2>(0x3c004000u).x", "rotate(1u, 33u)",
        "mulhi(0x80000000u, 6u)", "clz(ushort(1)) + popcount(uchar(255)) * 100", "addsat(uchar(250), uchar(10))",
        "as_type<ulong>(uint2(1, 2)) == 0x200000001ul", "char(200) + short(-1)",
    ) == [8 + 3100 + 30000, 1, 1, -1, 240, 1, 2, 2, 3, 815, 255, 1, -57]  # fmt: skip


def test_mathematics():
    x = np.linspace(-3, 3, 97).astype(np.float32)
    names = ["exp", "sin", "cos", "tanh", "floor", "ceil", "round", "rint", "trunc", "fabs", "exp2", "sinh", "atan"]
    body = "uint i = thread_position_in_grid.x;\n" + "\n".join(
        f"out[i * {2 * len(names)} + {2 * k}] = metal::precise::{n}(a[i]); "
        f"out[i * {2 * len(names)} + {2 * k + 1}] = fast::{n}(a[i]);"
        for k, n in enumerate(names)
    )
    y = np.array(launch(body, mx.array(x), out=(97, len(names), 2), grid=97))
    numpy = {"fabs": np.abs, "atan": np.arctan, "round": lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v)}
    for k, n in enumerate(names):
        want = numpy.get(n, getattr(np, n, None))(x.astype(np.float64))
        np.testing.assert_allclose(y[:, k, 0], want, rtol=3e-7, atol=1e-7, err_msg=n)
        assert np.array_equal(y[:, k, 0], y[:, k, 1]), n
    assert floats(
        "rsqrt(4.0f) + fract(-0.25f) + sign(-2.0f) + step(1.0f, 2.0f)", "mix(1.0f, 3.0f, 0.5f) + saturate(7.0f)",
        "pow(2.0f, 10.0f) + fmod(7.0f, 4.0f) + log2(8.0f)", "sinpi(0.5f) + cospi(1.0f) + sinpi(1e6f)",
        "isnan(NAN) + isinf(INFINITY) * 10 + isfinite(1.0h) * 100", "fma(2.0f, 3.0f, 4.0f) + ldexp(1.0f, 3)",
        "max(1, 2) + min(-1, 1) + abs(-3) + clamp(9, 0, 5) + max3(1, 5, 2) + median3(9, 1, 4)", "max(NAN, 1.0f)",
        "float(numeric_limits<half>::max()) + float(Limits<int>::min == INT_MIN)", "float(exp(bfloat(1)))",
    ) == [1.25, 3, 1030, 0, 111, 18, 18, 1, 65505, 2.71875]  # fmt: skip


def test_contraction_follows_the_option():
    x = mx.array([1.0 + 2**-13, 1.0 - 2**-13, -1.0])
    body = "out[0] = a[0] * a[1] + a[2];"
    off, on, fast = (
        launch(body, x, out=(1,), options=emulator.Options(fp_contract=c)).item() for c in ("off", "on", "fast")
    )
    assert (off, on, fast) == (0.0, -(2.0**-26), -(2.0**-26))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("int z = a[0]; out[0] = 5 / z;", "divided by zero"),
        ("int z = 32 + a[0]; out[0] = 1 << z;", "shift by as many"),
    ],
)  # fmt: skip
def test_arithmetic_without_a_result_is_reported(body, message):
    assert message in fault_of(body, mx.zeros(8, mx.int32), out=(1,))


def test_address_spaces_structs_templates_and_loops():
    header = """
        struct Pair { float first; half second; };
        template <typename T, int N> METAL_FUNC T total(const device T* p) {
          T s = 0;
          #pragma unroll
          for (int i = 0; i < N; ++i) s += p[i];
          return s;
        }
        constant float TABLE[4] = {1, 2, 3, 4};
        static constant constexpr const int OFFSET = 2;
    """
    body = """
        thread Pair p = {total<float, 4>(a), half(0.5)};
        const device float* tail = a + OFFSET;
        auto square = [](float x) { return x * x; };
        MLX_MTL_PRAGMA_UNROLL
        for (uint i = 0; i < 4; ++i) p.first += TABLE[(i + uint(a[0])) % 4];
        out[0] = p.first + p.second + tail[0] + square(3);
    """
    assert launch(body, mx.arange(8.0), header=header, out=(1,)).item() == 6 + 10 + 0.5 + 2 + 9


def test_atomics():
    body = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);
        atomic_fetch_max_explicit(&out[1], float(i), memory_order_relaxed);
        float seen = atomic_load_explicit(&out[2], memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&out[2], &seen, seen + 2, memory_order_relaxed,
                                                      memory_order_relaxed)) {}
        threadgroup atomic_uint count;
        if (thread_index_in_threadgroup == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_or_explicit(&count, 1u << (i % 8), memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i == 0) atomic_store_explicit(&out[3], float(atomic_load_explicit(&count, memory_order_relaxed)),
                                          memory_order_relaxed);
    """
    kernel = emulator.metal_kernel("atomics", [], ["out"], body, atomic_outputs=True)
    call = {"inputs": [], "grid": (96, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(4,)]}
    (y,) = kernel(**call, output_dtypes=[mx.float32], init_value=0)
    assert y.tolist() == [96, 95, 192, 255]


def test_atomics_of_mlx_pack_small_types():
    header = '#include "mlx/backend/metal/kernels/atomic.h"\n'
    body = """
        uint i = thread_position_in_grid.x;
        device mlx_atomic<half>* h = (device mlx_atomic<half>*)out;
        mlx_atomic_fetch_add_explicit(h, half(1), i % 4);
    """
    y = launch(body, out=(4,), grid=64, dtype=mx.float16, header=header, init_value=0)
    assert y.tolist() == [16.0] * 4
