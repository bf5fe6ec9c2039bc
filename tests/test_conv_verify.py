"""The convolution of a verify: sums in the stated order, MLX's SiLU, and a window cut where the tape was."""

import mlx.core as mx
import numpy as np
import pytest
from gated_cases import NAN, same
from metal_cases import exact, launch, linux_only

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels.conv_verify import conv_verify, conv_verify_ref

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
KEYS, VALUES = 24, 40  # channels
C = 2 * KEYS + VALUES


def start(P, T, dtype, taps=4):
    x, before = (mx.random.normal((1, n, C)).astype(dtype) for n in (T, taps - 1 + P))
    return x, before, mx.random.normal((C, taps, 1)).astype(dtype)


def sums(rows, weight, fused) -> mx.array:
    """The sums of [1, S, C] in float32, a step at a time; fused ones in 80 bits, rounded after each step."""
    rows, weight = (np.array(x.astype(F32)) for x in (rows, weight[..., 0]))
    taps, wide = weight.shape[1], np.longdouble
    total = np.zeros((1, rows.shape[1] - taps + 1, rows.shape[2]), np.float32)
    for i in range(taps):
        x, w = rows[:, i : i + total.shape[1]], weight[:, i]
        total = (x.astype(wide) * w + total).astype(np.float32) if fused else x * w + total
    return mx.array(total)


def mlx_silu(x: mx.array, contraction: str) -> mx.array:
    """x * sigmoid(x) by the operators of MLX's headers, as a compiled kernel applies them."""
    body = "out[thread_position_in_grid.x] = Multiply()(a[thread_position_in_grid.x], \
Sigmoid()(a[thread_position_in_grid.x]));"
    header = stock.include("unary_ops", "binary_ops")
    return launch(body, x, dtype=x.dtype, header=header, options=emulator.Options(fp_contract=contraction))


def check(P, n, T, dtype, contraction, taps=4):
    x, before, weight = start(P, T, dtype, taps)
    before[:, n + taps - 1 :] = NAN
    with emulator.emulated(emulator.Options(fp_contract=contraction)) as launches:
        *parts, rows = conv_verify(x, before, weight, KEYS, mx.array([n]) if P else None)
    assert [launch.kernel for launch in launches] == ["conv_verify"]
    window = mx.concatenate([before[:, n : n + taps - 1], x], axis=1)
    assert same(rows, window)
    want = mlx_silu(sums(window, weight, contraction != "off").astype(dtype), contraction)
    assert [part.shape[2] for part in parts] == [KEYS, KEYS, VALUES]
    assert same(mx.concatenate(parts, axis=2), want)
    return launches[0]


@linux_only
@pytest.mark.parametrize(
    ("dtype", "contraction"), [(F16, "fast"), (BF16, "off"), (BF16, "fast"), (F32, "on"), (F32, "fast")]
)
def test_bits(dtype, contraction):
    for P, n, T in ((0, 0, 1), (0, 0, 5), (4, 0, 3), (4, 4, 8), (7, 2, 1)):
        check(P, n, T, dtype, contraction)
    check(3, 1, 2, dtype, contraction, taps=3)


@linux_only
def test_memory_and_extremes():
    """Every new value is written once; the SiLU of large values is what MLX makes of them."""
    traffic = check(3, 2, 4, BF16, "off")
    assert traffic["rows"].bytes_written == 2 * (3 + 4) * C
    assert sum(traffic[name].bytes_written for name in "qkv") == 2 * 4 * C
    assert traffic["before"].distinct_read == 2 * 3 * C
    x = mx.array(np.linspace(-120, 120, C)[None, None]).astype(F16)
    weight = mx.zeros((C, 4, 1), F16)
    weight[:, 3] = 1
    with emulator.emulated(emulator.Options(order=3)):
        *parts, _ = conv_verify(x, mx.zeros((1, 3, C), F16), weight, KEYS)
    assert same(mx.concatenate(parts, axis=2), mlx_silu(x, "off"))


@linux_only
@pytest.mark.parametrize("dtype", [F16, F32])
def test_rows_are_those_of_single_launches(dtype):
    """A verify of 6 rows, and then its first four one at a time, each on the rows of the launch before."""
    x, before, weight = start(0, 6, dtype)
    with emulator.emulated(emulator.Options(fp_contract="fast")):
        many = conv_verify(x, before, weight, KEYS)
        for t in range(4):
            *parts, before = conv_verify(x[:, t : t + 1], before[:, -3:], weight, KEYS)
            assert all(same(one, rows[:, t : t + 1]) for one, rows in zip(parts, many, strict=False))
        again = conv_verify(x[:, 4:], many[3], weight, KEYS, mx.array([4]))
    assert all(same(a, b[:, 4:]) for a, b in zip(again[:3], many, strict=False))


@linux_only
def test_a_count_beyond_the_tape_stays_on_it():
    x, before, weight = start(4, 1, F32)
    with emulator.emulated():
        for wrong, nearest in ((-3, 0), (7, 4)):
            got, want = (conv_verify(x, before, weight, KEYS, mx.array([n])) for n in (wrong, nearest))
            assert all(map(same, got, want))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_reference_is_the_formula(dtype):
    x, before, weight = start(4, 3, dtype)
    *parts, rows = conv_verify_ref(x, before, weight, KEYS, mx.array([1]))
    assert mx.array_equal(rows, mx.concatenate([before[:, 1:4], x], axis=1))
    window, w = exact(rows), exact(weight)[..., 0]
    total = sum(window[:, i : i + 3] * w[:, i] for i in range(4))
    want = total / (1 + np.exp(-total))
    tolerance = 1e-6 if dtype == F32 else 2**-7
    assert np.abs(exact(mx.concatenate(parts, axis=2)) - want).max() < tolerance * np.abs(want).max()


@linux_only
def test_what_the_kernel_does_not_take_goes_to_the_reference():
    x, before, weight = start(0, 2, F16)
    with emulator.emulated() as launches:
        got = conv_verify(x, before, weight.astype(F32), KEYS)
    assert not launches
    assert all(map(mx.array_equal, got, conv_verify_ref(x, before, weight.astype(F32), KEYS)))


def test_rows_before():
    x, before, weight = start(2, 1, F32)
    with pytest.raises(ValueError, match="before has 2 rows; it must have 3 rows or more"):
        conv_verify(x, before[:, :2], weight, KEYS, mx.array([0]))
    with pytest.raises(ValueError, match="before has 5 rows; it must have 3 rows without `accepted`"):
        conv_verify(x, before, weight, KEYS)
