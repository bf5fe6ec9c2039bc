"""Compare products of the lane `matrix` with those of the row alone, in every order of sums, and with numpy."""

import itertools
import random
import shutil
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from exact import CONTRACTIONS, DTYPES, FORMATS, activation, same_bits
from matrix_sums import codes_of, machine, multiplied, product, quantized, scales_of, sensitive
from metal_cases import exact, linux_only
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.emulator.options import MATRIX_ORDERS
from mlx_mtp.kernels import (
    MatrixOrder,
    Quantized,
    _matrix,
    _source,
    matrix_gemv,
    matrix_glu,
    matrix_heads,
    matrix_qmm,
)

pytestmark = linux_only
F32, F16, BF16 = DTYPES
UNITS = [*itertools.product(MATRIX_ORDERS, (True, False))]
PLAIN = ("plain", 16, 64)
BLOCKS = [("iq4_nl", 4, 32), ("iq4_xs", 4, 32), ("q6_k", 6, 16)]
ALL = [*FORMATS, *BLOCKS, PLAIN]
COUNTS = sampled((2, 3, 8, 16), (*range(2, 17), 17, 33))  # numbers of rows that are compared with one row
FEW = (3, 9)


class Case(NamedTuple):
    """Weights of a format with n rows of k values, x of a type, and how the kernels are compiled and run."""

    form: tuple[str, int, int]
    n: int
    k: int
    dtype: mx.Dtype = F32
    unit: tuple[str, bool] = ("forward", True)
    contraction: str = "off"
    order: str | int = "forward"
    tall: int = 4096
    counts: tuple[int, ...] = tuple(COUNTS)

    @property
    def options(self) -> dict:
        return {"fp_contract": self.contraction, "order": self.order}

    def __str__(self):
        name = str(self.dtype).rpartition(".")[2]
        return " ".join(map(str, (*self.form, self.n, self.k, name, *self.unit, self.contraction)))


CASES = [
    Case(("affine", 4, 64), 9, 2368, F32, contraction="fast"),
    Case(("affine", 3, 32), 41, 160, BF16, ("strides", True), "fast", "reverse", tall=0, counts=(3, 8)),
    Case(("affine", 5, 128), 33, 384, F16, ("backward", True), "on", 7),
    Case(("affine", 2, 64), 7, 320, F32, ("pairs", False), "fast"),
    Case(("affine", 8, 32), 9, 96, F32, ("products first", True), "on"),
    Case(("mxfp4", 4, 32), 12, 352, BF16, ("halves", True)),
    Case(("mxfp8", 8, 32), 8, 288, F32, ("halves by pairs", False), "fast", 3),
    Case(("nvfp4", 4, 16), 17, 544, F32, counts=FEW),
    Case(("iq4_nl", 4, 32), 9, 96, F16, ("pairs in turn", True), "on"),
    Case(("q6_k", 6, 16), 10, 768, BF16, contraction="fast"),
    Case(PLAIN, 9, 203, F32, ("strides", False), "fast"),
    Case(PLAIN, 9, 2111, BF16, ("forward", True), "on", "reverse", counts=FEW),
    Case(("affine", 6, 64), 9, 192, F32, ("wide", True), "fast", counts=FEW),
    Case(PLAIN, 9, 77, F16, ("truncated", True), counts=FEW),
]


def alone(x: mx.array, op) -> mx.array:
    """Return the results of each row of x [M, K] on its own."""
    return mx.concatenate([op(row) for row in mx.split(x, len(x))])


