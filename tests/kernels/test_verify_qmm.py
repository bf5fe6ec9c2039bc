"""Compare every row of verify_qmm with the bits of MLX's one-row kernel; twelve rows read the weights once."""

import itertools
import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from exact import CONTRACTIONS, DTYPES, FORMATS, draw, one_row, same_bits
from metal_cases import exact, linux_only, relative_error
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import on_metal, verify_qmm, verify_qmm_ref
from mlx_mtp.kernels._quantized import supported, tiles

pytestmark = linux_only
# K by MLX's kernel: qmv_quad, qmv_fast (multiples of 512; at 6 and 8 bits of 256, too), qmv.
K_OF = {"quad": (64, 128), "fast": (512, 1024, 1536), "plain": (192, 320, 384, 448, 576, 896)}


def emulated(x, weights, **options) -> tuple[list[mx.array], emulator.Traffic]:
    with emulator.emulated(emulator.Options(**options)) as launches:
        outputs = verify_qmm(x, weights)
        (traffic,) = launches
    return outputs, traffic


def cases(seed: int) -> list[tuple]:
    """Return every width with each kind of K, in two group sizes, with varying N and M.

    Each width has each dtype and group size, and so has each kind of K.
    """
    rng = random.Random(seed)
    found = []
    for (i, (mode, bits, group)), (j, kind) in itertools.product(enumerate(FORMATS), enumerate(K_OF)):
        if kind == "quad" and bits in (3, 5, 6):  # MLX has no such kernel
            continue
        k = rng.choice([k for k in K_OF[kind] if k % group == 0] or [128])
        n, m = rng.choice((1, 2, 3, 5, 7, 8, 12, 13, 20, 33)), rng.choice(range(1, 10))
        dtype = DTYPES[(i + j + seed) % 3]
        if mode == "affine" and i % 3 == (i // 3 + i // 9 + j) % 3:
            continue
        found.append((mode, bits, group, k, n, m, dtype, CONTRACTIONS[(i // 3 + j + seed) % 3]))
    return found


# Each number of bits, each format of floating point, and each kind of K with several.
FEW = (1, 8, 15, 21, 31, 36)


def assert_rows_exact(mode, bits, group, k, n, m, dtype, contraction):
    x, weights = draw(mode, bits, group, (n, k), m, dtype)
    (y,), _ = emulated(x, weights, fp_contract=contraction)
    assert same_bits(y, one_row(x, weights, emulator.Options(fp_contract=contraction)))
    reference = verify_qmm_ref(x, weights)[0]
    assert relative_error(y, exact(reference)) < {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize(
    "case",
    sampled((cases(0)[i] for i in FEW), cases(0)),
    ids=lambda c: "-".join(str(v).rpartition(".")[2] for v in c),
)
def test_rows_have_the_bits_of_one_row(case):
    assert_rows_exact(*case)


def test_two_bits_are_taken_sixteen_at_a_time():
    """Also where K is a multiple of 1024, which other widths would take twice as many of."""
    assert_rows_exact("affine", 2, 64, 1024, 9, 4, mx.float32, "off")


@sweep
@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_sweep(contraction):
    for fmt, dtype in itertools.product(FORMATS, DTYPES):
        rng = random.Random(f"{fmt}{dtype}{contraction}")
        for kind, m in itertools.product(K_OF, range(1, 11)):
            k = rng.choice([k for k in K_OF[kind] if k % fmt[2] == 0] or [128])
            assert_rows_exact(*fmt, k, rng.randrange(1, 40), m, dtype, contraction)


@pytest.mark.parametrize("m", sampled((1, 3, 5, 7, 9, 11, 17), range(1, 18)))
def test_any_number_of_rows(m):
    x, weights = draw("affine", 4, 64, (24, 512), m, mx.float32)
    (y,), _ = emulated(x, weights)
    assert same_bits(y, one_row(x, weights))


@pytest.mark.parametrize("k", sampled([336], [48, 336]))
def test_groups_of_16_that_are_an_odd_number(k):
    assert_rows_exact("nvfp4", 4, 16, k, 14, 6, mx.float32, "fast")


@pytest.mark.parametrize("order", sampled([7], ["reverse", 7]))
def test_in_any_order_of_threads(order):
    x, weights = draw("affine", 5, 32, (13, 320), 7, mx.float16)
    (y,), _ = emulated(x, weights, order=order)
    assert same_bits(y, one_row(x, weights))


@pytest.mark.parametrize(
    "value", sampled([3e-45, 1e30, float("nan")], [1e-38, 3e-45, 65504.0, 1e30, float("inf"), float("nan")])
)
def test_extreme_rows_stay_what_they_are_alone_and_leave_the_others(value):
    x, weights = draw("affine", 4, 64, (8, 448), 4, mx.float32)
    (clean,), _ = emulated(x, weights)
    spoilt = mx.where(mx.arange(4)[:, None] == 2, value, x)
    (y,), _ = emulated(spoilt, weights)
    kept = mx.array([0, 1, 3])
    assert same_bits(y[kept], clean[kept])
    assert np.array_equal(np.array(y[2]), np.array(one_row(spoilt, weights)[2]), equal_nan=True)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_every_code_of_weights_and_scales(mode, bits, group):
    """NaN's and the smallest scale's too, which a quantizer rarely writes."""
    x, weights = draw(mode, bits, group, (64, 128), 3, mx.float32)
    codes = mx.random.randint(0, 2**31, weights.w.shape).astype(mx.uint32)
    scales = mx.arange(weights.scales.size).astype(mx.uint8).reshape(weights.scales.shape)
    weights = weights.__class__(codes, scales, *list(vars(weights).values())[2:])
    (y,), _ = emulated(x, weights)
    want = one_row(x, weights)
    assert np.array_equal(np.isnan(np.array(y)), np.isnan(np.array(want)))
    assert 0 < mx.isnan(want).sum().item() < want.size
    assert same_bits(mx.where(mx.isnan(y), 0, y), mx.where(mx.isnan(want), 0, want))


@pytest.mark.parametrize(
    ("n", "k", "bits", "group"),
    sampled([(2, 64, 4, 64), (1, 448, 4, 64)], [(1, 64, 2, 32), (2, 64, 4, 64), (3, 32, 5, 32), (1, 448, 4, 64)]),
)
def test_arrays_too_small_for_device_memory(n, k, bits, group):
    """Metal passes inputs of fewer than 8 elements in another address space."""
    x, weights = draw("affine", bits, group, (n, k), 3, mx.float32)
    (y,), traffic = emulated(x, weights)
    assert weights.scales.size < 8
    assert min(traffic[name].size for name in ("w", "scales", "biases")) >= 8 * 4  # bytes
    assert same_bits(y, one_row(x, weights))


@pytest.mark.parametrize(("dtype", "contraction"), [(mx.bfloat16, "on"), (mx.float32, "fast")])
def test_a_bias_is_added_to_the_rounded_product(dtype, contraction):
    """A bias of another type is added in an operation of its own, as in MLX."""
    x, weights = draw("affine", 4, 64, (45, 512), 3, dtype, parts=(16, 17, 24, 45))
    want = one_row(x, weights, emulator.Options(fp_contract=contraction))
    for type_ in {dtype, mx.float32}:
        bias = (mx.random.normal((45,)) * 100).astype(type_)
        outputs, traffic = emulated(x, replace(weights, bias=bias), fp_contract=contraction)
        assert same_bits(mx.concatenate(outputs, axis=-1), want + bias)
        assert "bias" in traffic.buffers
        reference = verify_qmm_ref(x, replace(weights, bias=bias))
        assert relative_error(reference[2], exact(want + bias)[:, 17:24]) < 2e-2


def test_several_linears_in_one_launch():
    x, weights = draw("affine", 4, 64, (45, 512), 3, mx.bfloat16, parts=(16, 17, 24, 45))
    outputs, traffic = emulated(x[None], weights)
    assert [y.shape for y in outputs] == [(1, 3, 16), (1, 3, 1), (1, 3, 7), (1, 3, 21)]
    assert same_bits(mx.concatenate(outputs, axis=-1)[0], one_row(x, weights))
    assert traffic["w"].bytes_read == (1 + 3 / 45) * weights.w.nbytes  # the last tile has one of four rows


def test_weights_are_requested_once_for_twelve_rows():
    requested, chosen = {}, sampled((1, 6, 7, 8, 9, 13), range(1, 17))
    for m in chosen:
        x, weights = draw("affine", 4, 64, (64, 1024), m, mx.float32)
        _, traffic = emulated(x, weights)
        requested[m] = [traffic[name].reread for name in ("w", "scales", "biases", "x")]
    assert {m: w for m, (w, *_) in requested.items()} == {m: 1.0 if m < 13 else 2.0 for m in chosen}
    # Four lanes share a group's scale, and each requests it.
    assert all(scales == biases == 4 * w for w, scales, biases, _ in requested.values())
    # x is requested for each compiled row; from eight rows on once for two rows of weights instead of four.
    for m, (*_, x) in requested.items():
        groups, rows, results = tiles(m)
        assert x == pytest.approx(64 / results * groups * rows / m)


def test_a_lane_has_at_most_24_sums():
    assert [tiles(m) for m in (1, 5, 6, 8, 9, 11, 16, 17)] == [
        (1, 1, 4), (1, 6, 4), (1, 6, 4), (1, 8, 2), (1, 12, 2), (1, 12, 2), (2, 8, 2), (2, 12, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "k"), sampled([(4, 128), (3, 512)], [(4, 1024), (8, 1024), (3, 512), (4, 128), (6, 320)])
)
def test_x_is_requested_a_quarter_as_often_as_by_qmv_wide(bits, k):
    x, weights = draw("affine", bits, 64, (64, k), 4, mx.float16)
    _, ours = emulated(x, weights)
    arrays = (weights.w, weights.scales, weights.biases)
    _, wide = stock.quantized_matvec(x, *arrays, group_size=64, bits=bits, kernel="qmv_wide")
    assert ours["x"].bytes_read == wide["x"].bytes_read / 4
    assert ours["w"].reread == 1.0


def test_counts_are_the_same_at_two_optimisation_levels():
    x, weights = draw("affine", 4, 64, (16, 512), 3, mx.float32)
    assert emulated(x, weights, optimize=1)[1].buffers == emulated(x, weights, optimize=2)[1].buffers


def test_scales_of_another_type_than_x():
    """MLX computes in the type that both promote to."""
    x, weights = draw("affine", 4, 64, (8, 512), 2, mx.bfloat16)
    (y,), _ = emulated(x.astype(mx.float16), weights)
    assert y.dtype == mx.float32
    full = weights.__class__(
        weights.w, weights.scales.astype(mx.float32), weights.biases.astype(mx.float32), 64, 4, "affine", (8,)
    )
    assert same_bits(y, one_row(x.astype(mx.float16).astype(mx.float32), full))


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("metal", [True, False])
def test_kernels_need_metal_and_the_gpu(monkeypatch, metal, device):
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, device)))
    assert on_metal() == (metal and device == "gpu")


def test_without_metal_it_is_the_reference():
    x, weights = draw("affine", 4, 64, (24, 512), 3, mx.float32, parts=(8, 24))
    a, b = verify_qmm(x, weights)
    cpu = mx.quantized_matmul(x, weights.w, weights.scales, weights.biases, group_size=64, bits=4)
    assert relative_error(mx.concatenate([a, b], axis=-1), exact(cpu)) < 1e-5


def test_what_it_does_not_support():
    x, weights = draw("affine", 4, 64, (8, 512), 2, mx.float32)
    assert supported(x, weights)
    assert not supported(x.astype(mx.int32), weights.__class__(**{**vars(weights), "biases": None, "mode": "mxfp4"}))
    assert not supported(x, weights.__class__(**{**vars(weights), "bits": 1}))
    assert not supported(x[:0], weights)
    with pytest.raises(ValueError, match=r"x has 511 columns; the weights have 512"):
        verify_qmm(x[:, :511], weights)
