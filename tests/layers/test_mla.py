"""Count and time the cost of one more row in latent attention, which is absorbed for the rows of a verify."""

import importlib
import math
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact import same_bits
from families import FAMILIES
from metal_cases import linux_only
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.mla import QuantizedMultiLinear
from stock_ops import stock_ops
from sweep import paired

from mlx_mtp import emulator
from mlx_mtp.cache.growing import LinearKVCache
from mlx_mtp.cache.slots import PooledKV
from mlx_mtp.layers.mla import ABSORBED_ROWS, LatentAttention, PerHead
from mlx_mtp.tuning import ab_test, kernel_sites, kernel_switch

LENGTH = 4096
ROWS = range(1, ABSORBED_ROWS + 1)
PORTS = ["deepseek_v3", "glm4_moe_lite"]
#: DeepSeek-V3's ratios at an eighth of its size: expanded heads are wider than the cached rows
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Split", "Squeeze", "Transpose", "Unflatten"}


def layers(port: str, **changes: int) -> tuple[Any, Any]:
    """Return our attention layer and mlx-lm's, which expands the cache for two or more rows, with equal weights."""
    module = importlib.import_module(f"mlx_mtp.models.{port}")
    args = module.ModelArgs.from_dict({**FAMILIES[port].config, **SIZES, **changes})
    layer = module.Attention(args)
    plain = layer.__class__.__mro__[2](args)
    plain.update(layer.parameters())
    mx.eval(layer.parameters())
    return layer, plain


def attend(layer: Any, x: mx.array, latent: mx.array, k_pe: mx.array) -> mx.array:
    """Attend rows `x` that follow the cached ones."""
    cache = KVCache()
    cache.update_and_fetch(latent, k_pe)
    mask = create_causal_mask(x.shape[1], latent.shape[2]) if x.shape[1] > 1 else None
    return layer(x, mask, cache)


def cached(length: int) -> tuple[mx.array, mx.array]:
    latent = mx.random.normal((1, 1, length, SIZES["kv_lora_rank"]))
    return latent, mx.random.normal((1, 1, length, SIZES["qk_rope_head_dim"]))


class Full:
    """A cache that returns the rows it was created with, so that only the attention's own work is counted."""

    offset = LENGTH

    def __init__(self, *rows: mx.array) -> None:
        self.rows = rows

    def update_and_fetch(self, *_: mx.array) -> tuple[mx.array, ...]:
        return self.rows


def work(layer: Any, rows: int) -> tuple[int, int]:
    """Return the operations of the graph's products, and the elements that operations on the cache read and write."""
    operations = elements = 0

    def visit(entry: dict) -> None:
        nonlocal operations, elements
        if entry["type"] != "primitive" or entry["name"] in VIEWS:
            return
        shapes = [shape for _, shape, _ in [*entry["inputs"], *entry["outputs"]]]
        if entry["name"] in ("Matmul", "AddMM"):
            operations += 2 * math.prod(shapes[-1]) * shapes[0][-1]
        if any(size >= LENGTH for shape in shapes for size in shape):
            elements += sum(map(math.prod, shapes))

    def call(x: mx.array, latent: mx.array, k_pe: mx.array) -> mx.array:
        return layer(x, create_causal_mask(rows, LENGTH - rows), Full(latent, k_pe))

    mx.export_function(visit, call, mx.zeros((1, rows, SIZES["hidden_size"])), *cached(LENGTH))
    return operations, elements


@pytest.mark.parametrize("port", PORTS)
def test_a_second_row_costs_at_most_half_of_the_first(port):
    layer, plain = layers(port)
    costs = [work(layer, rows) for rows in ROWS]
    for less, more in pairwise(costs):
        for before, after, one in zip(less, more, costs[0], strict=True):
            assert 0 < after - before <= 1.5 * one
    expanded = zip(work(plain, 1), work(plain, 2), costs[0], strict=True)
    assert all(two - one > 1.5 * ours for one, two, ours in expanded), "the count does not see the expansion"


