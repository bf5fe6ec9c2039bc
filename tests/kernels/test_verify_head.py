"""Compare verify_head with argmax, a draw and a sort of the logits of verify_qmm and verify_gemv, row by row."""

import mlx.core as mx
import numpy as np
import pytest
from exact import AFFINE, CONTRACTIONS, DTYPES, FORMATS, draw
from metal_cases import linux_only
from sweep import SWEEP, sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import (
    draw_ref,
    masked,
    top_ref,
    verify_gemv,
    verify_head,
    verify_head_draw,
    verify_head_ref,
    verify_head_top,
    verify_qmm,
)
from mlx_mtp.kernels._source import padded

pytestmark = linux_only
KEY, POSITION, TEMP = mx.array([7, 2**32 - 3], mx.uint32), 1234, 15.0


def argmax(logits):
    """Return Metal's argmax: of numbers only, 0 if nothing is above -infinity."""
    values = np.array(logits.astype(mx.float32))
    return np.argmax(np.where(np.isnan(values), -np.inf, values), axis=-1)


def dense(shape, m, dtype, bias=False):
    mx.random.seed(m * shape[0] + shape[1])
    x, w = mx.random.normal((m, shape[1])).astype(dtype), mx.random.normal(shape).astype(dtype)
    return x, w, mx.random.normal(shape[:1]).astype(dtype) if bias else None


def logits_of(x, weights, bias):
    if isinstance(weights, mx.array):
        return verify_gemv(x, weights, bias)
    (y,) = verify_qmm(x, weights)
    return y if bias is None else y + bias


def compare(x, weights, bias=None, n=5, options=None):
    """Compare all three ops with the logits; return the traffic of their launches."""
    with emulator.emulated(options or emulator.Options()) as launches:
        logits = logits_of(x, weights, bias)
        del launches[:]
        tokens = verify_head(x, weights, bias)
        drawn = verify_head_draw(x, weights, KEY, POSITION, TEMP, bias)
        values, first, total = verify_head_top(x, weights, n, bias)
    assert tokens.dtype == drawn.dtype == first.dtype == mx.int32
    assert np.array_equal(tokens, argmax(logits))
    assert drawn.tolist() == draw_ref(logits, KEY, POSITION, TEMP).tolist()
    expected = top_ref(logits, n)
    assert np.array_equal(values, expected[0])
    assert np.array_equal(first, expected[1])
    assert mx.allclose(total, expected[2], rtol=1e-6, atol=2e-6)
    return launches


@pytest.mark.parametrize(
    ("mode", "bits", "group", "shape", "m", "dtype", "bias", "contraction"),
    [
        ("affine", 4, 64, (261, 512), 3, mx.bfloat16, False, "fast"),
        ("affine", 8, 32, (131, 320), 8, mx.float32, True, "fast"),
        pytest.param("affine", 2, 32, (140, 128), 5, mx.float16, False, "off", marks=sweep),
    ],
)
def test_quantized(mode, bits, group, shape, m, dtype, bias, contraction):
    x, weights = draw(mode, bits, group, shape, m, dtype)
    bias = mx.random.normal(shape[:1]).astype(dtype) if bias else None
    last = mx.dequantize(weights.w[-1:], weights.scales[-1:], weights.biases[-1:], **weights.format)
    x[0] = last[0].astype(dtype)  # its greatest logit is the last one
    compare(x, weights, bias, options=emulator.Options(fp_contract=contraction, order="reverse", traffic=False))


@pytest.mark.parametrize(
    ("shape", "m", "dtype", "bias", "contraction"),
    [
        ((301, 130), 4, mx.bfloat16, False, "fast"),
        pytest.param((203, 132), 7, mx.float16, True, "fast", marks=sweep),
        pytest.param((130, 40), 2, mx.float32, True, "off", marks=sweep),
    ],
)
def test_unquantized(shape, m, dtype, bias, contraction):
    x, w, bias = dense(shape, m, dtype, bias)
    compare(x, w, bias, options=emulator.Options(fp_contract=contraction, order=3, traffic=False))


