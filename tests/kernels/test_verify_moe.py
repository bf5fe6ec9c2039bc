"""Compare verify_moe with mlx-lm's experts and the bits of its products; a visited expert's weights are read once."""

import itertools
import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from exact import CONTRACTIONS, DTYPES, FORMATS, activation, same_bits
from metal_cases import exact, linux_only, relative_error
from moe_blocks import by_row, routed, visits
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import Experts, Quantized, Routing, verify_moe, verify_moe_ref
from mlx_mtp.kernels._routing import route_ref

pytestmark = linux_only
WEIGHTS = {"moe_glu": ("gate", "up"), "moe_down": ("w",)}


def draw(gate: tuple, down: tuple, h: int, i: int, e: int, dtype: mx.Dtype) -> Experts:
    """Return experts of two formats (mode, bits, group size), equal for equal arguments."""
    mx.random.seed(h + i + e)
    made = []
    for (mode, bits, group), shape in ((gate, (e, i, h)), (gate, (e, i, h)), (down, (e, h, i))):
        w, scales, *biases = mx.quantize(mx.random.normal(shape).astype(dtype) * 0.2, group, bits, mode=mode)
        made.append(Quantized(w, scales, biases[0] if biases else None, group, bits, mode, shape[1:2]))
    return Experts(*made)


BASE = ("affine", 4, 32)


@pytest.fixture(scope="module")
def base() -> Experts:
    return draw(BASE, BASE, 64, 32, 160, mx.float32)


def staircase(row: int) -> list[int]:
    """From expert 9 on, each next expert gets one more row, up to 8."""
    return [9 + i for i in range(row, 8)] + [40 + 8 * row + i for i in range(row)]


