"""Layers with output scales: their numbers, and kernels, which give each row the bits that it has alone."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import packed_files as files
import pytest
from exact import same_bits
from metal_cases import linux_only
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.tuner.lora import LoRALinear
from sweep import paired

from mlx_mtp import emulator
from mlx_mtp.kernels import verify_qmm
from mlx_mtp.layers.expert_rows import number_rows
from mlx_mtp.layers.experts import servable
from mlx_mtp.layers.kernel_site import known_format
from mlx_mtp.layers.products import Stack, VerifyLinear
from mlx_mtp.layers.scaled import SCALE, ScaledLinear, ScaledSwitchLinear
from mlx_mtp.tuning import kernel_sites

TYPES = [mx.float32, mx.bfloat16, mx.float16]


def scaled(rows: int, columns: int, dtype: mx.Dtype, seed: int = 0, *, each_row: bool = False, bias: bool = True):
    """Return (a layer, its weights' numbers in float32)."""
    rng = np.random.default_rng(seed)
    found = files.nvfp4(rng.standard_normal((rows, columns)).astype(np.float32) * rng.uniform(1, 9), reciprocal=False)
    parts = {name: mx.array(tensor.values) for name, tensor in found.parts.items()}
    factor = parts["weight_scale_2"].reshape(1)
    linear = nn.Linear(columns, rows, bias=bias).to_quantized(16, 4, "nvfp4")
    linear.__class__ = ScaledLinear
    linear.weight, linear.scales = parts["weight"].view(mx.uint32), parts["weight_scale"]
    linear[SCALE], numbers = factor, mx.array(found.numbers)
    if each_row:
        times = mx.array(rng.uniform(1, 2, rows).astype(np.float32))
        linear[SCALE], numbers = factor * times, numbers * times[:, None]
    if bias:
        linear.bias = mx.full((rows,), 0.5 + seed, dtype)
    return linear, numbers


@pytest.mark.parametrize(("dtype", "each_row"), paired(TYPES, [True, False]))
def test_products_are_those_of_the_numbers(dtype, each_row):
    """Also where a product before scaling exceeds float16's range; the bias is added after scaling."""
    linear, numbers = scaled(8, 512, dtype, each_row=each_row)
    x = (mx.random.normal((3, 512)) * 40).astype(dtype)
    expected = x.astype(mx.float32) @ numbers.T + 0.5
    assert linear(x).dtype == dtype
    rounding = {mx.float32: 1e-5, mx.bfloat16: 2e-2, mx.float16: 2e-3}[dtype]
    assert mx.abs(linear(x) - expected).max() < rounding * mx.abs(expected).max()
    experts = QuantizedSwitchLinear(512, 8, 1, True, 16, 4, "nvfp4")
    experts.__class__ = ScaledSwitchLinear
    experts.weight, experts.scales, experts.bias = linear.weight[None], linear.scales[None], linear.bias[None]
    experts[SCALE] = linear[SCALE][None] if each_row else linear[SCALE]
    chosen = mx.zeros((3, 1), mx.uint32)
    number_rows([experts])
    assert mx.array_equal(experts(x[:, None, None], chosen)[:, 0, 0], linear(x))
    assert mx.array_equal(experts(x[:, None], chosen[:, 0], sorted_indices=True)[:, 0], linear(x))


@linux_only
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_scale_the_products(dtype):
    """Stacked layers have other scales; their rows have the bits of one row alone, with the kernel's product."""
    layers = [scaled(n, 64, dtype, seed, each_row=n == 13, bias=n > 8)[0] for seed, n in enumerate((24, 8, 13))]
    x = mx.random.normal((1, 5, 64)).astype(dtype)
    stack = Stack(layers)
    stack.rows = frozenset(range(2, 9))
    for index, layer in enumerate(layers):
        layer.index = index
        kernel_sites._swap(layer, "site", stack, VerifyLinear)
    with emulator.emulated() as launches:
        together = [layer(x) for layer in layers]
        mx.eval(together)
    assert [launch.kernel for launch in launches] == ["verify_qmm"]
    rounding = {mx.float32: 1e-5, mx.bfloat16: 2e-2, mx.float16: 2e-3}[dtype]
    for y, truth in zip(together, stack.in_float32(x), strict=True):
        assert mx.abs(y - truth).max() < rounding * mx.abs(truth).max()
    wide = x.astype(mx.float32) if dtype == mx.float16 else x
    with emulator.emulated():
        products = verify_qmm(wide, stack.weights)
        for layer, y, product in zip(layers, together, products, strict=True):
            expected = (product * layer[SCALE]).astype(dtype)
            assert same_bits(y, expected + layer.bias if "bias" in layer else expected)
    one = [layer(x[:, :1]) for layer in layers]
    assert all(same_bits(a, b) for a, b in zip(one, stack.computed(x[:, :1], False), strict=True))
    assert stack.shape.endswith("nvfp4 g16 scaled")


def test_which_kernels_serve_scaled_layers():
    """Linear layers; not the kernels that use products without scaling them: experts, SwiGLUs, LM heads."""
    linear, _ = scaled(16, 64, mx.float32)
    assert known_format(linear, scaled=True)
    assert not known_format(linear)
    (stack,) = kernel_sites._stack([linear])
    assert isinstance(linear, VerifyLinear)
    assert stack.scaled
    assert kernel_sites._format(linear) != kernel_sites._format(nn.Linear(64, 16).to_quantized(16, 4, "nvfp4"))
    mlp, block = nn.Module(), nn.Module()
    mlp.gate_proj, mlp.up_proj = (scaled(16, 64, mx.float32, bias=False)[0] for _ in range(2))
    kernel_sites._stack([mlp.gate_proj, mlp.up_proj])
    assert not kernel_sites._is_stacked(mlp)
    block.switch_mlp = nn.Module()
    for name in ("gate_proj", "up_proj", "down_proj"):
        block.switch_mlp[name] = QuantizedSwitchLinear(64, 64, 2, False, 16, 4, "nvfp4")
        block.switch_mlp[name].__class__ = ScaledSwitchLinear
        block.switch_mlp[name][SCALE] = mx.ones(2)
    assert not servable(block)


def test_adapters_of_scaled_layers():
    linear, numbers = scaled(16, 64, mx.float32)
    adapted = LoRALinear.from_base(linear, r=4, scale=2.0)
    adapted.lora_b = mx.random.normal((4, 16))
    x = mx.random.normal((3, 64))
    expected = x @ numbers.T + 0.5 + 2 * (x @ adapted.lora_a) @ adapted.lora_b
    assert mx.allclose(adapted(x), expected, rtol=1e-4, atol=1e-4)
