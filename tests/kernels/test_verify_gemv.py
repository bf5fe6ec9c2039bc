"""Compare unquantized products of several rows with the bits of MLX's kernel for one row; the matrix is read once."""

import itertools
import random

import mlx.core as mx
import numpy as np
import pytest
from exact import dot
from metal_cases import counted_launches, exact, linux_only, relative_error
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels._source import row_groups
from mlx_mtp.kernels.verify_gemv import _tile, supported, verify_gemv, verify_gemv_ref

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
ROUNDING = {F16: 2**-10, BF16: 2**-7, F32: 3e-6}


def case(n, k, m, dtype, bias=False):
    mx.random.seed(n * k + m)
    x, w, b = (mx.random.normal(s).astype(dtype) for s in ((m, k), (n, k), (n,)))
    return x, w, b if bias else None


def bits(y):
    return np.array(y.view(mx.uint32 if y.dtype == F32 else mx.uint16))


def ours(x, w, bias=None, **options):
    """Run the public function in the emulator; return the product and the traffic of its only launch."""
    with emulator.emulated(emulator.Options(**options)) as launches:
        y = verify_gemv(x, w, bias)
    (traffic,) = launches
    return y, traffic


def of_one_row(x, w, bias=None, **options):
    """Return MLX's own product of every row alone."""
    if w.shape[0] == 1 and bias is None:
        return dot(x, w, emulator.Options(**options))
    return stock.gemv(x, w, bias, emulator.Options(**options))


def check(n, k, m, dtype, bias, contract):
    x, w, b = case(n, k, m, dtype, bias)
    y, _ = ours(x, w, b, fp_contract=contract)
    assert y.dtype == dtype
    want, _ = of_one_row(x, w, b, fp_contract=contract)
    np.testing.assert_array_equal(bits(y), bits(want))
    wide = exact(x) @ exact(w).T + (0 if b is None else exact(b))
    assert relative_error(y, wide) < 2 * ROUNDING[dtype]


@linux_only
@pytest.mark.parametrize(
    ("n", "k", "m", "dtype", "bias", "contract"),
    [
        (13, 203, 7, BF16, False, "off"),  # a simdgroup per four rows of w
        (5, 1031, 16, BF16, False, "off"),  # eight simdgroups along K, rows of several sequences
        (24, 2048, 6, F32, False, "fast"),
        pytest.param(1, 515, 3, F16, True, "on", marks=sweep),  # with fewer than four rows of w
        (13, 64, 4, F32, False, "on"),  # four lanes along K
        pytest.param(4097, 3, 8, F32, False, "on", marks=sweep),
        pytest.param(5, 20, 1, F32, False, "off", marks=sweep),
        (131, 203, 2, BF16, False, "fast"),  # two rows of w to a simdgroup
        (3, 33, 7, BF16, True, "off"),  # with fewer than four rows of w
        (1, 16384, 5, F32, False, "on"),  # the dot product
    ],
)
def test_a_row_has_the_bits_it_has_alone(n, k, m, dtype, bias, contract):
    check(n, k, m, dtype, bias, contract)


@linux_only
@sweep
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 13, 40, 131, 1023, 4097])
def test_sweep(n):
    chosen = random.Random(n)
    for k in (1, 3, 7, 63, 64, 65, 67) if n == 4097 else (1, 3, 4, 7, 40, 63, 64, 65, 200, 515, 1031, 2048):
        for contract in ("off", "on", "fast"):
            check(n, k, *(chosen.choice(c) for c in (range(1, 9), [*ROUNDING], (False, True))), contract)


@linux_only
@pytest.mark.parametrize(
    ("n", "k", "m"), sampled([(5, 1031, 4), (3, 33, 8)], [(13, 203, 7), (5, 1031, 4), (3, 33, 8), (1, 5003, 7)])
)
def test_any_order_of_threads(n, k, m):
    x, w, _ = case(n, k, m, BF16)
    y, _ = ours(x, w)
    for order in ("reverse", 3):
        np.testing.assert_array_equal(bits(ours(x, w, order=order)[0]), bits(y))


@linux_only
@pytest.mark.parametrize("m", sampled((2, 5, 6), range(2, 9)))
def test_traffic(m):
    n, k = 32, 256
    x, w, _ = case(n, k, m, BF16)
    _, traffic = ours(x, w)
    groups, rows = row_groups(m)
    assert traffic["w"].reread == groups == (1 if m <= 5 else 2)
    assert traffic["x"].bytes_read == groups * rows * k * 2 * n / 4  # once per four rows of w
    assert traffic["y"].bytes_written == traffic["y"].distinct_written == m * n * 2
    assert (traffic.max_barriers, traffic.max_collectives) == (0, 5 * 4 * rows)


@pytest.mark.parametrize("n", [128, 160, 256, 384, 512])
@pytest.mark.parametrize("k", [2048, 7168])
def test_routers_start_many_groups_of_threads(n, k):
    with counted_launches() as launches:
        verify_gemv(mx.zeros((4, k)), mx.zeros((n, k)))
    ((op, groups),) = launches
    assert op == "verify_gemv"
    assert groups >= 64


@linux_only
def test_traffic_of_the_one_row_kernel():
    x, w, _ = case(32, 256, 5, BF16)
    assert of_one_row(x, w)[1]["w"].reread == 5.0


@linux_only
@pytest.mark.parametrize(("n", "k", "x_reads"), [(8, 1024, 2), (1, 2048, 1)])
def test_traffic_with_sums_of_several_simdgroups(n, k, x_reads):
    for m, groups in ((4, 1), (7, 2)):
        _, traffic = ours(*case(n, k, m, BF16))
        assert traffic["w"].reread == groups
        assert traffic["x"].bytes_read == groups * 4 * k * 2 * x_reads
        assert traffic["y"].bytes_written == m * n * 2
        assert traffic.max_barriers == 1


