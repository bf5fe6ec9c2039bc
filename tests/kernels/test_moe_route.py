"""Compare verify_moe's routing with mlx-lm's experts and weights, in MLX's order of sorting, and its softmax."""

import mlx.core as mx
import moe_blocks
import numpy as np
import pytest
from metal_cases import exact, linux_only, relative_error
from moe_blocks import FAMILIES, by_row, make, routed
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import Routing, verify_moe, verify_moe_ref
from mlx_mtp.kernels._routing import route_metal, route_ref

pytestmark = linux_only
# MLX's own kernels on one row, as it launches them on a row of router scores.
SORT = """
    threadgroup float values[4 * BN];
    threadgroup uint order[4 * BN];
    KernelMergeSort<float, uint, true, BN, 4>::block_sort(
        x, y, x_shape[1], 1, 1, x_shape[1], x_shape[1], values, order,
        threadgroup_position_in_grid, thread_position_in_threadgroup);
"""
SOFTMAX = """
    softmax_single_row<T, float>(x, y, x_shape[1], threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
        thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
"""


def metal_argsort(x: mx.array) -> mx.array:
    """Return Metal's mx.argsort, and so mx.argpartition, of x [M, E] in float32."""
    m, e = x.shape
    threads = max(32, 1 << (-(-e // 4) - 1).bit_length())
    kernel = emulator.metal_kernel("sort", ["x"], ["y"], SORT, header=stock.include("utils", "sort"))
    (y,) = kernel(
        inputs=[x],
        template=[("BN", threads)],
        grid=(threads, m, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.uint32],
    )
    return y


def metal_softmax(x: mx.array) -> mx.array:
    """Return Metal's mx.softmax(x [M, E], precise=True)."""
    threads = -(-x.shape[1] // 128) * 32
    header = "#define SOFTMAX_N_READS 4\n" + stock.include("utils", "softmax")
    kernel = emulator.metal_kernel("softmax", ["x"], ["y"], SOFTMAX, header=header)
    (y,) = kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(threads * x.shape[0], 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return y


def test_metal_sorts_stably():
    """The order of equal scores depends on this; NaN is last."""
    x = np.random.default_rng(0).integers(-3, 3, (3, 160)).astype(np.float32)
    x[1, ::7] = np.nan
    x[2] = 0.5
    assert np.array_equal(np.array(metal_argsort(mx.array(x))), np.argsort(x, axis=-1, kind="stable"))


FEW = ("step3p5, clamped", "glm4_moe_lite", "deepseek_v3", "mimo_v2_flash", "nemotron_h", "qwen3_next")


@pytest.mark.parametrize("family", sampled(FEW, FAMILIES))
def test_blocks_of_mlx_lm(family):
    block, routing, limit, inputs = make(family)
    x = mx.random.normal((5, moe_blocks.H))
    logits, more = inputs(x)
    arguments = (x, logits, moe_blocks.experts_of(block), routing)
    with emulator.emulated() as launches:
        y = verify_moe(*arguments, limit=limit, **more)
    assert len(launches) == 3
    want = exact(block(x[None])[0])
    assert relative_error(y, want) < 1e-5
    assert relative_error(verify_moe(*arguments, limit=limit, **more), want) < 1e-5
    if limit is not None:
        assert relative_error(verify_moe_ref(*arguments, **more), want) > 1e-2


def selected_by(family, logits, routing, bias):
    """Return (experts, weights) of the family's own function on the CPU."""
    block = make(family)[0]
    if routing.kind == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True)
        experts = mx.argpartition(scores, kth=-routing.top_k, axis=-1)[..., -routing.top_k :]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        return experts, weights / weights.sum(axis=-1, keepdims=True)
    module = __import__(type(block.gate).__module__, fromlist=["x"])
    if family.startswith("step"):
        return module.moe_gate_select(logits, bias, routing.top_k, routing.scale, routing.norm)
    args = (routing.top_k, routing.n_group, routing.topk_group, routing.scale, routing.norm)
    return module.group_expert_select(logits, bias, *args)


@pytest.mark.parametrize("family", [f for f in FAMILIES if "clamped" not in f])
def test_experts_are_those_of_mlx_lm(family):
    routing, e, cases = make(family)[1], moe_blocks.E, []
    with emulator.emulated():
        for seed in sampled(range(2), range(6)):
            mx.random.seed(seed)
            logits, bias = mx.random.normal((8, e)) * 3, mx.random.normal((e,)) * (0.1 if seed % 2 else 2)
            bias = None if routing.kind == "softmax" else bias
            cases.append((selected_by(family, logits, routing, bias), route_metal(logits, routing, bias)))
    for (experts, weights), pairs in cases:
        for row, found in enumerate(by_row(pairs, 8)):
            want = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
            assert list(found) == sorted(want)
            assert np.allclose([want[e] for e in found], list(found.values()), rtol=2e-6)


def test_a_group_that_lost_beats_negative_scores():
    """Its scores count as 0, not as minus infinity."""
    routing = Routing("sigmoid", 8, n_group=8, topk_group=1, norm=False)
    logits, bias = mx.zeros((1, 160)), mx.full((160,), -3.0)
    bias[40:44] = 1.0  # all others of group 2 are at -2.5, those of other groups at 0
    assert list(by_row(routed(logits, routing, bias), 1)[0]) == [0, 1, 2, 3, 40, 41, 42, 43]
    assert route_ref(logits, routing, bias)[0].tolist() == [[40, 41, 42, 43, 0, 1, 2, 3]]


def test_equal_scores():
    """As in MLX's stable sort: the first of negated sigmoids, the last of softmaxes; the first groups are dropped."""
    logits = np.random.default_rng(3).integers(-1, 2, (8, 160)).astype(np.float32)
    logits[0], logits[1, 3:] = 1, 0.25
    logits[2] = np.where(np.arange(160) % 40 == 11, 2, -0.0)
    logits[3, :80], logits[3, 80:] = 0.0, -0.0
    logits = mx.array(logits)
    order = metal_argsort(-mx.sigmoid(logits))
    sigmoid = by_row(routed(logits, Routing("sigmoid", 8), mx.zeros(160)), 8)
    assert [list(row) for row in sigmoid] == np.sort(np.array(order[:, :8]), axis=-1).tolist()
    order = metal_argsort(metal_softmax(logits))
    softmax = by_row(routed(logits, Routing("softmax", 8)), 8)
    assert [list(row) for row in softmax] == np.sort(np.array(order[:, -8:]), axis=-1).tolist()
    groups = by_row(routed(logits[:1], Routing("sigmoid", 8, 8, 3), mx.zeros(160)), 1)
    assert list(groups[0]) == list(range(100, 108))


@pytest.mark.parametrize(
    ("dtype", "e", "norm"),
    sampled(
        [(mx.bfloat16, 160, False), (mx.float32, 512, True)],
        [(*x, norm) for norm in (False, True) for x in ((mx.float32, 512), (mx.bfloat16, 160))],
    ),
)
def test_softmax_has_the_bits_of_mlx(dtype, e, norm):
    """Experts are selected after rounding; in 16 bits many scores are equal."""
    mx.random.seed(1)
    logits = (mx.random.normal((8, e)) * mx.arange(1, 9)[:, None] / 8).astype(dtype)
    scores = metal_softmax(logits)
    experts = metal_argsort(scores.astype(mx.float32))[:, -16:]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if norm:
        weights = weights / weights.astype(mx.float32).sum(axis=-1, keepdims=True).astype(dtype)
    got = by_row(routed(logits, Routing("softmax", 16, norm=norm)), 8)
    for row, found in enumerate(got):
        want = dict(zip(experts[row].tolist(), weights[row].astype(mx.float32).tolist(), strict=True))
        assert list(found) == sorted(want)
        rtol = 0 if not norm else 1e-2 if dtype == mx.bfloat16 else 1e-6
        assert np.allclose([want[expert] for expert in found], list(found.values()), rtol=rtol, atol=0)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_logits_that_are_no_numbers(kind):
    """NaN is worst for a sigmoid and best for a softmax, as in MLX's sort; other rows do not change."""
    mx.random.seed(2)
    logits = mx.random.normal((8, 160))
    bias = mx.zeros(160) if kind == "sigmoid" else None
    routing = Routing(kind, 8)
    clean = by_row(routed(logits, routing, bias), 8)
    logits[2, 5], logits[3], logits[4, 7], logits[5, 1:] = float("nan"), float("nan"), float("inf"), float("-inf")
    found = by_row(routed(logits, routing, bias), 8)
    assert [found[i] for i in (0, 1, 6, 7)] == [clean[i] for i in (0, 1, 6, 7)]
    assert all(len(row) == 8 for row in found)
    assert list(found[3]) == (list(range(8)) if kind == "sigmoid" else list(range(152, 160)))
    if kind == "sigmoid":
        assert 5 not in found[2]
        assert 7 in found[4]


def test_the_denominator():
    """With eps a sum of 0 gives weights of 0; without it NaN, as in the families without eps."""
    logits, bias = mx.full((1, 160), -200.0), mx.zeros(160)
    for eps, want in ((1e-20, 0.0), (0.0, float("nan"))):
        found = by_row(routed(logits, Routing("sigmoid", 8, eps=eps), bias), 1)[0]
        assert np.array_equal(list(found.values()), [want] * 8, equal_nan=True)
