"""Compare collectives of simdgroups and quads, barriers, and simdgroup_matrix with numpy."""

from fractions import Fraction
from itertools import accumulate

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import fault_of, launch, linux_only

from mlx_mtp import emulator

pytestmark = linux_only
RNG = np.random.default_rng(0)
VALUES = RNG.integers(1, 50, 64).astype(np.float32)


def lanes(expression: str, *, count: int = 64, values=VALUES, more: str = "") -> np.ndarray:
    """Return `expression` of x (a lane's value) and lane, in two simdgroups."""
    body = f"""
        uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
        float x = a[i]; int n = int(x);
        {more}
        out[i] = {expression};
    """
    return np.array(launch(body, mx.array(values[:count]), group=64))


def each_simdgroup(f, group: int = 32) -> np.ndarray:
    return np.concatenate([np.broadcast_to(f(v), group) for v in VALUES.reshape(-1, group)]).astype(np.float32)


def test_reductions():
    parts = {
        "simd_sum(x)": np.sum, "simd_max(x)": np.max, "simd_min(x)": np.min,
        "simd_and(n)": lambda v: np.bitwise_and.reduce(v.astype(int)),
        "simd_or(n)": lambda v: np.bitwise_or.reduce(v.astype(int)),
        "simd_xor(n)": lambda v: np.bitwise_xor.reduce(v.astype(int)),
        "simd_product(x > 25 ? 1.0f : 0.5f)": lambda v: np.prod(np.where(v > 25, 1, 0.5)),
        "simd_all(x > 1)": lambda v: np.all(v > 1), "simd_any(x > 48)": lambda v: np.any(v > 48),
        "float(uint(ulong(simd_ballot(x > 25))))": lambda v: np.float32(sum(1 << i for i in range(32) if v[i] > 25)),
        "simd_broadcast(x, 5)": lambda v: v[5], "simd_broadcast_first(x)": lambda v: v[0],
        "simd_sum(float2(x, 1)).x + simd_sum(float2(x, 1)).y": lambda v: v.sum() + 32,
    }  # fmt: skip
    body = "uint i = thread_position_in_grid.x; float x = a[i]; int n = int(x);\n" + "\n".join(
        f"out[{k * 64} + i] = {e};" for k, e in enumerate(parts)
    )
    y = np.array(launch(body, mx.array(VALUES), out=(len(parts), 64), grid=64, group=64))
    for row, (name, f) in zip(y, parts.items(), strict=True):
        assert np.array_equal(row, each_simdgroup(f)), name