def check(case: Case) -> None:
    """Assert that rows have the bits of the row alone, and of the stated arithmetic where that is "forward"."""
    x, weights = sensitive(*case.form, case.n, case.k, max(case.counts), case.dtype)
    with machine(*case.unit, **case.options):
        rows = alone(x, lambda row: multiplied(row, weights))
        for m in case.counts:
            assert same_bits(multiplied(x[:m], weights), rows[:m]), f"{m} rows"
    if case.unit == ("forward", True):
        assert same_bits(rows, mx.array(product(x, weights)).astype(x.dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_have_the_bits_of_the_row_alone(monkeypatch, case):
    monkeypatch.setattr(_matrix, "TALL", case.tall)
    check(case)


@sweep
@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_sweep(monkeypatch, unit):
    """Every format and type, with odd shapes."""
    for (i, form), (j, dtype) in itertools.product(enumerate(ALL), enumerate(DTYPES)):
        rng = random.Random(f"{form}{dtype}{unit}")
        monkeypatch.setattr(_matrix, "TALL", rng.choice((0, 4096)))
        whole = 256 if form[0] in ("iq4_xs", "q6_k") else 1 if form == PLAIN else max(form[2], 32)
        k = whole * max(1, rng.choice((8, 200, 999, 2500)) // whole)
        contraction, order = CONTRACTIONS[(i + j) % 3], ("forward", "reverse", 2 + i)[j]
        counts = *rng.sample(range(2, 17), 5), rng.choice((17, 33))
        case = Case(form, rng.randrange(1 if k > 99 else 8, 45), k, dtype, unit, contraction, order, counts=counts)
        check(case)


@pytest.mark.parametrize("form", sampled([("affine", 4, 32)], ALL), ids=str)
def test_inputs_show_the_order(form):
    """So that none of the comparisons in this file holds by chance: other orders have other bits, in each type."""
    k = 512 if form[0] in ("iq4_xs", "q6_k") else 384
    for dtype in DTYPES:
        x, weights = sensitive(*form, 33, k, 8, dtype)
        found = {}
        for order in sampled(("forward", "strides"), MATRIX_ORDERS):
            with machine(order):
                found[order] = multiplied(x, weights)
        for a, b in itertools.combinations(found, 2):
            # "wide" and "truncated" differ least from "forward"
            assert mx.mean(found[a] != found[b]) > (0.5 if dtype == F32 else 0.05), (dtype, a, b)


@pytest.mark.parametrize("m", [17, 33])
def test_more_than_sixteen_rows(m):
    check(Case(("affine", 4, 64), 5, 128, counts=(m,)))


def test_more_than_two_passes_of_the_twin():
    """A pass is 2,048 values; passes share two halves of threadgroup memory."""
    check(Case(("affine", 8, 64), 3, 4160, counts=(3, 8)))


@pytest.mark.parametrize("m", sampled((2, 16), (1, 2, 3, 8, 16, 17)))
def test_stacked_linears_with_a_bias(m):
    """Each has the bits of its own product, to which its bias is added once it is rounded."""
    x, weights = sensitive("affine", 4, 64, 29, 320, m, BF16, ends=(5, 12, 29))
    bias = mx.random.normal((29,)).astype(BF16)
    with machine():
        outputs = matrix_qmm(x, replace(weights, bias=bias))
        assert [y.shape for y in outputs] == [(m, 5), (m, 7), (m, 17)]
        single = multiplied(x, replace(weights, ends=(29,)))
        assert same_bits(mx.concatenate(outputs, axis=-1), single + bias)
        w = mx.random.normal((9, 77)).astype(BF16)
        assert same_bits(matrix_gemv(x[:, :77], w, bias[:9]), matrix_gemv(x[:, :77], w) + bias[:9])


@pytest.mark.parametrize(
    ("form", "height", "k", "dtype", "limit"),
    [
        (("affine", 4, 32), 13, 352, F32, 0.7),
        (("nvfp4", 4, 16), 9, 160, BF16, None),
        pytest.param(("q6_k", 6, 16), 21, 512, F16, 0.3, marks=sweep),
        pytest.param(("affine", 5, 128), 32, 384, BF16, None, marks=sweep),
        pytest.param(("mxfp8", 8, 32), 7, 64, F32, None, marks=sweep),
    ],
    ids=str,
)
def test_gate_and_up(form, height, k, dtype, limit):
    """The activation is that of the rounded products."""
    x, weights = sensitive(*form, 2 * height, k, 17, dtype, ends=(height, 2 * height))
    x = x * mx.array(2.0**-9, dtype)  # else most activations are 0 or linear
    with machine():
        gate, up = mx.split(multiplied(x, weights), 2, axis=-1)
        want = activation(gate, up, limit, emulator.Options(traffic=False))
        for m in sampled((1, 3, 8, 17), range(1, 18)):
            assert same_bits(matrix_glu(x[:m], weights, limit), want[:m]), m


@pytest.mark.parametrize(
    ("form", "n", "k", "past", "dtype"),
    [
        (("affine", 4, 64), 13, 192, 64, F32),
        (("iq4_nl", 4, 32), 33, 96, 0, BF16),
        pytest.param(("affine", 3, 32), 8, 2144, 5, F16, marks=sweep),
        pytest.param(("q6_k", 6, 16), 9, 256, 3, F32, marks=sweep),
    ],
    ids=str,
)
def test_heads(form, n, k, past, dtype):
    """Of each head's values, of which the last `past` do not count, as of a product of that head alone."""
    made = [sensitive(*form, n, k, 17 + i, dtype) for i in range(3)]
    x = mx.concatenate([mx.stack([x[:17] for x, _ in made], axis=1), mx.full((17, 3, past), mx.nan, dtype)], axis=-1)
    arrays = [
        mx.stack([getattr(w, name) for _, w in made])
        for name in ("w", "scales", "biases")
        if getattr(made[0][1], name) is not None
    ]
    weights = Quantized(*arrays, *[None] * (3 - len(arrays)), form[2], form[1], form[0], (n,))
    with machine():
        want = mx.stack([multiplied(x[:17], w) for x, w in made])
        for m, heads_first in sampled(
            ((1, True), (2, False), (8, False), (17, True)), itertools.product(range(1, 18), (True, False))
        ):
            y = matrix_heads(x[None, :m], weights, heads_first=heads_first)[0]
            assert same_bits(y if heads_first else y.swapaxes(0, 1), want[:, :m]), (m, heads_first)


@pytest.mark.parametrize("form", sampled([("affine", 4, 64), PLAIN], ALL), ids=str)
@pytest.mark.parametrize("m", sampled((3, 16), (2, 3, 5, 8, 11, 16, 33)))
def test_nan_and_infinity_stay_in_their_rows(form, m):
    x, weights = sensitive(*form, 9, 512, m, F32)
    with machine():
        want = multiplied(x, weights)
        for value, row in itertools.product((mx.nan, mx.inf), sampled((0, m - 1), range(m))):
            column = (37 * row + 5) % 512
            spoiled = mx.where((mx.arange(m)[:, None] == row) & (mx.arange(512) == column), value, x)
            y, others = multiplied(spoiled, weights), mx.array([i for i in range(m) if i != row])
            assert same_bits(y[others], want[others])
            assert not mx.isfinite(y[row]).any()


@pytest.mark.parametrize("form", sampled([("affine", 4, 64), PLAIN], ALL), ids=str)
@pytest.mark.parametrize("tall", [0, 4096])
def test_weights_are_requested_once(monkeypatch, form, tall):
    monkeypatch.setattr(_matrix, "TALL", tall)
    for m in sampled((1, 2, 3, 5, 16), range(1, 17)):
        x, weights = sensitive(*form, 64, 512, m, BF16)
        with machine(traffic=True) as launches:
            multiplied(x, weights)
        (traffic,) = launches
        assert traffic["w"].reread == 1.0, m


def true(x: mx.array, weights: Quantized | mx.array) -> np.ndarray:
    """Return the product in float64."""
    if isinstance(weights, mx.array):
        return exact(x) @ exact(weights).T
    scales = np.repeat(scales_of(weights).astype(np.float64), weights.group_size, axis=-1)
    biases = 0.0 if weights.biases is None else np.repeat(exact(weights.biases), weights.group_size, axis=-1)
    return exact(x) @ (codes_of(weights) * scales + biases).T


@pytest.mark.parametrize(
    ("form", "order"),
    sampled([(("affine", 4, 64), "forward"), (("mxfp4", 4, 32), "halves")], itertools.product(ALL, MATRIX_ORDERS)),
    ids=str,
)
def test_the_error_in_float32(form, order):
    """Of the outputs' root mean square; MLX's own products err by 3 to 5e-7. Truncated sums err ten times as much."""
    mx.random.seed(form[1])
    x, w = mx.random.normal((8, 4096)), mx.random.normal((32, 4096))
    weights = w if form == PLAIN else quantized(w, *form, F32, (32,))
    with machine(order):
        y = multiplied(x, weights)
    want = true(x, weights)
    errors, scale = exact(y) - want, np.sqrt(np.mean(want**2)) * (10 if order == "truncated" else 1)
    assert np.sqrt(np.mean(errors**2)) < 6e-7 * scale  # most: 5.8e-7, 8 bits in groups of 128
    assert np.abs(errors).max() < 2.05e-6 * scale  # most: 2.02e-6, of the same weights


HEADERS = "units.h", "twin.h", "matrix.h"
# Errors in these headers that the tests must find: what is right, and what is written instead.
APART = (
    "U::load_values(tile.x + rows[m], k + c * RUN + step, K, whole, run);",
    "for (int i = 0; i < STEPS; i++) {\nconst int at = k + (step + i) * SIDE + c;\n"
    "run[i] = at < K ? float(tile.x[rows[m] + at]) : 0.0f;\n}",
    "U::weight(words[r], c * RUN + step + i)",
    "U::weight(words[r], (step + i) * SIDE + c)",
)
BROADCAST = "quad_broadcast(term[m][r], ushort(i))"
PLANTED = {
    "the twin's blocks out of order": (BROADCAST, "quad_broadcast(term[m][r], ushort(i ^ 1))"),
    "the twin's slices by another rule": (BROADCAST, "simd_shuffle(term[m][r], ushort(lane / 4 + 8 * i))"),
    "the twin's columns neighbouring": APART,
    "the twin's sum of x by another tree": (
        "for (ushort apart = 1; apart < SIDE; apart *= 2)",
        "for (ushort apart = SIDE / 2; apart > 0; apart /= 2)",
    ),
    "the twin's slices added backward": (
        "for (ushort apart = 4; apart < 32; apart *= 2)",
        "for (ushort apart = 16; apart > 2; apart /= 2)",
    ),
    "the twin's last block skipped": (
        "if (block + unit < K) {\n        float chain",
        "if (block + BLOCK <= K) {\n        float chain",
    ),
    "the twin's rows": ("min(tile.m + m, tile.M - 1)", "min(tile.m + m, max(tile.M - 2, 0))"),
    "the matrices' last block skipped": (
        "min(turn + TURN * BLOCK, K)",
        "min(turn + TURN * BLOCK, K / BLOCK * BLOCK)",
    ),
    "the matrices' rows": (
        "min(tile.m + SIDE * b + column + j, tile.M - 1)",
        "min(tile.m + SIDE * b + column + j, max(tile.M - 2, 0))",
    ),
    "the matrices' units out of order": (
        "term[t][b][j] = U::term(scale, chains[t][b].thread_elements()[j], sum[b][j], term[t][b][j])",
        "term[t][b][j] += U::term(scale, chains[t][b].thread_elements()[j], sum[b][j], 0.0f)",
    ),
    "the matrices' slices by another tree": (
        "((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))",
        "((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))",
    ),
    # Both kernels: no comparison of rows finds these.
    "weight rows": ("min(first + j % EACH, rows - 1)", "min(first + j % EACH, rows - 2)"),
    "term": ("fma(scale.x, products, fma(scale.y, sum, term))", "fma(scale.y, sum, fma(scale.x, products, term))"),
    "columns of two": ("RUN = VALUES < 32 ? 2 : 4;", "RUN = 2;"),
    "scales": ("float2(scale_of<GROUP>(", "float2(1.0001f * scale_of<GROUP>("),
}
AT = {"scales": Case(("mxfp4", 4, 32), 5, 96, counts=(2, 8))}


@pytest.mark.parametrize("fault", sampled(["the twin's blocks out of order", "columns of two"], PLANTED))
def test_planted_errors_are_found(monkeypatch, tmp_path, fault):
    texts = {name: (_source.DIRECTORY / name).read_text() for name in HEADERS}
    for right, wrong in zip(PLANTED[fault][::2], PLANTED[fault][1::2], strict=True):
        assert [text.count(right) for text in texts.values() if right in text] == [1], right
        texts = {name: text.replace(right, wrong) for name, text in texts.items()}
    shutil.copytree(_source.DIRECTORY, tmp_path / "kernels")
    for name, text in texts.items():
        (tmp_path / "kernels" / name).write_text(text)
    monkeypatch.setattr(_source, "DIRECTORY", tmp_path / "kernels")
    with pytest.raises(AssertionError, match=r"rows|same_bits"):
        check(AT.get(fault, Case(("affine", 4, 32), 9, 2336, counts=(2, 8))))


@pytest.mark.parametrize(
    ("twin", "matrix"), sampled([("backward", "forward")], itertools.permutations(MATRIX_ORDERS[:-2], 2))
)
def test_a_twin_of_another_order_is_found(monkeypatch, twin, matrix):
    monkeypatch.setattr("matrix_sums.probed", lambda order, fused: MatrixOrder(twin, True, "nearest"))
    with pytest.raises(AssertionError, match=r"2 rows|8 rows"):
        check(Case(("affine", 4, 32), 9, 352, unit=(matrix, True), counts=(2, 8)))
