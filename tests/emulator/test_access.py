"""Check that every access is recorded once at any width, and that accesses outside buffers are refused."""

import mlx.core as mx
import pytest
from metal_cases import fault_of, launch, linux_only
from sweep import sampled

from mlx_mtp import emulator

pytestmark = linux_only
X = mx.arange(64.0)

# Body, output elements, and the reads of `a` and writes of `out`: number of accesses and bytes.
WIDTHS = {
    "uchar": ("((device uchar*)out)[3] = ((const device uchar*)a)[5];", (1, 1), (1, 1)),
    "half4": ("*(device half4*)out = *(const device half4*)a;", (1, 8), (1, 8)),
    "float4": ("*(device float4*)out = *(const device float4*)(a + 4);", (1, 16), (1, 16)),
    "long4": ("*(device long4*)out = *(const device long4*)a;", (1, 32), (1, 32)),
    "struct of 20": (
        "struct S { float v[5]; }; *(device S*)out = *(const device S*)(a + 5);", (1, 20), (1, 20)
    ),
    "struct of 128": (
        "struct S { float v[32]; }; *(device S*)out = *(const device S*)(a + 5);", (1, 128), (1, 128)
    ),
    "update in place": ("out[0] += a[0]; out[1] = out[0];", (1, 4), (2, 8)),
    "packed_float3": ("*(device packed_float3*)(out + 1) = *(const device packed_float3*)(a + 1);", (1, 12), (1, 12)),
}  # fmt: skip


@pytest.mark.parametrize("optimize", sampled([2], [1, 2]))
def test_widths(optimize):
    kernels = {name: emulator.metal_kernel("width", ["a"], ["out"], body) for name, (body, _, _) in WIDTHS.items()}
    for name, kernel in kernels.items():
        kernel(
            inputs=[X], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(32,)], output_dtypes=[mx.float32],
            init_value=0, options=emulator.Options(optimize=optimize),
        )  # fmt: skip
        a, out = kernel.traffic["a"], kernel.traffic["out"]
        got = (a.reads, a.bytes_read), (out.writes, out.bytes_written)
        assert got == WIDTHS[name][1:], name


def test_coalescing():
    body = "uint i = thread_position_in_grid.x; out[i] = a[i] + a[(i * 16) % 64] + a[0];"
    kernel = emulator.metal_kernel("lines", ["a"], ["out"], body)
    kernel(inputs=[X], grid=(64, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(64,)], output_dtypes=[mx.float32])
    a, out = kernel.traffic["a"], kernel.traffic["out"]
    # Two simdgroups: 2 adjacent lines, 4 lines 16 floats apart, and 1 line for all lanes.
    assert (a.simd_accesses, a.simd_lines, a.group_lines) == (6, 2 * (2 + 4 + 1), 2 * 4)
    assert (out.simd_accesses, out.simd_lines, out.lines_per_access) == (2, 4, 2.0)
    assert (a.bytes_read, a.distinct_read, a.reread) == (3 * 256, 256, 3.0)
    assert kernel.traffic.bytes_read == 3 * 256
    table = str(kernel.traffic).splitlines()
    assert table[0].startswith("lines: 64 threads; per thread at most 0 barriers, 0 collectives")
    assert [line.split() for line in table[2:]] == [
        ["a", "768", "256", "3.00x", "0", "2.3"],
        ["out", "0", "0", "0.00x", "256", "2.0"],
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[0] = a[64];", "reads a[64]"),
        ("out[0] = a[int(a[0]) - 1];", "reads a[-1] (bytes -4 to -1"),
        ("out[1 << 29] = 0;", "writes out[536870912]"),
        ("*(device float4*)(out + 2) = float4(1);", "writes out[2] (bytes 8 to 23"),
        ("struct S { float v[5]; }; S s = *(const device S*)(a + 60); out[0] = s.v[int(a[0])];", "reads a[60]"),
        ("device float* p = nullptr; p[int(a[0])] = 1;", "writes 4 bytes at 0x0"),
        ("float t[4] = {1, 2, 3, 4}; out[0] = t[int(a[4])];", "index 4 of an array"),
        (
            "float t[100000]; for (int i = 0; i < 100000; ++i) t[i] = a[i % 64];\nout[0] = t[int(a[9])];",
            "stack is used up",
        ),
        ("int x = -2147483647 - 1; out[0] = x / (int(a[0]) - 1);", "integer division overflows"),
    ],
)
def test_outside(body, message):
    text = fault_of(body, X, out=(4,), grid=1, init_value=0)
    assert message in text
    assert "kernel probe, thread (0, 0, 0) of threadgroup (0, 0, 0), probe" in text


def test_recursion_ends():
    header = "float f(int n) { volatile float x[16]; x[n % 16] = n; return n == 0 ? 0 : x[n % 16] + f(n - 1); }\n"
    assert "stack is used up" in fault_of("out[0] = f(int(a[0]) + 100000);", X, header=header, out=(1,))


def test_constant_tables_of_the_program_are_read():
    header = "constant float TABLE[] = {1, 2, 3, 4};\n"
    assert launch("out[0] = TABLE[int(a[2])];", X, header=header, out=(1,)).item() == 3
