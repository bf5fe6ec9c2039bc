"""Check linear layers that share a launch: one copy of weights and biases, and MLX's own for other row counts."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact import same_bits
from metal_cases import linux_only
from mlx.utils import tree_flatten
from recorded_graphs import recorded
from sweep import paired

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.layers.products import Dense, Stack, VerifyLinear
from mlx_mtp.tuning import kernel_sites

pytestmark = linux_only


def linears(*heights: int, k: int = 64, bits: int = 4, bias=False) -> list[nn.QuantizedLinear]:
    found = [nn.QuantizedLinear(k, n, bias=bias, group_size=32, bits=bits) for n in heights]
    for i, linear in enumerate(found):
        if bias:
            linear.bias = mx.full(linear.bias.shape, float(i + 1))
    return found


def stacked(modules: list) -> Stack:
    stack = Stack(modules)
    stack.rows = frozenset(range(2, 9))
    for i, module in enumerate(modules):
        module.index = i
        kernel_sites._swap(module, "site", stack, VerifyLinear)
    return stack


def test_stacking_keeps_one_copy():
    modules = linears(2048, 1024, 512, k=2048)
    mx.eval([m.parameters() for m in modules])
    mx.clear_cache()
    before, whole = mx.get_active_memory(), sum(a.nbytes for m in modules for _, a in tree_flatten(m.parameters()))
    mx.reset_peak_memory()
    stack = Stack(modules)
    assert mx.get_active_memory() - before < whole / 100
    assert mx.get_peak_memory() - before < whole * 1.01
    assert mx.get_cache_memory() < whole / 100
    one = mx.ones((1, 2048))
    want = mx.dequantize(stack.weights.w, stack.weights.scales, stack.weights.biases, 32, 4) @ one[0]
    assert mx.allclose(mx.concatenate([m(one) for m in modules], axis=-1)[0], want, atol=1e-3)


def test_a_stack_is_one_launch_and_keeps_nothing():
    modules, x = linears(24, 8, 13, bias=True), mx.random.normal((1, 3, 64))
    plain = [m(x) for m in modules]
    stack = stacked(modules)
    with emulator.emulated() as launches:
        outputs = [m(x) for m in modules]
        assert len(launches) == 1
        assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(outputs, plain, strict=True))
        assert stack.read == (None, [])
        other = x + 1
        first, second = modules[0](other), modules[0](x)  # k and v of `other` are never read
        assert mx.allclose(modules[1](x), plain[1], atol=1e-5)
        assert not mx.allclose(modules[2](other), plain[2], atol=1e-2)
        assert mx.allclose(second, plain[0], atol=1e-5)
        assert not mx.allclose(first, second, atol=1e-2)
        assert mx.allclose(modules[0](x), plain[0], atol=1e-5)


@pytest.mark.parametrize(("changed", "heights"), paired(["all", "a bias", "a first bias"], [(24, 8), (24,)]))
def test_weights_loaded_later_are_used(heights, changed):
    modules, others = linears(*heights, bias=changed == "a bias"), linears(*heights)
    stack = stacked(modules)
    if changed == "all":
        for module, other in zip(modules, others, strict=True):
            module.load_weights(tree_flatten(other.parameters()))
    else:
        modules[-1].bias = mx.full((heights[-1],), 7.0)
        for module, other in zip(modules, others, strict=True):
            other.update(module.parameters(), strict=False)
            other.bias = module.get("bias", 0.0)
    for x in mx.random.normal((2, 1, 3, 64)):
        with emulator.emulated() as launches:
            outputs = [module(x) for module in modules]
        assert len(launches) == 1
        assert all(mx.allclose(y, other(x), atol=1e-5) for y, other in zip(outputs, others, strict=True))
    assert stack.parts[0][2] is modules[0].weight


@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_with_biases_is_not_fused(bias):
    gate, up = linears(8, 8, bias=bias)
    stacked([gate, up])
    assert kernel_sites._is_stacked(SimpleNamespace(gate_proj=gate, up_proj=up)) != bias


@pytest.mark.parametrize("m", [1, 9])
def test_other_row_counts_use_mlx(m):
    modules, x = linears(24, 8), mx.random.normal((m, 64))
    plain = [linear(x) for linear in modules]
    stacked(modules)
    with emulator.emulated() as launches:
        assert all(same_bits(linear(x), want) for linear, want in zip(modules, plain, strict=True))
    assert not launches


@pytest.mark.parametrize(
    ("with_bias", "counts"),
    [
        ((), [{"QuantizedMatmul": 1}, {"CustomKernel": 1}]),
        ((0, 1), [{"QuantizedMatmul": 1, "Add": 1}, {"CustomKernel": 1}]),
        ((1,), [{"QuantizedMatmul": 1, "Add": 1}, {"CustomKernel": 1, "Add": 1}]),
    ],
)
def test_biases_of_all_layers_add_no_operations(on_paper, with_bias, counts):
    modules = linears(24, 8)
    for i in with_bias:
        modules[i].bias = mx.ones(modules[i].scales.shape[0])
    stack = stacked(modules)
    stack.rows |= {1}
    found = [recorded(lambda x: [m(x) for m in modules], mx.random.normal((1, m, 64))) for m in (1, 3)]
    assert found == counts
    assert stack.shape.endswith(("g32", " with some biases", " with bias")[len(with_bias)])


def test_one_row_of_several_linears_is_one_product(on_paper):
    modules, x = linears(24, 8), mx.random.normal((1, 1, 64))
    stack = stacked(modules)
    assert recorded(lambda x: [m(x) for m in modules], x) == {"QuantizedMatmul": 2}
    stack.rows |= {1}
    assert recorded(lambda x: [m(x) for m in modules], x) == {"QuantizedMatmul": 1}


@pytest.mark.parametrize("bias", [False, True])
def test_dense_linears(bias):
    linear, x = nn.Linear(64, 24, bias=bias), mx.random.normal((1, 3, 64))
    kernel_sites._swap(linear, "site", Dense(linear), VerifyLinear).rows = frozenset({3})
    with emulator.emulated() as launches:
        y = linear(x)
    assert [launch.kernel for launch in launches] == ["verify_gemv"]
    assert same_bits(y[0], stock.gemv(x[0], linear.weight, linear.get("bias"))[0])
