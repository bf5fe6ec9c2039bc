"""Compare verify_glu with the bits of MLX's one-row products followed by its own activation."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact import activation, draw, one_row, same_bits
from metal_cases import exact, linux_only, relative_error
from sweep import sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import verify_glu, verify_glu_ref

pytestmark = linux_only


@pytest.mark.parametrize(
    ("mode", "bits", "group", "k", "h", "m", "dtype", "limit", "contraction"),
    [
        pytest.param("affine", 4, 64, 512, 8, 4, mx.bfloat16, None, "off", marks=sweep),
        ("affine", 4, 64, 320, 14, 7, mx.float32, 0.7, "fast"),
        ("affine", 8, 32, 128, 5, 3, mx.float16, 0.5, "on"),
        pytest.param("affine", 6, 128, 256, 6, 8, mx.float32, None, "fast", marks=sweep),
        ("affine", 3, 64, 512, 1, 5, mx.bfloat16, 1.0, "on"),
        ("mxfp4", 4, 32, 96, 10, 2, mx.bfloat16, 0.3, "fast"),
    ],
)
def test_rows_have_the_bits_of_one_row(mode, bits, group, k, h, m, dtype, limit, contraction):
    x, weights = draw(mode, bits, group, (2 * h, k), m, dtype, parts=(h, 2 * h))
    x = x * mx.array(0.3, dtype)
    options = emulator.Options(fp_contract=contraction)
    with emulator.emulated(options) as launches:
        y = verify_glu(x, weights, limit)
    products = one_row(x, weights, options)
    gate, up = (mx.contiguous(part) for part in mx.split(products, 2, axis=-1))
    assert same_bits(y, activation(gate, up, limit, options))
    if limit is not None:
        assert mx.any(nn.silu(gate) > limit)
        assert mx.any(mx.abs(up) > limit)
    assert len(launches) == 1
    if h % 2 == 0 or m > 5:  # else the last tile has one pair of rows for two
        assert launches[0]["w"].reread == 1.0
    want = exact(verify_glu_ref(x.astype(mx.float32), weights, limit))
    assert relative_error(y, want) < {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]


def test_nan_and_infinity_stay():
    """A clip passes a NaN on, as MLX's does, and a gate overflows its exponential."""
    values = mx.array([float("nan"), float("inf"), float("-inf"), -100.0, 100.0, 0.0, -0.0, 3e-39])
    x, weights = mx.ones((2, 64)), draw("affine", 8, 32, (16, 64), 2, mx.float32, parts=(8, 16))[1]
    zero = weights.__class__(
        mx.zeros_like(weights.w),
        mx.zeros_like(weights.scales),
        mx.concatenate([values, values[::-1]])[:, None] / 64 * mx.ones((16, 2)),
        *(32, 8, "affine", (8, 16)),
    )
    with emulator.emulated():
        y = verify_glu(x, zero, 7.0)
    products = one_row(x, zero)
    gate, up = (mx.contiguous(part) for part in mx.split(products, 2, axis=-1))
    want = activation(gate, up, 7.0, emulator.Options())
    assert same_bits(mx.nan_to_num(y, 12345.0), mx.nan_to_num(want, 12345.0))


def test_without_metal_it_is_the_reference():
    x, weights = draw("affine", 4, 64, (24, 512), 3, mx.float32, parts=(12, 24))
    products = mx.quantized_matmul(x, weights.w, weights.scales, weights.biases, group_size=64, bits=4)
    gate, up = mx.split(products, 2, axis=-1)
    want = mx.clip(nn.silu(gate), None, 2.0) * mx.clip(up, -2.0, 2.0)
    assert relative_error(verify_glu(x, weights, 2.0), exact(want)) < 1e-5


def test_with_a_bias_the_activation_follows_the_product():
    x, weights = draw("affine", 4, 64, (24, 512), 3, mx.float32, parts=(12, 24))
    weights = replace(weights, bias=mx.random.normal((24,)) * 10)
    with emulator.emulated() as launches:
        y = verify_glu(x, weights)
    assert [launch.kernel for launch in launches] == ["verify_qmm"]
    gate, up = mx.split(one_row(x, weights) + weights.bias, 2, axis=-1)
    assert mx.allclose(y, nn.silu(gate) * up, rtol=1e-4)
    assert mx.allclose(y, verify_glu_ref(x, weights), rtol=1e-3)


def test_what_it_does_not_support():
    x, weights = draw("affine", 4, 64, (24, 512), 3, mx.float32, parts=(8, 24))
    with pytest.raises(ValueError, match=r"the linears end at rows \(8, 24\); they must be two of equal height"):
        verify_glu(x, weights)
