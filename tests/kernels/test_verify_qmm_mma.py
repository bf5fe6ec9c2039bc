"""Check verify_qmm_mma: the error of MLX's one-row kernel, weights read once, each row independent of the others."""

import importlib
import itertools
import random

import mlx.core as mx
import numpy as np
import pytest
from exact import DTYPES, FORMATS, bits_of, draw, one_row, same_bits
from metal_cases import exact, linux_only
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import Quantized, verify_qmm_mma, verify_qmm_mma_ref

pytestmark = linux_only
module = importlib.import_module("mlx_mtp.kernels.verify_qmm_mma")
KS = (64, 96, 128, 160, 320, 512, 544, 896, 1152)


def emulated(x, weights, **options) -> tuple[list[mx.array], emulator.Traffic]:
    with emulator.emulated(emulator.Options(**options)) as launches:
        outputs = verify_qmm_mma(x, weights)
        (traffic,) = launches
    return outputs, traffic


def truth(x: mx.array, weights: Quantized) -> np.ndarray:
    """Return the product in float64, of the numbers that the format stores."""
    w, group = weights.w, weights.group_size
    if weights.biases is None:
        return exact(x) @ exact(mx.dequantize(w, weights.scales, dtype=mx.float32, **weights.format)).T
    ones = mx.ones(weights.scales.shape)
    codes = mx.dequantize(w, ones, mx.zeros_like(ones), dtype=mx.float32, **weights.format)
    scales, biases = (np.repeat(exact(a), group, axis=1) for a in (weights.scales, weights.biases))
    return exact(x) @ (exact(codes) * scales + biases).T


def error(y: mx.array, want: np.ndarray) -> float:
    return float(np.sqrt(((exact(y) - want) ** 2).mean()))


