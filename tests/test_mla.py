"""Latent attention stays absorbed for the rows of a verify: what a further row costs, counted and timed."""

import importlib
import math
import time
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from families import FAMILIES
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from mlx_mtp.layers.mla import ABSORBED_ROWS

LENGTH = 4096
ROWS = range(1, ABSORBED_ROWS + 1)
PORTS = ["deepseek_v3", "glm4_moe_lite"]
#: DeepSeek-V3's ratios at an eighth: what is expanded per head is wider than what is cached
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


def layers(port: str) -> tuple[Any, Any]:
    """Our attention layer and mlx-lm's, which expands the cache for two rows and more, of the same weights."""
    module = importlib.import_module(f"mlx_mtp.models.{port}")
    args = module.ModelArgs.from_dict({**FAMILIES[port].config, **SIZES})
    layer = module.Attention(args)
    plain = layer.__class__.__mro__[2](args)
    plain.update(layer.parameters())
    mx.eval(layer.parameters())
    return layer, plain


def attend(layer: Any, x: mx.array, latent: mx.array, k_pe: mx.array) -> mx.array:
    """Rows `x` after the cached ones."""
    cache = KVCache()
    cache.update_and_fetch(latent, k_pe)
    mask = create_causal_mask(x.shape[1], latent.shape[2]) if x.shape[1] > 1 else None
    return layer(x, mask, cache)


def cached(length: int) -> tuple[mx.array, mx.array]:
    latent = mx.random.normal((1, 1, length, SIZES["kv_lora_rank"]))
    return latent, mx.random.normal((1, 1, length, SIZES["qk_rope_head_dim"]))


class Full:
    """A cache that hands out the rows it was given, so that only attention's own work is counted."""

    offset = LENGTH

    def __init__(self, *rows: mx.array) -> None:
        self.rows = rows

    def update_and_fetch(self, *_: mx.array) -> tuple[mx.array, ...]:
        return self.rows


def work(layer: Any, rows: int) -> tuple[int, int]:
    """The products' operations, and the elements that every operation on the cache reads and writes, in the graph."""
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
def test_a_row_more_costs_at_most_half_as_much_again_as_one(port):
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


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("rows", [*ROWS, ABSORBED_ROWS + 1])
def test_absorbed_rows_are_the_expanded_ones(port, rows):
    layer, plain = layers(port)
    x, past = mx.random.normal((1, rows, SIZES["hidden_size"])), cached(50)
    ours = attend(layer, x, *past)
    assert mx.allclose(ours, attend(plain, x, *past), rtol=1e-4, atol=1e-5)
    one_by_one = mx.concatenate([ours[:, :1], *(_after(layer, x, past, i) for i in range(1, rows))], axis=1)
    assert mx.allclose(ours, one_by_one, rtol=1e-4, atol=1e-5)


def _after(layer: Any, x: mx.array, past: tuple[mx.array, mx.array], i: int) -> mx.array:
    """Row i of `x` alone, after the rows before it."""
    cache = KVCache()
    cache.update_and_fetch(*past)
    for j in range(i):
        layer(x[:, j : j + 1], None, cache)
    return layer(x[:, i : i + 1], None, cache)


@pytest.mark.slow
def test_time_of_a_row_more():
    """Best of many runs, and over all rows: a busy machine's single steps say little."""
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
