"""Compare rows 9 to 16, those of several sequences, with the bits of one row, and count requests of weights.

All of it is long; some of these numbers of rows are in the tests of each kernel.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from exact import DTYPES, activation, dot, draw, one_row, same_bits
from metal_cases import linux_only
from moe_blocks import visits
from sweep import sweep

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import (
    Experts,
    Quantized,
    Routing,
    verify_gemv,
    verify_glu,
    verify_head_top,
    verify_moe,
    verify_qmm,
)

pytestmark = linux_only
ROWS = (9, 12, 16)
CASES = list(itertools.product(ROWS, DTYPES))
QUIET = emulator.Options(traffic=False)


cases = pytest.mark.parametrize(("m", "dtype"), CASES, ids=str)


def traffic_of(made, *args, **more) -> tuple:
    with emulator.emulated() as launches:
        found = made(*args, **more)
    return found, launches


@sweep
@cases
def test_quantized_products(m, dtype):
    """Twelve rows share a request; sixteen, for which a lane would hold 32 sums, are two times eight."""
    x, weights = draw("affine", 4, 64, (24, 512), m, dtype)
    (y,), (traffic,) = traffic_of(verify_qmm, x, weights)
    assert same_bits(y, one_row(x, weights, QUIET))
    assert traffic["w"].reread == (2.0 if m > 12 else 1.0)


@sweep
@cases
def test_gate_and_up(m, dtype):
    x, weights = draw("affine", 4, 64, (48, 512), m, dtype, parts=(24, 48))
    y, (traffic,) = traffic_of(verify_glu, x, weights)
    gate, up = mx.split(one_row(x, weights, QUIET), 2, axis=-1)
    assert same_bits(y, activation(gate, up, None, QUIET))
    assert traffic["w"].reread == (2.0 if m > 12 else 1.0)


@sweep
@cases
@pytest.mark.parametrize(("n", "k"), [(13, 203), (8, 1024), (40, 64), (131, 515), (1, 300)])
def test_unquantized_products(m, dtype, n, k):
    """Sixteen rows share a request, also if several simdgroups share K; a last tile may request a row twice."""
    mx.random.seed(m)
    x, w = (mx.random.normal(shape).astype(dtype) for shape in ((m, k), (n, k)))
    y, (traffic,) = traffic_of(verify_gemv, x, w)
    alone = dot(x, w, QUIET) if n == 1 else stock.gemv(x, w, None, QUIET)
    assert same_bits(y, alone[0])
    assert traffic["w"].bytes_read == (n + (n % 2 if n > 1 else 0)) * k * dtype.size


def mixture(dtype) -> Experts:
    mx.random.seed(3)
    made = []
    for shape in ((20, 32, 64), (20, 32, 64), (20, 64, 32)):
        arrays = mx.quantize(mx.random.normal(shape).astype(dtype) * 0.2, 32, 4)
        made.append(Quantized(*arrays, 32, 4, "affine", shape[1:2]))
    return Experts(*made)


@sweep
@cases
def test_experts(m, dtype):
    """An expert that more than eight rows visit is requested twice, all others once."""
    experts, routing = mixture(dtype), Routing("softmax", 4)
    chosen = [[0, *((3 * row + i) % 19 + 1 for i in range(3))] for row in range(m)]
    x, logits = mx.random.normal((m, 64)).astype(dtype), visits(chosen, 20).astype(dtype)
    y, (_, glu, down) = traffic_of(verify_moe, x, logits, experts, routing)
    with emulator.emulated(QUIET):  # in calls of few rows, which have the bits of single rows
        few = [verify_moe(x[i : i + 5], logits[i : i + 5], experts, routing) for i in range(0, m, 5)]
    assert same_bits(y, mx.concatenate(few))
    distinct = len(set(itertools.chain(*chosen)))
    for traffic, name in ((glu, "gate"), (glu, "up"), (down, "w")):
        assert traffic[name].reread == (distinct + 1) / distinct


@sweep
@cases
@pytest.mark.parametrize("quantized", [True, False])
def test_heads(m, dtype, quantized):
    """Compare the best tokens of several tiles; a bias is added."""
    if quantized:
        x, weights = draw("affine", 4, 64, (200, 64), m, dtype)
        logits = one_row(x, weights, QUIET)
    else:
        x, weights = (mx.random.normal(shape).astype(dtype) for shape in ((m, 64), (200, 64)))
        logits = stock.gemv(x, weights, None, QUIET)[0]
    (values, tokens, _), (product, _) = traffic_of(verify_head_top, x, weights, 3)
    order = mx.argsort(-logits.astype(mx.float32), axis=-1)[:, :3]
    assert tokens.tolist() == order.tolist()
    assert np.array_equal(values, mx.take_along_axis(logits, order, axis=-1).astype(mx.float32))
    assert product["w"].reread == (2.0 if quantized and m > 12 else 1.0)