def assert_near(mode, bits, group, k, n, m, dtype, **options):
    x, weights = draw(mode, bits, group, (n, k), m, dtype)
    (y,), traffic = emulated(x, weights, **options)
    want = truth(x, weights)
    stock = error(one_row(x, weights, emulator.Options(**options)), want)
    assert y.dtype == dtype
    assert 0 < error(y, want) <= 2 * stock < 0.02 * np.abs(want).max()
    assert traffic["w"].reread == -(-m // 16)


CASES = [
    ("affine", 2, 32, 96, 13, 5, mx.float32),
    ("affine", 3, 64, 320, 20, 6, mx.float32),
    ("affine", 3, 128, 1152, 9, 7, mx.float16),
    ("affine", 4, 64, 896, 24, 8, mx.float32),
    ("affine", 4, 32, 160, 7, 7, mx.bfloat16),
    ("affine", 5, 32, 544, 33, 6, mx.float32),
    ("affine", 6, 128, 128, 14, 8, mx.float16),
    ("affine", 8, 64, 512, 19, 5, mx.float32),
    ("mxfp4", 4, 32, 544, 12, 7, mx.float32),
    ("mxfp8", 8, 32, 160, 23, 8, mx.float32),
    ("nvfp4", 4, 16, 336, 14, 6, mx.float32),
    ("nvfp4", 4, 16, 48, 6, 3, mx.bfloat16),
]


# Two, four and eight bits and an odd number, a floating point, and each type of x.
@pytest.mark.parametrize(
    "case",
    sampled((CASES[i] for i in (0, 4, 9)), CASES),
    ids=lambda c: "-".join(str(v).rpartition(".")[2] for v in c),
)
def test_error_is_at_most_twice_that_of_one_row_of_mlx(case):
    assert_near(*case)


@sweep
@pytest.mark.parametrize("tall", [0, 2048])
@pytest.mark.parametrize("contraction", ["off", "fast"])
def test_sweep(monkeypatch, contraction, tall):
    monkeypatch.setattr(module, "TALL", tall)
    for fmt, dtype in itertools.product(FORMATS, DTYPES):
        rng = random.Random(f"{fmt}{dtype}{contraction}")
        for m in (*range(5, 10), 12, 16):
            k = rng.choice([k for k in KS if k % fmt[2] == 0])
            assert_near(*fmt, k, rng.randrange(17, 40), m, dtype, fp_contract=contraction)


@pytest.mark.parametrize("tall", [0, 2048])
def test_a_row_is_the_same_whatever_is_around_it(monkeypatch, tall):
    """Also in a tile of another height, alone, and next to rows that are not finite."""
    x, weights = draw("affine", 4, 32, (45, 672), 8, mx.float32)
    (want,), _ = emulated(x, weights)
    monkeypatch.setattr(module, "TALL", tall)
    for m in (1, 5, 8):
        (y,), traffic = emulated(x[:m], weights)
        assert same_bits(y, want[:m])
        assert traffic["w"].reread == traffic["scales"].reread == traffic["biases"].reread == 1.0
        assert traffic["x"].reread == (3 if tall == 0 else 6)  # tiles of 45 weight rows
    spoilt = mx.where(mx.arange(8)[:, None] % 3 == 1, mx.array([float("nan"), float("inf")] * 336), x)
    (y,), _ = emulated(spoilt, weights)
    kept = mx.array([0, 2, 3, 5, 6])
    assert same_bits(y[kept], want[kept])
    assert np.isnan(np.array(y[mx.array([1, 4, 7])])).all()


@pytest.mark.parametrize("order", sampled([7], ["reverse", 7]))
def test_in_any_order_of_threads(order):
    x, weights = draw("affine", 4, 32, (45, 672), 7, mx.float32)
    assert same_bits(emulated(x, weights, order=order)[0][0], emulated(x, weights)[0][0])


def test_more_rows_than_a_matrix_has():
    x, weights = draw("affine", 4, 32, (20, 160), 19, mx.float32)
    (y,), traffic = emulated(x, weights)
    assert traffic["w"].reread == 2.0
    for rows in (slice(0, 8), slice(8, 16), slice(16, 19)):
        assert same_bits(y[rows], emulated(x[rows], weights)[0][0])


def test_several_linears_in_one_launch(monkeypatch):
    monkeypatch.setattr(module, "TALL", 0)
    x, weights = draw("affine", 4, 32, (45, 160), 6, mx.float32, parts=(16, 17, 24, 45))
    outputs, traffic = emulated(x[None], weights)
    assert [y.shape for y in outputs] == [(1, 6, 16), (1, 6, 1), (1, 6, 7), (1, 6, 21)]
    (whole,), _ = emulated(x, Quantized(weights.w, weights.scales, weights.biases, 32, 4, "affine", (45,)))
    assert same_bits(mx.concatenate(outputs, axis=-1)[0], whole)
    assert (traffic.max_barriers, traffic.threadgroup_bytes) == (1, 4 * 8 * 16 * 4)


def test_tall_weights_have_tiles_of_sixteen_rows():
    x, weights = draw("affine", 4, 32, (2049, 32), 5, mx.float32)
    (y,), traffic = emulated(x, weights)
    assert traffic["x"].reread == 129
    assert error(y, truth(x, weights)) < 1e-5


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_every_code_of_weights_and_scales(mode, bits, group):
    """NaN's and the smallest scale's too, which a quantizer rarely writes."""
    x, weights = draw(mode, bits, group, (64, 128), 8, mx.float32)
    codes = mx.random.randint(0, 2**31, weights.w.shape).astype(mx.uint32)
    scales = mx.arange(weights.scales.size).astype(mx.uint8).reshape(weights.scales.shape)
    weights = Quantized(codes, scales, *list(vars(weights).values())[2:])
    (y,), _ = emulated(x, weights)
    got, want = np.array(y), np.array(one_row(x, weights))
    assert np.array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    assert 0 < finite.sum() < want.size
    size = np.abs(exact(x)) @ np.abs(np.where(np.isfinite(w := whole(weights)), w, 0)).T
    assert (np.abs(got - want)[finite] <= 1e-5 * size[finite]).all()


def whole(weights: Quantized) -> np.ndarray:
    return exact(mx.dequantize(weights.w, weights.scales, dtype=mx.float32, **weights.format))


@pytest.mark.parametrize(
    ("n", "k", "bits", "group"), sampled([(2, 64, 4, 64)], [(1, 64, 2, 32), (2, 64, 4, 64), (3, 32, 5, 32)])
)
def test_arrays_too_small_for_device_memory(n, k, bits, group):
    """Metal passes inputs of fewer than 8 elements in another address space."""
    x, weights = draw("affine", bits, group, (n, k), 5, mx.float32)
    (y,), traffic = emulated(x, weights)
    assert weights.scales.size < 8
    assert min(traffic[name].size for name in ("w", "scales", "biases")) >= 8 * 4  # bytes
    assert error(y, truth(x, weights)) < 1e-5


def test_without_metal_it_is_the_reference():
    x, weights = draw("affine", 4, 64, (24, 512), 6, mx.float16, parts=(8, 24))
    for y, want in zip(verify_qmm_mma(x, weights), verify_qmm_mma_ref(x, weights), strict=True):
        assert np.array_equal(bits_of(y), bits_of(want))


def test_what_it_does_not_support():
    x, weights = draw("affine", 4, 64, (8, 512), 2, mx.float32)
    with pytest.raises(ValueError, match=r"x has 511 columns; the weights have 512"):
        verify_qmm_mma(x[:, :511], weights)
