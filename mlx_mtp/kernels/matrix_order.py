"""Read in which order a simdgroup_matrix adds its eight products, and write the same sum for one thread.

Apple documents neither the order nor the rounding, and random inputs do not show them: most of their sums agree.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from ._first_launch import launched
from ._source import constants, launch, on_metal

Rounding = Literal["nearest", "truncated", "wide"]
Tree = tuple["Tree", "Tree"] | int | str  # a sum of two; the number of a product; or "c", what they are added to
Product = tuple[float, float]
TYPES = (mx.float32, mx.float16, mx.bfloat16)  # of the operands, in the order of the kernel's output
C = 8  # the place of c in a sum, after those of the products
ZERO, ONE = (0.0, 0.0), (1.0, 1.0)
SIGNATURE, SQUARES, QUARTERS = slice(72), slice(72, 136), slice(136, 280)  # parts of `probe_sums`


def in_turn(*terms: Tree) -> Tree:
    """Return the sum that adds one term after the other to the first."""
    return functools.reduce(lambda left, right: (left, right), terms)


PAIRS = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
ORDERS: dict[str, Tree] = {
    "forward": in_turn("c", *range(8)),
    "backward": in_turn("c", *reversed(range(8))),
    "products first": (in_turn(*range(8)), "c"),
    "pairs": ("c", PAIRS),
    "strides": ("c", (((0, 4), (2, 6)), ((1, 5), (3, 7)))),
    "pairs in turn": in_turn("c", (0, 1), (2, 3), (4, 5), (6, 7)),
    "halves": in_turn("c", in_turn(0, 1, 2, 3), in_turn(4, 5, 6, 7)),
    "halves by pairs": in_turn("c", *PAIRS),
}


class MatrixOrder(NamedTuple):
    """The arithmetic of a simdgroup_matrix for one type of its operands.

    name: of ORDERS; "" if no order has these sums. fused: whether products are added without being rounded; True for
    types of 16 bits, whose products are exact in float32. rounding: of each addition to float32, "nearest" or
    "truncated" (toward zero), or "wide" if all nine terms are added exactly and then rounded once, in no order.
    signature: the first 72 of `probe_sums`, for a report; only with an unknown arithmetic.
    """

    name: str
    fused: bool
    rounding: Rounding
    signature: tuple[float, ...] = ()


CANDIDATES = [
    *(
        MatrixOrder(name, *how)
        for how in itertools.product((True, False), ("nearest", "truncated"))
        for name in ORDERS
    ),
    *(MatrixOrder("", fused, "wide") for fused in (True, False)),
]


def one_sum(others: Product, places: dict[int, Product]) -> list[float]:
    """Return a[8], b[8] and c of a sum whose terms are these products at their places, and `others` elsewhere."""
    terms = [places.get(place, others) for place in range(C + 1)]
    return [a for a, _ in terms[:C]] + [b for _, b in terms[:C]] + [terms[C][0] * terms[C][1]]


def _kinds() -> Iterator[list[float]]:
    """Yield the sums of `probe_sums`."""
    pairs = [*itertools.combinations(range(C + 1), 2)]
    for half in (2.0**15, 2.0**12):  # orders: what is added before the two cancel is lost
        yield from (one_sum(ONE, {i: (half, half), j: (half, -half)}) for i, j in pairs)
    both = [(i, j) for i, j in itertools.product(range(C + 1), repeat=2) if i != j]
    square, negated = (1 + 2.0**-12, 1 + 2.0**-12), (-1 - 2.0**-11, 1.0)  # fused, 2^-24 is left of both
    yield from (one_sum(ZERO, {i: square, j: negated}) for i, j in both if i != C)
    for sign in (1.0, -1.0):  # three quarters of the last place of one, which truncation drops
        yield from (one_sum(ZERO, {i: (sign, 1.0), j: (1.5 * 2.0**-12, sign * 2.0**-12)}) for i, j in both)
    yield from (one_sum(ZERO, {i: ONE, j: (2.0**-12, 2.0**-12)}) for i, j in pairs)  # halves of it: ties
    yield one_sum(ZERO, {0: (1 + 2.0**-10, 1.0)})  # one in bfloat16: each type is that of its operands


@functools.cache
def probe_sums() -> np.ndarray:
    """Return sums [n, 17] (a[8], b[8], c) that distinguish the candidates, n a multiple of 8.

    The first 36 have 2^30 and -2^30 at each pair of places and ones elsewhere, the next 36 2^24 and -2^24. Every sum
    is exact in float64.
    """
    found = [*_kinds()]
    return np.array([*found, *[one_sum(ZERO, {})] * (-len(found) % 8)])


def _rounded(x: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Return float64 numbers rounded to float32, as float64."""
    near = x.astype(np.float32)
    if rounding == "truncated":
        near = np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    return near.astype(np.float64)


