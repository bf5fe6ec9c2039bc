"""Compare each row and head of verify_qmm_heads with the bits of MLX's one-row kernel; matrices are read once."""

import itertools
import random

import mlx.core as mx
import pytest
from exact import CONTRACTIONS, DTYPES, FORMATS, bits_of, draw, one_row, same_bits
from metal_cases import exact, linux_only, relative_error
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import Quantized, verify_qmm_heads, verify_qmm_heads_ref

pytestmark = linux_only
BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
KS = (64, 128, 192, 256, 320, 512, 1024)
# Of each kernel for one row: qmv_quad, qmv (GLM-4.7's 192) and qmv_fast; queries are next to rotated values.
CASES = [
    *(("affine", 4, 64, 128, 24, 3, 3, 64, BF16, "on"), ("affine", 8, 32, 64, 65, 2, 8, 0, F32, "fast")),
    ("affine", 4, 64, 192, 13, 3, 4, 64, F16, "fast"),
    ("affine", 8, 64, 128, 20, 2, 16, 64, BF16, "on"),
]


def drawn(mode, bits, group, k, n, heads, m, more, dtype) -> tuple[mx.array, Quantized]:
    """Return x (1, M, H, K + more) and weights (H, N, K)."""
    x, w = draw(mode, bits, group, (heads * n, k), m * heads, dtype)
    x = mx.concatenate([x, mx.full((m * heads, more), float("nan"), dtype)], axis=1).reshape(1, m, heads, -1)
    parts = [None if a is None else a.reshape(heads, n, -1) for a in (w.w, w.scales, w.biases)]
    return x, Quantized(*parts, group, bits, mode, (n,))


def emulated(x, weights, heads_first=True, **options) -> tuple[mx.array, emulator.Traffic]:
    with emulator.emulated(emulator.Options(**options)) as launches:
        y = verify_qmm_heads(x, weights, heads_first=heads_first)
        (traffic,) = launches
    return y, traffic


def per_head(x, weights, **options) -> mx.array:
    """Return (1, H, M, N): MLX's own one-row kernel applied to each row and head."""
    found = []
    for h in range(x.shape[2]):
        parts = [None if a is None else a[h] for a in (weights.w, weights.scales, weights.biases)]
        of_head = Quantized(*parts, weights.group_size, weights.bits, weights.mode, weights.ends)
        found.append(one_row(x[0, :, h, : weights.k], of_head, emulator.Options(**options)))
    return mx.stack(found)[None]


def assert_rows_exact(*case):
    *drawing, contraction = case
    x, weights = drawn(*drawing)
    want = per_head(x, weights, fp_contract=contraction)
    y, _ = emulated(x, weights, fp_contract=contraction)
    assert same_bits(y, want)
    reference = verify_qmm_heads_ref(x, weights, heads_first=True)
    assert relative_error(y, exact(reference)) < {F32: 1e-5, F16: 2e-3, BF16: 2e-2}[x.dtype]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v).rpartition(".")[2] for v in c))
def test_rows_of_heads_have_the_bits_of_one_row(case):
    assert_rows_exact(*case)


@sweep
@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_sweep(contraction):
    for fmt, dtype in itertools.product(FORMATS, DTYPES):
        rng = random.Random(f"{fmt}{dtype}{contraction}")
        for m in range(1, 17):
            k = rng.choice([k for k in KS if k % fmt[2] == 0])
            n, heads, more = rng.randrange(8, 40), rng.randrange(1, 5), rng.choice((0, 7, 64))
            assert_rows_exact(*fmt, k, n, heads, m, more, dtype, contraction)


def test_rows_first_and_rows_that_are_not_finite():
    x, weights = drawn("mxfp4", 4, 32, 512, 20, 2, 9, 0, BF16)
    clean = per_head(x, weights)
    spoilt = mx.where((mx.arange(18) == 5).reshape(1, 9, 2, 1), float("nan"), x)  # row 2 of head 1
    y, traffic = emulated(spoilt, weights, heads_first=False, order="reverse")
    assert (y.shape, traffic.grid[2]) == ((1, 9, 2, 20), 2)
    assert mx.array_equal(mx.isnan(y).any(axis=-1), mx.isnan(spoilt).any(axis=-1))
    kept = ~mx.isnan(y.swapaxes(1, 2))
    assert (bits_of(clean) == bits_of(y.swapaxes(1, 2)))[kept].all()


def test_every_matrix_is_requested_once_for_twelve_rows():
    for m, times in sampled([(8, 1), (13, 2)], [(5, 1), (8, 1), (9, 1), (13, 2)]):
        x, weights = drawn("affine", 4, 64, 512, 20, 2, m, 0, BF16)
        _, traffic = emulated(x, weights)
        assert traffic["w"].reread == times
        assert traffic["w"].distinct_read == weights.w.nbytes
        # x: once per 4 rows of weights, from seven rows on per 2; of five rows the last twice, 13 are twice eight.
        assert traffic["x"].reread == {5: 5 * 6 / 5, 8: 10, 9: 10 * 12 / 9, 13: 10 * 16 / 13}[m]


def test_small_matrices_and_what_it_does_not_support():
    x, weights = drawn("affine", 4, 64, 64, 2, 2, 3, 0, F32)
    assert weights.scales.size < 8
    assert same_bits(emulated(x, weights)[0], per_head(x, weights))
    with emulator.emulated() as launches:
        half = verify_qmm_heads(x[:, :0], weights, heads_first=False)
    assert (half.shape, launches) == ((1, 0, 2, 2), [])
    for wrong, message in (
        (x[..., :63], r"x has shape \(1, 3, 2, 63\); for these weights it must be \(1, M, 2, 64 or more\)"),
        (x[:, :, :1], r"x has shape \(1, 3, 1, 64\)"),
        (x[0], r"x has shape \(3, 2, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_qmm_heads(wrong, weights, heads_first=True)
    flat = Quantized(weights.w[0], weights.scales[0], weights.biases[0], 64, 4, "affine", (2,))
    with pytest.raises(ValueError, match=r"w has shape \(2, 8\); it must have three axes"):
        verify_qmm_heads(x, flat, heads_first=True)
