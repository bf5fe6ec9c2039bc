"""Check that the order of a simdgroup_matrix's sums is read back, and that its text for a thread has its bits."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import launch, linux_only
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.emulator.options import MATRIX_ORDERS
from mlx_mtp.kernels import MatrixOrder, matrix_order, matrix_orders, metal_sum
from mlx_mtp.kernels.matrix_order import CANDIDATES, ORDERS, TYPES, expected

ALL = [*itertools.product(MATRIX_ORDERS, (True, False))]
IN_TURN = [(order, i % 2 == 0) for i, order in enumerate(MATRIX_ORDERS)]
FLOATS = ("float32", "float16", "bfloat16")
KNOWN = {"wide": MatrixOrder("", True, "wide"), "truncated": MatrixOrder("forward", True, "truncated")}


def read(order: str, fused: bool) -> dict[str, MatrixOrder]:
    options = emulator.Options(matrix_order=order, matrix_fused=fused, optimize=0, traffic=False)
    with emulator.emulated(options) as launches:
        found = matrix_orders()
    assert [each.kernel for each in launches] == ["matrix_order"]
    return found


@linux_only
@pytest.mark.parametrize(("order", "fused"), sampled(IN_TURN, ALL))
def test_the_probe_reads_the_order_of_the_emulator(order, fused):
    """Products of 16-bit operands are exact in float32, so that they are always read as fused."""
    how = KNOWN.get(order, MatrixOrder(order, True, "nearest"))
    assert read(order, fused) == {"float32": how._replace(fused=fused), "float16": how, "bfloat16": how}


def test_no_two_arithmetics_have_the_same_sums():
    for dtype in TYPES:
        hows = [how for how in CANDIDATES if how.fused or dtype == mx.float32]
        for one, other in itertools.combinations(hows, 2):
            assert not np.array_equal(expected(one, dtype), expected(other, dtype)), (one, other)


def test_the_first_sums_distinguish_the_orders():
    """36 sums are enough for the orders, also in a report on an arithmetic that has no name."""
    signatures = {tuple(expected(MatrixOrder(name, True, "nearest"), mx.bfloat16)[:36]) for name in ORDERS}
    assert len(signatures) == len(ORDERS)
    assert all(set(each) <= set(range(8)) for each in signatures)


@linux_only
@pytest.mark.parametrize("how", [("strides", True, "nearest"), ("truncated", False, "truncated")])
def test_an_unknown_order_has_its_signature(monkeypatch, how):
    order, fused, rounding = how
    name = KNOWN.get(order, MatrixOrder(order, *how[1:])).name
    sums = expected(MatrixOrder(name, fused, rounding), mx.float32)[:72]
    monkeypatch.setattr(matrix_order, "CANDIDATES", [each for each in CANDIDATES if each.name != name])
    found = read(order, fused)
    assert found["float32"] == MatrixOrder("", fused, rounding, tuple(sums))
    for dtype in FLOATS[1:]:
        assert found[dtype][:3] == ("", True, rounding)
        assert found[dtype].signature == tuple(sums)


def test_without_metal_nothing_is_read():
    assert matrix_orders() == {}


PAIRS = [*itertools.product(ORDERS, (True, False))]
# Compiled apart: a compiler fuses no product that several sums share.
HEADER = "".join(metal_sum(*how).replace("eight(", f"eight_{i}(") for i, how in enumerate(PAIRS))
HEADER = HEADER.replace("METAL_FUNC", "__attribute__((noinline))")
BODY = (
    """
    const int lane = thread_index_in_simdgroup, step = 64 * threadgroup_position_in_grid.x;
    const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
    simdgroup_matrix<float, 8, 8> p, q, sum;
    simdgroup_load(p, a + step, 8);
    simdgroup_load(q, b + step, 8);
    simdgroup_load(sum, c + step, 8);
    simdgroup_multiply_accumulate(sum, p, q, sum);
    for (int j = 0; j < 2; j++) {
      const int at = step + 8 * row + column + j;
      float left[8], right[8];
      for (int k = 0; k < 8; k++) {
        left[k] = a[step + 8 * row + k];
        right[k] = b[step + 8 * k + column + j];
      }
      out[at] = sum.thread_elements()[j];
"""
    + "".join(f"out[{i + 1} * 256 + at] = eight_{i}(c[at], left, right);\n" for i in range(len(PAIRS)))
    + "}"
)


@linux_only
@pytest.mark.parametrize("how", sampled([("forward", True), ("strides", False), ("halves", True)], PAIRS))
def test_the_text_for_one_thread_has_the_bits_of_the_order(how):
    """No text of another order has them. Magnitudes from 2^-20 to 2^20 show what is added to what."""
    rng = np.random.default_rng(5)
    terms = [rng.normal(size=(4, 8, 8)) * 2.0 ** rng.integers(-10, 11, (4, 8, 8)) for _ in range(3)]
    terms[2] *= 2.0 ** rng.integers(-10, 11, (4, 8, 8))
    options = emulator.Options(matrix_order=how[0], matrix_fused=how[1], fp_contract="fast")
    inputs = [mx.array(term.astype(np.float32)) for term in terms]
    y = launch(BODY, *inputs, out=(len(PAIRS) + 1, 256), grid=128, header=HEADER, options=options)
    matrix, *texts = np.array(y).view(np.uint32)
    assert [pair for pair, text in zip(PAIRS, texts, strict=True) if np.array_equal(text, matrix)] == [how]


def test_the_text_of_the_first_order_is_a_chain():
    assert metal_sum("forward", fused=True).count("fma(") == 8
    assert "+" not in metal_sum("forward", fused=True)
