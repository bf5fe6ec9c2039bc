"""Compare tokens, draws and the n best of the lane `matrix` with the choices from its products, row by row."""

import mlx.core as mx
import numpy as np
import pytest
from exact import DTYPES
from matrix_sums import machine, multiplied, sensitive
from metal_cases import linux_only
from sweep import SWEEP, sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import draw_ref, masked, top_ref, verify_head, verify_head_draw, verify_head_top

pytestmark = linux_only
F32, F16, BF16 = DTYPES
KEY, POSITION, TEMP = mx.array([7, 2**32 - 3], mx.uint32), 1234, 15.0
ROWS = 16
CASES = [
    (("affine", 4, 64), 261, 320, BF16, False, ("forward", True)),
    (("plain", 16, 64), 140, 77, F32, True, ("strides", False)),
    pytest.param(("affine", 8, 32), 131, 2144, F32, True, ("halves", True), marks=sweep),
    pytest.param(("mxfp4", 4, 32), 517, 96, F16, False, ("pairs", True), marks=sweep),
    pytest.param(("q6_k", 6, 16), 135, 512, BF16, True, ("backward", True), marks=sweep),
    pytest.param(("plain", 16, 64), 200, 130, BF16, False, ("wide", True), marks=sweep),
]


def masks(n: int) -> mx.array:
    """Return a mask of each row, of which one row's allows a single token."""
    words = np.random.default_rng(n).integers(-(2**31), 2**31, (ROWS, -(-n // 32)), np.int64).astype(np.int32)
    words[1] = 0
    words[1, 2] = 1 << 5
    return mx.array(words)


def argmax(logits: mx.array) -> np.ndarray:
    return np.argmax(np.array(logits.astype(mx.float32)), axis=-1)


@pytest.mark.parametrize(("form", "n", "k", "dtype", "has_bias", "unit"), CASES, ids=str)
def test_choices_are_those_of_the_products(form, n, k, dtype, has_bias, unit):
    x, weights = sensitive(*form, n, k, ROWS, dtype)
    bias, mask = mx.random.normal((n,)).astype(dtype) if has_bias else None, masks(n)
    with machine(*unit):
        logits = multiplied(x, weights)
        logits = logits if bias is None else logits + bias
        for m in sampled((3, 16), range(1, ROWS + 1)):
            some, rows, allowed = logits[:m], x[:m], mask[:m]
            greedy = verify_head(rows, weights, bias, matrix=True)
            assert greedy.dtype == mx.int32
            assert np.array_equal(greedy, argmax(some)), m
            chosen = verify_head(rows, weights, bias, mask=allowed, matrix=True)
            assert np.array_equal(chosen, argmax(masked(some, allowed))), m
            drawn = verify_head_draw(rows, weights, KEY, POSITION, TEMP, bias, mask=allowed, matrix=True)
            assert drawn.tolist() == draw_ref(masked(some, allowed), KEY, POSITION, TEMP).tolist()
            for count in (1, 9, 17, 64) if SWEEP else (9,):  # tiles of 128 and 256 tokens
                values, tokens, total = verify_head_top(rows, weights, count, bias, matrix=True)
                expected = top_ref(some, count)
                assert np.array_equal(values, expected[0]), (m, count)
                assert np.array_equal(tokens, expected[1]), (m, count)
                assert mx.allclose(total, expected[2], rtol=1e-6, atol=2e-6)


def test_nan_is_never_chosen():
    """As in the lane exact; other rows keep their tokens."""
    x, weights = sensitive("affine", 4, 64, 261, 320, ROWS, BF16)
    spoiled = mx.where(mx.arange(ROWS)[:, None] == 2, mx.nan, x)
    with machine():
        for m in (3, 16):
            want = verify_head(x[:m], weights, matrix=True).tolist()
            assert verify_head(spoiled[:m], weights, matrix=True).tolist() == [*want[:2], 0, *want[3:]]


@pytest.mark.parametrize("m", sampled((2, 16), range(1, 17)))
def test_weights_are_requested_once(m):
    x, weights = sensitive("affine", 4, 64, 256, 512, m, BF16)
    with machine(traffic=True) as launches:
        verify_head(x, weights, matrix=True)
    assert [launch.kernel for launch in launches] == ["matrix_head", "verify_head_merge"]
    assert launches[0]["w"].reread == 1.0


@pytest.mark.parametrize("count", sampled([64], [1, 9, 64]))
def test_sixteen_rows_request_the_weights_once(count):
    x, weights = sensitive("affine", 4, 32, 512, 64, ROWS, F32)
    with emulator.emulated() as launches:
        verify_head_top(x, weights, count, matrix=True)
    assert launches[0]["w"].reread == 1
    assert launches[0].threadgroup_bytes <= 32768