def test_shuffles_and_prefixes():
    two = VALUES.reshape(2, 32)
    i = np.arange(32)
    zero = np.zeros((2, 1), np.float32)
    parts = {
        "simd_shuffle(x, lane / 2)": two[:, i // 2],
        "simd_shuffle_xor(x, 5)": two[:, i ^ 5],
        "simd_shuffle_down(x, 3)": np.concatenate([two[:, 3:], two[:, -3:]], 1),
        "simd_shuffle_up(x, 3)": np.concatenate([two[:, :3], two[:, :-3]], 1),
        "simd_shuffle_rotate_down(x, 3)": np.roll(two, -3, 1),
        "simd_shuffle_rotate_up(x, 3)": np.roll(two, 3, 1),
        "simd_shuffle_and_fill_up(x, -x, 3)": np.concatenate([-two[:, -3:], two[:, :-3]], 1),
        "simd_shuffle_and_fill_down(x, -x, 3)": np.concatenate([two[:, 3:], -two[:, :3]], 1),
        "simd_prefix_inclusive_sum(x)": np.cumsum(two, 1),
        "simd_prefix_exclusive_sum(x)": np.concatenate([zero, np.cumsum(two, 1)[:, :-1]], 1),
        "simd_prefix_inclusive_product(x > 25 ? 2.0f : 1.0f)": np.cumprod(np.where(two > 25, 2, 1), 1),
        "quad_sum(x)": np.repeat(two.reshape(2, 8, 4).sum(2), 4, 1),
        "quad_max(x)": np.repeat(two.reshape(2, 8, 4).max(2), 4, 1),
        "quad_shuffle_xor(x, 1)": two[:, i ^ 1],
        "quad_broadcast(x, 2)": two[:, i // 4 * 4 + 2],
        "quad_shuffle_down(x, 1)": two[:, np.where(i % 4 < 3, i + 1, i)],
        "float(as_type<half>(simd_shuffle_xor(as_type<ushort>(half(x)), 1)))": two[:, i ^ 1],
        "float(simd_shuffle_xor(ulong(x) << 40, 1) >> 40)": two[:, i ^ 1],
    }
    body = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup; float x = a[i];\n" + "\n".join(
        f"out[{k * 64} + i] = {e};" for k, e in enumerate(parts)
    )
    y = np.array(launch(body, mx.array(VALUES), out=(len(parts), 2, 32), grid=64, group=64))
    for row, (name, want) in zip(y, parts.items(), strict=True):
        assert np.array_equal(row, want.astype(np.float32)), name


def test_simd_sum_adds_neighbours_first():
    """mlx-lm's gated delta kernels rely on the order of simd_sum: xor 1, 2, 4, 8, 16."""
    x = mx.random.normal((32,))
    body = """
        float y = a[thread_position_in_grid.x];
        float s = simd_sum(y);
        for (ushort k = 1; k < 32; k *= 2) y += simd_shuffle_xor(y, k);
        out[thread_position_in_grid.x] = as_type<uint>(y) == as_type<uint>(s);
    """
    assert launch(body, x).tolist() == [1.0] * 32


def test_ended_lanes_take_no_part():
    body = """
        uint i = thread_position_in_grid.x;
        out[i] = -1;
        if (i >= 20) return;
        uint active = popcount(uint(ulong(simd_active_threads_mask())));
        out[i] = simd_sum(a[i]) + 1000 * simd_is_first() + 10000 * active;
    """
    y = launch(body, mx.ones(32))
    assert y.tolist() == [201020.0] + [200020.0] * 19 + [-1.0] * 12
    assert (
        launch("out[thread_position_in_grid.x] = simd_sum(1.0f);", out=(40,), group=40).tolist()
        == [32.0] * 32 + [8.0] * 8
    )


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("simd_shuffle_xor(x, 32)", "simd_shuffle_xor reads lane 32, but there is no such lane"),
        ("simd_shuffle(x, 77)", "simd_shuffle reads lane 77, but there is no such lane"),
        ("simd_shuffle_xor(x, lane)", "all must give the same"),
        ("quad_broadcast(x, 4)", "quad_broadcast reads lane 4, but there is no such lane"),
        ("lane < 7 ? simd_sum(x) : 0", "threads 0-6 wait at simd_sum"),
        ("lane < 7 ? simd_sum(x) : simd_max(x)", "threads 7-31 wait at simd_max"),
    ],
)
def test_invalid_collectives_are_refused(expression, message):
    head = "uint lane = thread_index_in_simdgroup; float x = a[lane];"
    body = f"{head}\nfloat y = {expression};\nout[lane] = y + simd_min(x);"
    text = fault_of(body, mx.ones(32))
    assert message in text
    assert "probe.metal:2" in text


def test_a_shuffle_from_a_missing_lane_is_refused():
    text = fault_of("out[thread_position_in_grid.x] = simd_shuffle_xor(1.0f, 16);", out=(16,))
    assert "reads lane 16, but it takes no part" in text


def test_barriers_and_threadgroup_arrays():
    body = """
        threadgroup float tile[4][8], *unused_pointer;
        threadgroup half2 pairs[SIZE > 1 ? SIZE : 1], more[sizeof(half2) < 8 ? 2 : 1];
        uint i = thread_index_in_threadgroup;
        tile[i / 8][i % 8] = a[i];
        pairs[i] = half2(i, -float(i));
        if (i == 0) more[1] = pairs[i];
        unused_pointer = &tile[0][0];
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
        out[i] = tile[3 - i / 8][7 - i % 8] + pairs[31 - i].y + unused_pointer[i];
    """
    x = np.arange(32, dtype=np.float32)
    with pytest.raises(emulator.CompileError):
        launch(body, mx.array(x), template=[("SIZE", 32)])
    body = body.replace("tile[4][8], *unused_pointer;", "tile[4][8]; threadgroup float* unused_pointer;")
    assert np.array_equal(np.array(launch(body, mx.array(x), template=[("SIZE", 32)])), x[::-1] - x[::-1] + x)


def test_a_simdgroup_barrier_orders_a_simdgroup_only():
    body = """
        threadgroup float s[64];
        uint i = thread_index_in_threadgroup;
        s[i] = a[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = s[i ^ MASK];
    """
    x = mx.arange(64.0)
    assert launch(body, x, group=64, template=[("MASK", 1)])[3].item() == 2
    assert "race" in fault_of(body, x, group=64, template=[("MASK", 32)])