@sweep
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sweep(dtype, contraction):
    options = emulator.Options(fp_contract=contraction, traffic=False)
    for i, (mode, bits, group) in enumerate([*FORMATS, *AFFINE]):
        for k in (128, 384, 512):
            x, weights = draw(mode, bits, group, (129 + 17 * i, k), 1 + i % 8, dtype)
            compare(x, weights, n=(20, 33, 64)[i % 3] if k == 384 else 1 + i % 20, options=options)
    for m in range(1, 10):
        for k in (20, 64, 65, 256, 300):
            compare(*dense((120 + 11 * m, k), m, dtype, bias=m % 2 == 0), n=2 * m, options=options)


@pytest.mark.parametrize("quantized", sampled([True], [True, False]))
def test_a_row_is_chosen_for_alone(quantized):
    """For 9 rows, in two groups that share one, and with other rows, as for a single row at its own position."""
    x, weights = draw("affine", 4, 32, (150, 96), 9, mx.float32) if quantized else dense((150, 96), 9, mx.float32)[:2]
    with emulator.emulated(emulator.Options(traffic=False)):
        values, first, total = verify_head_top(x, weights, 3)
        drawn = verify_head_draw(x, weights, KEY, mx.array([POSITION]), TEMP)
        for i in sampled((0, 4, 8), (0, 3, 4, 8)):
            row = x[i : i + 1]
            assert verify_head_draw(row, weights, KEY, mx.array(POSITION + i), TEMP).item() == drawn[i].item()
            alone = verify_head_top(row, weights, 3)
            for found, of_all in zip(alone, (values, first, total), strict=True):
                assert np.array_equal(found.view(mx.uint32), of_all[i : i + 1].view(mx.uint32))


def test_of_equal_logits_the_lowest_token():
    """Within a lane, a tile and a lane's turns, and between tiles; in 16 bits different sums collide as well."""
    x, w, _ = dense((301, 64), 6, mx.bfloat16)
    w[[3, 4, 40, 100, 130, 299, 300]] = w[7] * 4
    x[0], x[1] = mx.abs(w[7]), -mx.abs(w[7])
    x[2] = 0
    w[200:264] = w[8] * mx.array(1.0, mx.bfloat16)
    x[3] = w[8] * 4
    launches = compare(x, w, n=12)
    assert len(launches) == 6
    with emulator.emulated():
        tokens, (_, first, _) = verify_head(x, w), verify_head_top(x, w, 12)
    assert tokens[2].item() == 0
    assert first[2].tolist() == list(range(12))
    assert first[3].tolist() == [8, *range(200, 211)]


def test_nan_and_infinity_stay_in_their_rows():
    x, w, _ = dense((140, 64), 6, mx.bfloat16)
    clean = mx.array(x)
    x[1, 5], x[2, 7], x[4, 60] = float("nan"), float("inf"), float("-inf")
    with emulator.emulated():
        logits = verify_gemv(x, w)
        tokens, first = verify_head(x, w), verify_head_top(x, w, 4)[1]
        drawn = verify_head_draw(x, w, KEY, 3, TEMP)
        expected = verify_head(clean, w), verify_head_top(clean, w, 4)[1], verify_head_draw(clean, w, KEY, 3, TEMP)
    assert tokens.tolist() == argmax(logits).tolist()
    assert tokens[1].item() == drawn[1].item() == 0
    assert first[1].tolist() == [0, 1, 2, 3]
    for i in (0, 3, 5):
        for found, alone in zip((tokens, first, drawn), expected, strict=True):
            assert found[i].tolist() == alone[i].tolist()