@pytest.mark.parametrize("port", PORTS)
def test_one_row_reads_the_cache_once_for_all_heads(port):
    layer, plain = layers(port)
    rows = LENGTH * (2 * SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"])  # scores and values, and the rotated key
    scores = 16 * LENGTH * SIZES["num_attention_heads"]  # a few operations read and write them
    assert work(layer, 1)[1] <= rows + scores < work(plain, 1)[1]


@pytest.mark.parametrize(("port", "rows"), paired(PORTS, [*ROWS, ABSORBED_ROWS + 1]))
def test_absorbed_rows_equal_expanded_rows(port, rows):
    layer, plain = layers(port)
    x, past = mx.random.normal((1, rows, SIZES["hidden_size"])), cached(50)
    ours = attend(layer, x, *past)
    assert mx.allclose(ours, attend(plain, x, *past), rtol=1e-4, atol=1e-5)
    one_by_one = mx.concatenate([ours[:, :1], *(_after(layer, x, past, i) for i in range(1, rows))], axis=1)
    assert mx.allclose(ours, one_by_one, rtol=1e-4, atol=1e-5)


def _after(layer: Any, x: mx.array, past: tuple[mx.array, mx.array], i: int) -> mx.array:
    """Return row i of `x` computed alone, after the rows before it."""
    cache = KVCache()
    cache.update_and_fetch(*past)
    for j in range(i):
        layer(x[:, j : j + 1], None, cache)
    return layer(x[:, i : i + 1], None, cache)


@linux_only
def test_kernels_around_the_attention(quick_trials):
    """Per-head products and rotations have the bits of one row, in trials and in the layer's calls."""
    layer, _ = layers("deepseek_v3", qk_nope_head_dim=64)
    nn.quantize(layer, 32, 4, class_predicate=lambda path, _: path in ("embed_q", "unembed_out"))
    found = [
        site for site in (*kernel_sites._latent(layer), *kernel_sites._per_head(layer)) if site is not layer.latent
    ]
    assert [site.op for site in found] == ["norm_rope", "verify_qmm_heads", "verify_qmm_heads"]
    assert not kernel_switch.others_not_exact(layer)
    assert [line[:31] for line in kernel_switch.rows_not_exact(found)] == ["2 layers' verify_qmm_heads at M"]
    q, out = mx.random.normal((1, 3, 8 * 72)), mx.random.normal((1, 3, 8, 64)).swapaxes(1, 2)
    x = mx.random.normal((1, 3, SIZES["hidden_size"]))
    with stock_ops(), emulator.emulated():
        assert not any(ab_test.check(trial) for trial in kernel_switch.trials(found, mx.float32) if trial.rows == 3)
        singly = [calls(layer, q[:, i : i + 1], x[:, i : i + 1], out[:, :, i : i + 1], i) for i in range(3)]
    for site in found:
        site.rows = frozenset(site.candidates)
    with emulator.emulated() as launches:
        together = calls(layer, q, x, out, 0)
    assert [launch.kernel for launch in launches] == ["norm_rope", "verify_qmm_heads", "verify_qmm_heads"]
    for one, all_ in zip(zip(*singly, strict=True), together, strict=True):
        assert same_bits(mx.concatenate(one, axis=2), all_)
    module, latent = layer.unembed_out, mx.random.normal((1, 1, 3, 64))
    w = mx.dequantize(module.weight, module.scales, module.biases, 32, 4)
    assert mx.allclose(module(latent), latent @ w.swapaxes(1, 2), atol=1e-4), "rows that all heads share"
    for name, array in module.parameters().items():
        module[name] = array + array
        weights = module.site.weights
        kept = weights.w is module.weight, weights.scales is module.scales, weights.biases is module.biases
        assert all(kept), name


def calls(layer: Any, q: mx.array, x: mx.array, out: mx.array, offset: int) -> list[mx.array]:
    """Run the calls in which `layer` rotates queries and keys and multiplies per head."""
    q, q_pe, _, k_pe = layer.placed(q, x, 7 + offset)
    made = [q_pe, k_pe, layer.absorbed(q), layer.unembed_out(out)]
    mx.eval(made)
    return made


@pytest.mark.timing
def test_time_of_one_more_row():
    """The minimum of many runs, summed over row counts, because single steps vary on a busy machine."""
    layer, _ = layers("deepseek_v3")
    past = cached(2 * LENGTH)
    best = dict.fromkeys(ROWS, math.inf)
    inputs = {rows: mx.random.normal((1, rows, SIZES["hidden_size"])) for rows in ROWS}
    mx.eval(inputs, past)
    for _ in range(20):
        for rows, x in inputs.items():
            tic = time.perf_counter()
            mx.eval(attend(layer, x, *past))
            best[rows] = min(best[rows], time.perf_counter() - tic)
    assert best[ABSORBED_ROWS] <= (1 + 1.5 * (ABSORBED_ROWS - 1)) * best[1]


@pytest.mark.parametrize("heads_first", [True, False])
def test_products_of_several_sequences_equal_those_of_each(heads_first):
    module = QuantizedMultiLinear(32, 16, 3, 32, 4, "affine")
    site, x = PerHead(module, heads_first=heads_first), mx.random.normal((2, 4, 3, 40))
    each = mx.concatenate([site.product(x[i : i + 1]) for i in range(2)])
    assert each.shape == (2, 3, 4, 16)
    assert mx.array_equal(site.product(x), each)


def test_a_pool_of_texts_is_not_served():
    """Its latent rows are in slots, each text's at a position of its own; the kernel reads one text's."""
    site = LatentAttention(SimpleNamespace(kv_lora_rank=8, qk_rope_head_dim=4, num_heads=2))
    site.rows, q = frozenset({2}), mx.zeros((3, 2, 2, 8))
    assert site.serves(q[:1], LinearKVCache())
    assert not site.serves(q, PooledKV())