LOADS = {
    "one expert of each row": [[7, *range(40 + 8 * row, 47 + 8 * row)] for row in range(8)],
    "all alike": [[3, 1, 4, 15, 9, 2, 6, 5]] * 8,
    "all different": [list(range(8 * row, 8 * row + 8)) for row in range(8)],
    "1 to 8 rows of an expert": [staircase(row) for row in range(8)],
    "neighbours share": [[*random.Random(row // 3).sample(range(20, 158), 6), 159, 2 * row] for row in range(8)],
}


@pytest.mark.parametrize("load", sampled(["all alike", "1 to 8 rows of an expert", "neighbours share"], LOADS))
def test_each_distinct_expert_is_requested_once(load, base):
    rows = LOADS[load]
    m, distinct = len(rows), len(set(itertools.chain(*rows)))
    mx.random.seed(0)
    x, routing = mx.random.normal((m, 64)), Routing("sigmoid", 8, scale=2.5)
    with emulator.emulated() as launches:
        y = verify_moe(x, visits(rows, 160), base, routing, bias=mx.zeros(160))
    assert [launch.kernel for launch in launches] == ["moe_route", "moe_glu", "moe_down"]
    assert relative_error(y, exact(verify_moe_ref(x, visits(rows, 160), base, routing))) < 1e-5
    for launch in launches[1:]:
        for name in WEIGHTS[launch.kernel]:
            assert launch[name].reread == 1.0
            assert launch[name].bytes_read == distinct * base.gate.w[0].nbytes


def test_mlx_requests_an_expert_for_each_pair(base):
    rows = mx.array(LOADS["1 to 8 rows of an expert"])
    x, gate = mx.ones((8, 1, 64)), base.gate
    pairs = mx.arange(64) // 8
    _, traffic = stock.gather_qmv(x, gate.w, gate.scales, gate.biases, pairs, rows.flatten(), group_size=32, bits=4)
    assert traffic["w"].bytes_read == 64 * gate.w[0].nbytes


def gathered(x: mx.array, weights: Quantized, experts: list[int], options: emulator.Options) -> mx.array:
    """Multiply row i of x with the experts[i]-th matrix, with MLX's own kernel."""
    arrays, pairs = (weights.w, weights.scales, weights.biases), mx.arange(len(experts))
    format_ = {"group_size": weights.group_size, "bits": weights.bits}
    x = x[:, None]
    return stock.gather_qmv(x, *arrays, pairs, mx.array(experts), options=options, **format_)[0][:, 0]


def assert_products_exact(gate, down, h, i, dtype, limit, contraction, rows):
    """Each row visits one expert with weight 1, so the output is the product."""
    experts, options = draw(gate, down, h, i, 6, dtype), emulator.Options(fp_contract=contraction)
    x = mx.random.normal((len(rows), h)).astype(dtype)
    with emulator.emulated(options):
        y = verify_moe(x, visits([[e] for e in rows], 6), experts, Routing("sigmoid", 1), limit=limit)
    opened, linear = (gathered(x, w, rows, options) for w in (experts.gate, experts.up))
    assert limit is None or mx.any(opened > limit)
    assert same_bits(y, gathered(activation(opened, linear, limit, options), experts.down, rows, options))


@pytest.mark.parametrize(
    ("gate", "down", "h", "i", "dtype", "limit", "contraction", "rows"),
    [  # K of gate and up, and K of down: qmv_fast for multiples of 256 or 512, else qmv
        pytest.param(
            *(("affine", 4, 64), ("affine", 6, 64), 512, 64, mx.bfloat16, None, "fast", [5, 0, 5, 2, 5, 5, 0, 5]),
            marks=sweep,
        ),
        (("affine", 3, 32), ("affine", 8, 32), 64, 256, mx.float32, 0.7, "on", [1, 1, 1, 4, 2, 4, 4, 4]),
        pytest.param(("nvfp4", 4, 16), ("mxfp8", 8, 32), 160, 32, mx.float16, None, "fast", [3] * 8, marks=sweep),
    ],
)
def test_products_have_the_bits_of_mlx(gate, down, h, i, dtype, limit, contraction, rows):
    assert_products_exact(gate, down, h, i, dtype, limit, contraction, rows)


def low() -> tuple:
    """Return x, logits, experts, routing and the shared part, in 16 bits."""
    experts = draw(("affine", 4, 64), ("affine", 4, 64), 128, 64, 160, mx.bfloat16)
    shapes = ((8, 128), (8, 160), (8, 128), (8, 1))
    x, logits, shared, gate = (mx.random.normal(shape).astype(mx.bfloat16) for shape in shapes)
    return x, logits, experts, Routing("softmax", 8), shared, gate


def summed(x, experts: Experts, rows: list[dict[int, float]]) -> mx.array:
    """Weight and add products of MLX's own kernels in float32, each row's experts in ascending order."""
    options, visited = emulator.Options(), [e for row in rows for e in row]
    m, k = len(rows), len(rows[0])
    x = mx.repeat(x, k, axis=0)
    opened, linear = (gathered(x, w, visited, options) for w in (experts.gate, experts.up))
    products = gathered(activation(opened, linear, None, options), experts.down, visited, options)
    terms = np.array(products.reshape(m, k, -1).astype(mx.float32))
    sums = np.zeros_like(terms[:, 0])
    for i in range(k):
        sums += np.array([list(row.values())[i] for row in rows], np.float32)[:, None] * terms[:, i]
    return mx.array(sums).astype(x.dtype)


def test_sums_are_of_rounded_products():
    """Then the shared part is added in x's type."""
    x, logits, experts, routing, shared, gate = low()
    with emulator.emulated():
        y = verify_moe(x, logits, experts, routing, shared=shared, shared_gate=0 * gate)
    assert same_bits(y, summed(x, experts, by_row(routed(logits, routing), 8)) + shared / 2)


def test_sums_are_in_the_order_of_experts(base):
    mx.random.seed(7)
    x, logits, routing, bias = (
        mx.random.normal((8, 64)),
        mx.random.normal((8, 160)),
        Routing("sigmoid", 8),
        mx.zeros(160),
    )
    with emulator.emulated():
        y = verify_moe(x, logits, base, routing, bias=bias)
    assert same_bits(y, summed(x, base, by_row(routed(logits, routing, bias), 8)))


@sweep
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sweep(dtype, contraction):
    rng = random.Random(f"{dtype}{contraction}")
    for gate, k in itertools.product(FORMATS, (512, 384)):
        down, i = rng.choice(FORMATS), rng.choice((128, 256, 384))
        rows = [rng.choice((rng.randrange(6), 3)) for _ in range(8)]
        assert_products_exact(gate, down, k, i, dtype, rng.choice((None, 0.7)), contraction, rows)


@pytest.mark.parametrize("load", sampled(["neighbours share"], ["1 to 8 rows of an expert", "neighbours share"]))
def test_a_row_has_the_bits_that_it_has_alone(load, base):
    rows = LOADS[load]
    mx.random.seed(4)
    x, shared, logits = mx.random.normal((8, 64)), mx.random.normal((8, 64)), visits(rows, 160)
    routing, bias = Routing("sigmoid", 8, scale=2.5), mx.zeros(160)
    with emulator.emulated(emulator.Options(fp_contract="fast", order=7)):
        for m in (8, 3):
            together = verify_moe(x[:m], logits[:m], base, routing, bias=bias, shared=shared[:m])
            for i in sampled((0, 4, 7), range(8)) if m == 8 else ():
                one = slice(i, i + 1)
                alone = verify_moe(x[one], logits[one], base, routing, bias=bias, shared=shared[one])
                assert same_bits(together[one], alone)
            if m == 8:
                all_rows = together
            assert same_bits(together, all_rows[:m])


@pytest.mark.parametrize("value", sampled([float("nan")], [float("nan"), float("inf"), 3e38]))
def test_a_spoilt_row_leaves_the_others(value, base):
    mx.random.seed(4)
    x, logits = mx.random.normal((8, 64)), visits(LOADS["1 to 8 rows of an expert"], 160)
    routing, bias, kept = Routing("sigmoid", 8), mx.zeros(160), mx.array([0, 1, 2, 3, 4, 6, 7])
    with emulator.emulated():
        clean = verify_moe(x, logits, base, routing, bias=bias)
        spoilt = verify_moe(mx.where(mx.arange(8)[:, None] == 5, value, x), logits, base, routing, bias=bias)
    assert same_bits(clean[kept], spoilt[kept])
    assert not mx.all(mx.isfinite(spoilt[5]))


@sweep
@pytest.mark.parametrize(("m", "e"), [(1, 4), (16, 32)])
def test_every_expert(m, e):
    """top_k = E: one row of 4 experts, the smallest arrays; 16 rows of 32, the maximum number of pairs."""
    experts, routing = draw(BASE, BASE, 64, 32, e, mx.float32), Routing("sigmoid", e, norm=False)
    x, logits = mx.random.normal((m, 64)), mx.random.normal((m, e))
    with emulator.emulated():
        y = verify_moe(x, logits, experts, routing)
    assert relative_error(y, exact(verify_moe_ref(x, logits, experts, routing))) < 1e-5


def plain(x, logits, experts, routing, shared, shared_gate):
    """Return the result of mlx-lm's operations in x's type."""
    visited, weights = route_ref(logits, routing, None)
    stored = (experts.gate, experts.up, experts.down)
    take = [mx.dequantize(w.w, w.scales, w.biases, **w.format)[visited] for w in stored]
    gate, up = (w @ x[:, None, :, None] for w in take[:2])
    y = (take[2] @ (gate * mx.sigmoid(gate) * up)).squeeze(-1)
    return (y * weights[..., None].astype(x.dtype)).sum(axis=1) + mx.sigmoid(shared_gate) * shared


def test_its_error_is_at_most_twice_that_of_plain_operations():
    x, logits, experts, routing, *shared = low()
    with emulator.emulated():
        y = verify_moe(x, logits, experts, routing, shared=shared[0], shared_gate=shared[1])
    full = [a.astype(mx.float32) for a in shared]
    want = exact(verify_moe_ref(x.astype(mx.float32), logits, experts, routing, shared=full[0], shared_gate=full[1]))
    errors = [np.square(exact(a) - want).mean() ** 0.5 for a in (y, plain(x, logits, experts, routing, *shared))]
    assert y.dtype == mx.bfloat16
    assert errors[0] < 2 * errors[1]
    assert errors[0] < 0.01 * np.abs(want).max()


def test_types_that_differ(base):
    """x of 16 bits with scales of 32 bits is computed in 32 bits and returned in 16."""
    mx.random.seed(6)
    x, logits, bias = mx.random.normal((8, 64)).astype(mx.bfloat16), mx.random.normal((8, 160)), mx.zeros(160)
    with emulator.emulated():
        y = verify_moe(x, logits, base, Routing("sigmoid", 8), bias=bias)
        full = verify_moe(x.astype(mx.float32), logits, base, Routing("sigmoid", 8), bias=bias)
    assert same_bits(y, full.astype(mx.bfloat16))


def test_what_it_does_not_support(base):
    x, logits, routing = mx.zeros((2, 64)), mx.zeros((2, 160)), Routing("softmax", 8)
    with pytest.raises(ValueError, match="x has 63 columns; the weights have 64"):
        verify_moe(x[:, :63], logits, base, routing)
    with pytest.raises(ValueError, match=r"logits are \(2, 159\); 2 rows and 160 experts need \(2, 160\)"):
        verify_moe(x, logits[:, :159], base, routing)
    with pytest.raises(ValueError, match="shared_gate is given without shared"):
        verify_moe(x, logits, base, routing, shared_gate=mx.zeros((2, 1)))
    with pytest.raises(ValueError, match="a bias is given; softmax routing has none"):
        verify_moe(x, logits, base, routing, bias=mx.zeros(160))
    with pytest.raises(ValueError, match=r"limit=7\.0 is given; experts without a gate have none"):
        verify_moe(x, logits, replace(base, gate=None), routing, limit=7.0)
    with pytest.raises(ValueError, match="top_k is 161; there are 160 experts"):
        verify_moe(x, logits, base, Routing("sigmoid", 161))
    with pytest.raises(ValueError, match="n_group is 3; groups of equal size, at least 2, cannot hold 160 experts"):
        verify_moe(x, logits, base, Routing("sigmoid", 8, 3, 2))
    with pytest.raises(ValueError, match=r"gate is \[160, 32, 64\] of 4 bits \(affine, 32\) and up \[160, 64, 32\]"):
        Experts(base.gate, base.down, base.down)
    with pytest.raises(ValueError, match=r"down is \[160, 32, 64\].* it must be \[160, 64, 32\]"):
        Experts(base.gate, base.up, base.up)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tanh", 8), "kind is 'tanh'; it must be 'sigmoid' or 'softmax'"),
        (("sigmoid", 0), "top_k is 0; it must be at least 1"),
        (("sigmoid", 8, 4, 5), "topk_group is 5; it must be from 1 to n_group, which is 4"),
        (("softmax", 8, 4, 2), "softmax routing has no groups, eps or scale"),
    ],
)
def test_routings_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        Routing(*arguments)


def test_what_the_kernels_leave_to_the_reference(base):
    """More than 16 rows, 512 experts or 32 experts per row; other types."""
    x, logits = mx.zeros((17, 64)), mx.zeros((17, 160))
    with emulator.emulated() as launches:
        verify_moe(x, logits, base, Routing("softmax", 8))
        verify_moe(x[:2], logits[:2], base, Routing("softmax", 33))
    assert not launches