def test_matrix_layout_is_that_of_apple():
    """Lane l holds (row, col) and (row, col + 1) with row = (l/4 & 4) + l/2 % 4, col = (l/4 & 2) * 2 + l % 2 * 2."""
    body = """
        uint l = thread_index_in_simdgroup;
        simdgroup_matrix<float, 8, 8> m;
        simdgroup_load(m, a, 8);
        out[2 * l] = m.thread_elements()[0];
        out[2 * l + 1] = m.thread_elements()[1];
    """
    y = launch(body, mx.arange(64.0), grid=32).tolist()
    lane = np.arange(32)
    position = ((lane // 4 & 4) + lane // 2 % 4) * 8 + (lane // 4 & 2) * 2 + lane % 2 * 2
    assert y == np.stack([position, position + 1], 1).ravel().tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_matrix_products(dtype):
    body = """
        simdgroup_matrix<T, 8, 8> p, q, d(T(3));
        simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
        simdgroup_load(p, a + 2, STRIDE, ulong2(1, 1));
        simdgroup_load(q, b, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(sum, p, q, sum);
        simdgroup_store(sum, out, 16, ulong2(8, 0));
        simdgroup_matrix<T, 8, 8> scaled;
        simdgroup_multiply(scaled, d, p);
        simdgroup_matrix<float, 8, 8> f;
        for (int i = 0; i < 2; ++i) f.thread_elements()[i] = scaled.thread_elements()[i];
        simdgroup_store(f, out, 16, ulong2(0, 0), true);
    """
    a, b = (mx.array(RNG.integers(-4, 5, s).astype(np.float32)).astype(dtype) for s in ((10, 12), (8, 8)))
    y = np.array(launch(body, a, b, out=(8, 16), grid=32, template=[("T", dtype), ("STRIDE", 12)]))
    p, q = np.array(a.astype(mx.float32))[1:9, 3:11], np.array(b.astype(mx.float32)).T
    assert np.array_equal(y[:, 8:], p @ q + 0.5)
    assert np.array_equal(y[:, :8], (3 * p).T)


def toward_zero(x: Fraction) -> np.float32:
    """Return the float32 next to x on the side of zero."""
    near = np.float32(float(x))
    return near if abs(Fraction(float(near))) <= abs(x) else np.nextafter(near, np.float32(0))


@pytest.mark.parametrize(("contract", "fused"), [("off", True), ("off", False), ("fast", True), ("fast", False)])
def test_matrix_sums_that_are_wide_or_truncated(contract, fused):
    """Each sum equals one in rational numbers, whatever the compiler's contraction."""
    body = """
        simdgroup_matrix<float, 8, 8> p, q, sum;
        simdgroup_load(p, a, 8);
        simdgroup_load(q, b, 8);
        simdgroup_load(sum, c, 8);
        simdgroup_multiply_accumulate(sum, p, q, sum);
        simdgroup_store(sum, out, 8);
    """
    scale = 2.0 ** RNG.integers(-12, 12, (3, 8, 8))
    a, b, c = (RNG.normal(size=(3, 8, 8)) * scale).astype(np.float32)
    a[3] = c[3] = b[:, 3] = 1e-30  # products below the least float32
    products = [
        [[Fraction(float(a[i, k])) * Fraction(float(b[k, j])) for k in range(8)] for j in range(8)] for i in range(8)
    ]
    if not fused:
        products = [[[Fraction(float(np.float32(float(p)))) for p in of] for of in row] for row in products]
    want = {"wide": np.empty((8, 8), np.float32), "truncated": np.empty((8, 8), np.float32)}
    for i, j in np.ndindex(8, 8):
        want["wide"][i, j] = float(Fraction(float(c[i, j])) + sum(products[i][j]))
        sums = accumulate(products[i][j], lambda x, p: toward_zero(Fraction(float(x)) + p), initial=c[i, j])
        *_, want["truncated"][i, j] = sums
    for order, of_order in want.items():
        options = emulator.Options(fp_contract=contract, matrix_order=order, matrix_fused=fused)
        got = launch(body, *map(mx.array, (a, b, c)), out=(8, 8), grid=32, options=options)
        assert np.array_equal(np.array(got), of_order), order
    assert not np.array_equal(want["wide"], want["truncated"])


def test_a_matrix_needs_its_whole_simdgroup():
    body = "simdgroup_matrix<float, 8, 8> m(1.0f);\nsimdgroup_store(m, out);"
    assert "all 32 lanes" in fault_of(body, out=(64,), grid=16)
