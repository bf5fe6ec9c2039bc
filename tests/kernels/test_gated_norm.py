"""Compare the gated norm with mlx-lm's formula and the bits of MLX's operations, head by head."""

import mlx.core as mx
import numpy as np
import pytest
from gated_cases import NAN, same
from metal_cases import exact, linux_only
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated
from stock_ops import precise_swiglu, rms_norm

from mlx_mtp import emulator
from mlx_mtp.kernels import gated_norm, gated_norm_ref

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
EPS = 1e-6


def draw(T, H, D, dtype, weights=None):
    mx.random.seed(T * H + D)
    y, z = (mx.random.normal((1, T, H, D)).astype(dtype) for _ in range(2))
    return y, z * 4, mx.random.normal((D,)).astype(weights or dtype)


@linux_only
@pytest.mark.parametrize(
    ("T", "H", "D", "dtype", "weights", "contraction"),
    [(4, 2, 10, BF16, BF16, "off"), (16, 5, 128, F16, F32, "fast"), (2, 3, 196, F32, F32, "on")],
)
def test_bits(T, H, D, dtype, weights, contraction):
    y, z, weight = draw(T, H, D, dtype, weights)
    z[0, 0, 0, :4] = mx.array([3e4, -3e4, 120, -120])
    options = emulator.Options(fp_contract=contraction, order=3)
    with emulator.emulated(options) as launches:
        got = gated_norm(y, z, weight, EPS)
        normed = rms_norm(y, weight, EPS)
    assert launches[0].kernel == "gated_norm"
    assert same(got, precise_swiglu(y, z, normed, options))
    assert launches[0]["y"].reread == launches[0]["z"].reread == 1.0
    assert launches[0]["out"].bytes_written == y.nbytes


@linux_only
def test_a_head_has_the_bits_it_has_alone():
    y, z, weight = draw(4, 3, 128, BF16)
    with emulator.emulated():
        together = gated_norm(y, z, weight, EPS)
        for t, h in ((0, 0), (2, 1), (3, 2)):
            alone = gated_norm(y[:, t : t + 1, h : h + 1], z[:, t : t + 1, h : h + 1], weight, EPS)
            other = (mx.arange(12) != 3 * t + h).reshape(1, 4, 3, 1)
            among = gated_norm(mx.where(other, NAN, y), mx.where(other, NAN, z), weight, EPS)
            assert same(alone[0, 0, 0], together[0, t, h])
            assert same(alone[0, 0, 0], among[0, t, h])


@linux_only
def test_views_are_read_without_a_copy():
    y, z, weight = draw(3, 2, 128, BF16)
    product = mx.concatenate([z.reshape(1, 3, -1), y.reshape(1, 3, -1)], axis=-1)
    half = mx.split(product, 2, axis=-1)[1].reshape(y.shape)
    apart = mx.repeat(z, 2, axis=2)[:, :, ::2]
    turned = [mx.contiguous(x.swapaxes(1, 3)).swapaxes(1, 3) for x in (y, z)]
    with emulator.emulated():
        want = gated_norm(y, z, weight, EPS)
        assert same(gated_norm(half, apart, mx.repeat(weight, 3)[::3], EPS), want)
        assert same(gated_norm(y, turned[1], weight, EPS), want)
        assert same(gated_norm(turned[0], z, weight, EPS), want)
        groups = mx.contiguous(mx.pad(z.reshape(1, 3, 1, 256), [(0, 0)] * 3 + [(3, 0)]))[..., 3:]
        assert same(gated_norm(y, groups, weight, EPS), want)
        assert same(gated_norm_ref(y, groups, weight, EPS), gated_norm_ref(y, z, weight, EPS))


@pytest.mark.parametrize(("dtype", "weights"), [(F32, F32), (BF16, BF16), (BF16, F32)])
def test_the_reference_is_mlx_lms(dtype, weights):
    y, z, weight = draw(3, 2, 32, dtype, weights)
    module = Qwen3NextRMSNormGated(32, EPS)
    module.weight = weight
    got = gated_norm_ref(y, z, weight, EPS)
    assert same(got, module(y, z))
    value, gate = exact(y), exact(z)
    want = value / np.sqrt((value**2).mean(-1, keepdims=True) + EPS) * exact(weight) * gate / (1 + np.exp(-gate))
    assert np.abs(exact(got) - want).max() < (1e-6 if dtype == F32 else 2**-7) * np.abs(want).max()


def test_what_the_kernel_does_not_support():
    y, z, weight = draw(2, 1, 260, F32)
    two = [mx.concatenate([x, x])[..., :32] for x in (y, z)]
    with emulator.emulated() as launches:
        wide, batch = gated_norm(y, z, weight, EPS), gated_norm(*two, weight[:32], EPS)
    assert not launches
    assert same(wide, gated_norm_ref(y, z, weight, EPS))
    assert same(batch, gated_norm_ref(*two, weight[:32], EPS))
    with pytest.raises(ValueError, match=r"y has shape \(1, 2, 1, 260\) and z \(1, 2, 1, 32\)"):
        gated_norm(y, z[..., :32], weight, EPS)
    with pytest.raises(ValueError, match=r"weight has shape \(32,\); for these heads it must be \(260,\)"):
        gated_norm(y, z, weight[:32], EPS)