def test_single_logits_that_are_not_numbers():
    """A weight's NaN is never chosen, even if the row has no finite logit."""
    x, w, _ = dense((260, 64), 6, mx.bfloat16)
    x = mx.abs(x)
    w[[0, 17, 128]], w[[5, 200]], w[[9, 130]] = float("nan"), float("-inf"), float("inf")
    with emulator.emulated():
        values, first, total = verify_head_top(x, w, 3)
        assert verify_head(x, w).tolist() == [9] * 6
        w[[9, 130]] = float("-inf")
        lower = verify_head(x, w).tolist()
        nothing = mx.full((20, 64), float("-inf"), mx.bfloat16)
        rest = verify_head_top(x, nothing, 2)
        assert verify_head(x, nothing).tolist() == verify_head_draw(x, nothing, KEY, 0, 1.0).tolist() == [0] * 6
    assert first[:, :2].tolist() == [[9, 130]] * 6
    assert values[0, 0].item() == float("inf")
    assert not np.isfinite(np.array(total)).any()
    assert lower == argmax(x @ w.T).tolist()
    assert rest[1].tolist() == [[0, 1]] * 6
    assert rest[2].tolist() == [float("-inf")] * 6


@pytest.mark.parametrize("n", sampled([11], [8, 11]))
def test_draws_are_those_of_mlx(n):
    """At many positions the tokens equal those of mx.random.categorical."""
    x, w, _ = dense((n, 64), 8, mx.float32)
    w = w * 0.1
    options, tokens, expected = emulator.Options(traffic=False), [], []
    for position in range(0, 160 if SWEEP else 72, 8):
        with emulator.emulated(options):
            tokens += verify_head_draw(x, w, KEY, mx.array(position), 1.3).tolist()
            logits = verify_gemv(x, w)
        for i in range(8):
            dice = mx.random.split(KEY + mx.array([0, position + i], mx.uint32))[1]
            expected.append(mx.random.categorical(logits[i] * (1 / 1.3), key=dice).item())
    assert tokens == expected
    assert set(tokens) == set(range(n))


def test_weights_once_and_no_logits():
    """Only the tokens and values of each row's two tiles, and those of the row, are written."""
    for m, mode in sampled([(5, "affine"), (16, None)], [(5, "affine"), (8, "nvfp4"), (12, "affine"), (16, None)]):
        x, weights = draw(mode or "affine", 4, 16 if mode == "nvfp4" else 64, (256, 512), m, mx.bfloat16)
        weights = weights if mode else dense((256, 512), 1, mx.bfloat16)[1]
        with emulator.emulated() as launches:
            tokens = verify_head(x, weights)
            products, merge = launches
            assert np.array_equal(tokens, argmax(logits_of(x, weights, None)))
        assert products["w"].reread == 1.0
        assert products["x"].reread <= 256 / (2 if m > 6 else 4) * padded(m) / m
        outputs = [b for launch in (products, merge) for b in launch.buffers.values() if b.space == "output"]
        assert sum(b.bytes_written for b in outputs) == m * (2 * 8 + 8)
        assert merge["values"].distinct_read == m * 2 * 4


def test_sixty_four_of_a_tile():
    x, w, _ = dense((1100, 32), 6, mx.bfloat16)
    compare(x, w, n=64, options=emulator.Options(traffic=False))


def test_without_metal_it_is_the_reference():
    x, weights = draw("affine", 4, 64, (24, 512), 3, mx.float32)
    logits = mx.quantized_matmul(x, weights.w, weights.scales, weights.biases, group_size=64, bits=4)
    assert np.array_equal(verify_head(x, weights), mx.argmax(logits, axis=-1))
    x, w, bias = dense((24, 64), 3, mx.float16, bias=True)
    assert np.array_equal(verify_head_ref(x, w, bias), mx.argmax(mx.addmm(bias, x, w.T), axis=-1))
    values, first, total = verify_head_top(x, w, 24)
    assert np.array_equal(mx.take_along_axis(x @ w.T, first, axis=-1), values)
    assert mx.allclose(total, mx.logsumexp(values, axis=-1))