@linux_only
@pytest.mark.parametrize(("n", "k"), sampled([(5, 1031), (3, 33)], [(13, 203), (5, 1031), (3, 33), (1, 5003)]))
def test_what_is_not_finite_stays_in_its_row(n, k):
    x, w, _ = case(n, k, 7, BF16)
    clean, _ = ours(x, w)
    values, row = np.array(x.astype(F32)), np.arange(7)
    values[1, k - 1], values[3] = np.nan, np.inf  # row 3 is in both groups
    bad = ours(mx.array(values).astype(BF16), w)[0]
    np.testing.assert_array_equal(bits(bad)[(row != 1) & (row != 3)], bits(clean)[(row != 1) & (row != 3)])
    assert mx.isnan(bad[1]).all()
    assert not mx.isfinite(bad[3]).any()
    if n > 1:
        weights = np.array(w.astype(F32))
        weights[1, 0] = np.nan
        bad = ours(x, mx.array(weights).astype(BF16))[0]
        np.testing.assert_array_equal(np.isnan(exact(bad)), np.arange(n)[None] == np.full((7, 1), 1))


def test_tiles_are_those_of_mlx():
    sizes = [(k, n) for n in (1, 3, 4, 5, 255, 256, 4095, 4096) for k in (1, 64, 65, 16 * n - 1, 16 * n)]
    for k, n in sizes:
        tiled = stock.tile(k, n)
        assert _tile(k, n) == tuple(tiled[name] for name in ("SN", "BN", "BM", "TM")), (k, n)
    assert stock.tile(4096, 256) == {"BM": 1, "BN": 8, "SM": 1, "SN": 32, "TM": 4}
    assert stock.tile(4095, 4096) == {"BM": 8, "BN": 1, "SM": 1, "SN": 32, "TM": 4}
    assert stock.tile(4095, 256) == {"BM": 4, "BN": 1, "SM": 1, "SN": 32, "TM": 4}
    assert stock.tile(64, 3) == {"BM": 1, "BN": 1, "SM": 8, "SN": 4, "TM": 1}


def test_row_groups():
    assert [row_groups(m) for m in (*range(1, 9), 11)] == [
        (1, 1), (1, 2), (1, 4), (1, 4), (1, 5), (2, 4), (2, 4), (2, 4), (3, 4)
    ]  # fmt: skip
    for m in range(1, 200):
        groups, rows = row_groups(m)
        assert groups == -(-m // 5)
        assert m <= groups * rows
        assert rows in (1, 2, 4, 5)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [False, True])
def test_reference(dtype, bias):
    x, w, b = case(13, 203, 7, dtype, bias)
    y = verify_gemv(x.reshape(7, 1, 203), w, b)
    assert (y.shape, y.dtype) == ((7, 1, 13), dtype)
    assert relative_error(y[:, 0], exact(x) @ exact(w).T + (exact(b) if bias else 0)) < 2 * ROUNDING[dtype]
    assert mx.array_equal(y[:, 0], verify_gemv_ref(x, w, b))
    if not bias:
        assert mx.array_equal(verify_gemv(x, w), x @ w.T)


@linux_only
def test_shapes_and_types_are_those_of_matmul():
    x, w, b = case(5, 20, 6, F32, bias=True)
    shapes, pairs = ((20,), (6, 20), (2, 3, 20), (1, 1, 20)), ((F32, F32), (F16, F32), (BF16, F16), (F32, BF16))
    for shape, types in sampled(zip(shapes, pairs, strict=True), itertools.product(shapes, pairs)):
        given = x[0].reshape(shape) if np.prod(shape) == 20 else x.reshape(shape)
        arrays = given.astype(types[0]), w.astype(types[1])
        y, want = ours(*arrays)[0], arrays[0] @ arrays[1].T
        assert (y.shape, y.dtype) == (want.shape, want.dtype) == ((*shape[:-1], 5), F32)
        assert relative_error(y, exact(want)) < ROUNDING[F32]
    y, _ = ours(x.astype(F16), w.astype(F16), b)
    assert y.dtype == F32
    y, _ = ours(x[:, ::2], w[:, ::2])  # not contiguous
    assert relative_error(y, exact(x)[:, ::2] @ exact(w)[:, ::2].T) < ROUNDING[F32]


@linux_only
def test_mlx_computes_what_the_kernels_do_not_support():
    x = mx.ones((2, 16385))
    with emulator.emulated() as launches:
        assert verify_gemv(x, x[:1]).tolist() == [[16385.0], [16385.0]]
        assert verify_gemv(x[:0], x).shape == (0, 2)
        assert verify_gemv(mx.ones((2, 3), mx.complex64), mx.ones((4, 3))).dtype == mx.complex64
    assert launches == []
    assert supported(x, x[:1], mx.ones(1))
    assert supported(x[:, 1:], x[:1, 1:])
    assert not supported(x, x[:1])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (4, 5), None), r"x has shape \(2, 3\); its last axis must be the 5"),
        (((), (4, 5), None), r"x has shape \(\)"),
        (((2, 3), (4, 5, 3), None), r"w has shape \(4, 5, 3\); it must be \(N, K\)"),
        (((2, 3), (4, 3), (1,)), r"bias has shape \(1,\); it must be \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        verify_gemv(*(None if s is None else mx.ones(s) for s in shapes))


@linux_only
def test_the_stock_dot_product_has_one_partial_sum():
    with pytest.raises(ValueError, match="rows of 16385 values; one threadgroup sums at most 16384"):
        dot(mx.ones((1, 16385)), mx.ones((1, 16385)))