def _term(tree: Tree, terms: np.ndarray, how: MatrixOrder) -> np.ndarray:
    """Return what a term of a sum adds to it: a product as it is if `how` is fused."""
    if isinstance(tree, int):
        return terms[tree] if how.fused else _rounded(terms[tree], "nearest")
    return _sum(tree, terms, how)


def _sum(tree: Tree, terms: np.ndarray, how: MatrixOrder) -> np.ndarray:
    if isinstance(tree, tuple):
        return _rounded(_sum(tree[0], terms, how) + _term(tree[1], terms, how), how.rounding)
    return terms[C] if tree == "c" else _rounded(terms[int(tree)], "nearest")


def expected(how: MatrixOrder, dtype: mx.Dtype) -> np.ndarray:
    """Return the results of `probe_sums`, operands of this type, in a known arithmetic."""
    sums = probe_sums()
    operands = np.array(mx.array(sums[:, : 2 * C], mx.float32).astype(dtype).astype(mx.float32), np.float64)
    terms = np.concatenate([operands[:, :C] * operands[:, C:], sums[:, 2 * C :]], axis=1).T
    if how.rounding == "wide":
        return _rounded(sum(_term(k, terms, how) for k in range(C)) + terms[C], "nearest")
    return _sum(ORDERS[how.name], terms, how)


def named(found: np.ndarray, dtype: mx.Dtype) -> MatrixOrder:
    """Return the arithmetic whose `expected` results are those that were found, else one without a name.

    Of an unknown one, fused is whether any product was not rounded, and "truncated" that all sums of two were.
    """
    for how in CANDIDATES:
        if np.array_equal(found, expected(how, dtype)):
            return how
    fused = dtype != mx.float32 or bool((found[SQUARES] != 0).any())
    truncated = bool((np.abs(found[QUARTERS]) == 1).all())
    return MatrixOrder("", fused, "truncated" if truncated else "nearest", tuple(found[SIGNATURE].tolist()))


def matrix_sums() -> mx.array:
    """Return the results [3, n] of `probe_sums` for operands of each of TYPES, in one launch.

    Without Metal they are those of the order "forward", fused and rounded to nearest.
    """
    sums = probe_sums()
    if not on_metal():
        return mx.array([expected(CANDIDATES[0], dtype).tolist() for dtype in TYPES])
    inputs, outputs = {"sums": constants(mx.float32, *sums.flatten().tolist())}, {"y": ((3, len(sums)), mx.float32)}
    grid, group = (4 * len(sums), 1, 1), (32, 1, 1)
    return launch("matrix_order", inputs, outputs, template={}, grid=grid, group=group)[0]


def _read() -> dict[str, MatrixOrder]:
    with launched():  # runs here, not again in `run_new`
        found = np.array(matrix_sums())
    names = (str(dtype).removeprefix("mlx.core.") for dtype in TYPES)
    return {name: named(sums, dtype) for name, sums, dtype in zip(names, found, TYPES, strict=True)}


_read_once = functools.cache(_read)


def matrix_orders() -> dict[str, MatrixOrder]:
    """Return the arithmetic of a simdgroup_matrix by the type of its operands ("float32", "float16", "bfloat16").

    One launch reads it, once per process. Without Metal: {}. What replaces `mx.fast.metal_kernel`, as the emulator
    does, is read at each call, because its options may differ.
    """
    if not on_metal():
        return {}
    return dict(_read() if inspect.isfunction(mx.fast.metal_kernel) else _read_once())


def metal_sum(order: str, fused: bool) -> str:
    """Return Metal text of `float eight(float c, thread const float (&a)[8], thread const float (&b)[8])`.

    It adds eight products to c as a simdgroup_matrix of floats does with this order, of ORDERS, rounded to nearest.
    No compiler changes its sums; they may differ in the sign of a zero if products are not fused.
    """
    head = "METAL_FUNC float eight(float c, thread const float (&a)[8], thread const float (&b)[8])"
    return f"{head} {{\n  return {_expression(ORDERS[order], fused)};\n}}\n"


def _expression(tree: Tree, fused: bool) -> str:
    if not isinstance(tree, tuple):
        return "c" if tree == "c" else f"a[{tree}] * b[{tree}]" if fused else f"fma(a[{tree}], b[{tree}], 0.0f)"
    left, right = tree
    if fused and isinstance(right, int):
        return f"fma(a[{right}], b[{right}], {_expression(left, fused)})"
    return f"({_expression(left, fused)} + {_expression(right, fused)})"