def test_what_the_kernels_leave_to_mlx():
    """Fewer than eight tokens, a bias of a wider type, a matrix far wider than high."""
    half = draw("affine", 4, 64, (16, 64), 2, mx.float16)
    with emulator.emulated() as launches:
        for x, w, bias in (
            dense((7, 64), 2, mx.float32),
            dense((8, 128), 2, mx.float32),
            (*half, mx.random.normal((16,))),
        ):
            assert np.array_equal(verify_head(x, w, bias), verify_head_ref(x, w, bias))
    assert not launches


def test_what_they_do_not_support():
    x, weights = draw("affine", 4, 64, (24, 512), 3, mx.float32)
    with pytest.raises(ValueError, match="x has 64 columns; the weights have 512"):
        verify_head(x[:, :64], weights)
    with pytest.raises(ValueError, match=r"x has shape \(1, 3, 512\); it must be \(M, K\)"):
        verify_head(x[None], weights)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\); it must be \(24,\)"):
        verify_head(x, weights, mx.zeros(3))
    with pytest.raises(ValueError, match=r"temp=0: allowed is more than 0"):
        verify_head_draw(x, weights, KEY, 0, 0)
    with pytest.raises(ValueError, match=r"n=25: allowed is 1 to 24"):
        verify_head_top(x, weights, 25)
    with pytest.raises(ValueError, match=r"and the weights \(4, 8\); they must be \(M, K\)"):
        verify_head(x, mx.zeros((4, 8)))


@pytest.mark.parametrize(
    ("m", "n", "more", "kind"),
    [
        (3, 261, 0, "affine"),
        (7, 300, 2, "dense"),
        (9, 131, 1, "affine"),
        *((m, 96, 0, "dense") for m in sampled((1,), (2, 16))),
    ],
)
def test_masked_tokens_are_not_chosen(m, n, more, kind):
    """Whatever share is allowed, also none, with words to spare; a row's choice does not depend on the others."""
    x, weights, bias = (
        dense((n, 64), m, mx.float32) if kind == "dense" else (*draw("affine", 4, 32, (n, 128), m, mx.float32), None)
    )
    words = -(-n // 32) + more
    bits = mx.random.randint(0, 2**31 - 1, (2, m, words)).astype(mx.int32)
    mask = bits[0] & bits[1] ^ mx.where(mx.random.uniform(shape=(m, words)) < 0.5, -(2**31), 0).astype(mx.int32)
    mask[m // 2] = 0
    if more:
        mask[:, -(-n // 32) :] = -1  # bits of no token
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        logits = logits_of(x, weights, bias)
        del launches[:]
        tokens = verify_head(x, weights, bias, mask=mask)
        drawn = verify_head_draw(x, weights, KEY, POSITION, TEMP, bias, mask=mask)
        assert len(launches) == 4
        alone = [verify_head(x[i : i + 1], weights, bias, mask=mask[i : i + 1]).item() for i in range(m)]
    kept = masked(logits, mask)
    allowed = np.unpackbits(np.array(mask).view(np.uint8), axis=1, bitorder="little")[:, :n] == 1
    assert np.array_equal(np.isfinite(np.array(kept.astype(mx.float32))), allowed)
    assert tokens.tolist() == argmax(kept).tolist() == alone
    want = draw_ref(kept, KEY, POSITION, TEMP).tolist()
    assert drawn.tolist() == [0 if i == m // 2 else token for i, token in enumerate(want)]
    assert tokens[m // 2].item() == 0


def test_a_mask_of_another_shape_is_refused():
    x, weights, _ = dense((40, 64), 2, mx.float32)
    for shape in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"^mask has shape .*; it must be \(2, 2 or more\)$"):
            verify_head(x, weights, mask=mx.zeros(shape, mx.int32))
