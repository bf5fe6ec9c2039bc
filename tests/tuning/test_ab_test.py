"""Compare one kernel with MLX's operations: which outputs are right or wrong, and the allowed error."""

import math
from itertools import groupby

import mlx.core as mx
import pytest
from trial_cases import WEIGHTS, K, fails, off_by_one_bit, stock, trial

from mlx_mtp.tuning import ab_test
from mlx_mtp.tuning.kernel_trials import KernelTrial, check


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_right_kernels_pass(rows, dtype):
    assert check(trial(rows=rows, dtype=dtype)) is None


ONLY_DRAW_4 = trial().x(4)[0, 0].item()
LAST = WEIGHTS[-1]


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (off_by_one_bit(0), "row 1 of 3 differs from one row alone"),
        (off_by_one_bit(2), "row 3 of 3 differs from one row alone"),
        (off_by_one_bit(when=lambda x, w: x[0, 0].item() == ONLY_DRAW_4), "row 1 of 3 differs"),
        (off_by_one_bit(when=lambda x, w: w is LAST), "row 1 of 3 differs"),
        (lambda w: lambda x: [x * w, x + w + 0 * x.sum()], "with NaN in another"),
        (lambda w: lambda x: [x * w, mx.where(mx.isinf(x).any(), 0, x + w)], "changes with infinity in another row"),
        (lambda w: lambda x: [x * w], "gives [((3, 16), 'mlx.core.float32')] where [(("),
        (lambda w: lambda x: [x * w, (x + w)[:, :8]], "is expected"),
        (lambda w: lambda x: [x * w, (x + w).view(mx.uint32)], "is expected"),
        (fails(RuntimeError("no such function\nat line 3")), "fails with RuntimeError: no such function"),
        (fails(ValueError()), "fails with ValueError"),
    ],
)
def test_wrong_kernels_have_a_reason(ours, words):
    assert words in (check(trial(ours)) or "nothing")


def test_nan_of_another_sign_is_equal():
    weights = [mx.where(mx.arange(K) == 3, math.nan, w) for w in WEIGHTS]

    def other_sign(w):
        return lambda x: [mx.where(mx.isnan(y), -y, y) for y in stock(w)(x)]

    assert check(trial(other_sign, weights=weights)) is None
    assert "differs" in str(check(trial(lambda w: stock(mx.where(mx.arange(K) == 3, math.nan, w)))))
    assert "differs" in str(check(trial(lambda w: stock(mx.nan_to_num(w)), weights=weights)))


def test_bits_are_compared_not_values():
    same_value = KernelTrial(
        "op", "s", 2, [(lambda x: [mx.zeros_like(x)], lambda x: [-mx.zeros_like(x)])], K, mx.float16
    )
    assert check(same_value) == "row 1 of 2 differs from one row alone"
    same_nan = KernelTrial("op", "s", 2, [(lambda x: [x * math.nan], lambda x: [x * math.nan])], K, mx.float32)
    assert check(same_nan) is None


def test_outputs_of_any_type_are_compared():
    def ours(x):
        return [mx.argmax(x, axis=-1), x > 0, x.astype(mx.bfloat16)]

    def wrong(x):
        return [*ours(x)[:1], x >= x, x.astype(mx.bfloat16)]

    assert check(KernelTrial("op", "s", 4, [(ours, ours)], K, mx.float32)) is None
    assert "differs" in check(KernelTrial("op", "s", 4, [(wrong, ours)], K, mx.float32))


def test_a_leak_of_any_row_into_any_other_is_found():
    for rows in (2, 5, 8):
        for pair in [(a, b) for a in range(rows) for b in range(rows) if a != b]:
            spoiled = [ab_test._spoiled(rows, draw) for draw in range(ab_test.DRAWS)]
            assert any(s[pair[0]] and not s[pair[1]] for s in spoiled), pair


def test_another_seed_draws_other_values():
    drawn = []
    ours = off_by_one_bit(when=lambda x, w: drawn.append(x[0, 0].item()))
    for seed in (0, 1):
        assert check(trial(ours), seed) is None
    values = {value for value in drawn if math.isfinite(value)}
    assert len(values) == 2 * ab_test.DRAWS


def test_many_layers_are_visited_far_apart():
    visited = []
    layers = [(lambda x, i=i: visited.append(i) or [x], lambda x: [x]) for i in range(60)]
    assert check(KernelTrial("op", "s", 2, layers, K, mx.float32)) is None
    assert [i for i, _ in groupby(visited)] == list(range(0, 60, 5))


def test_exceptions_of_mlx_and_ctrl_c_are_raised():
    with pytest.raises(KeyboardInterrupt):
        check(trial(fails(KeyboardInterrupt())))
    with pytest.raises(RuntimeError, match="stock"):
        check(KernelTrial("op", "s", 2, [(stock(LAST), fails(RuntimeError("stock"))(0))], K, mx.float32))


# The allowed error.


@pytest.mark.parametrize(
    ("dtype", "error", "right"), [(mx.float32, 1e-6, True), (mx.float32, 1e-5, False), (mx.bfloat16, 2e-2, False)]
)
def test_the_allowed_error_if_stock_has_none(dtype, error, right):
    """In float32 the truth itself is rounded, so a kernel whose sums have another order must pass."""

    def truth(x):
        return [x.astype(mx.float32) * 3]

    def ours(x):
        return [(x.astype(mx.float32) * (3 + 3 * error)).astype(x.dtype)]

    def same(x):
        return [x * 3]

    wrong = check(KernelTrial("op", "s", 3, [(ours, same)], K, dtype, truth=[truth]))
    assert wrong is None if right else "errs by" in wrong


def thrice(x):
    return [x.astype(mx.float32) * 3]


def with_truth(ours):
    """Return a trial in bfloat16 of an op with its own arithmetic."""
    return KernelTrial("op", "s", 3, [(ours, lambda x: [x * 3])], K, mx.bfloat16, truth=[thrice])


def test_each_row_of_an_op_with_a_truth_is_checked_alone():
    """One wrong value is a small part of the error of all rows, but too large for its row."""

    def right(x):
        return [thrice(x)[0].astype(x.dtype)]

    def one_value(x):
        wrong = (mx.arange(K) == 0) & (mx.abs(x[:, :1]) > 1) & (mx.abs(x[:, 1:2]) < 0.3)
        return [mx.where(wrong, 1.04, 1).astype(x.dtype) * right(x)[0]]

    def mixing(x):
        return [right(x)[0] + x.sum(axis=0) / 2**20]

    def failing(x):
        raise RuntimeError("no such thing")

    assert check(with_truth(right)) is None
    assert "of 3 errs by" in check(with_truth(one_value))
    assert "changes with NaN in another row" in check(with_truth(mixing))
    assert check(with_truth(failing)) == "fails with RuntimeError: no such thing"
