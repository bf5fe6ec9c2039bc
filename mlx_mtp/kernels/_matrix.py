"""Launch the kernels of the lane `matrix`, in which a row has the same bits at every number of rows.

The arithmetic is stated in `kernels/units.h`. Up to TWIN_ROWS rows are multiplied by the twin, a scalar kernel that
adds eight products in the order of this machine's simdgroup_matrix; more, and all rows if that order is not known, by
simdgroup matrices.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from ._quantized import Quantized, arrays, format_template
from ._source import launch
from .matrix_order import ORDERS, MatrixOrder, metal_sum

PLAIN = 4  # the kind of unquantized weights, as in units.h
SLICES, SIDE = 8, 8  # simdgroups of a threadgroup; rows and columns of a matrix
TWIN_ROWS = 3  # maximum rows that the twin multiplies
ROWS_ONCE = 16  # maximum rows of x that share a request of the weights
TALL = 4096  # weight rows from which a threadgroup of matrices has 32 of them, and x is requested half as often
FORWARD = MatrixOrder("forward", True, "nearest")

_taken: list[MatrixOrder] = [FORWARD]


class MatrixTile(NamedTuple):
    """Rows of x and weight rows of a threadgroup."""

    rows: int
    height: int


def take_order(order: MatrixOrder) -> None:
    """Let twins add products in this order from now on, in all threads; without a name there is no twin."""
    _taken[:] = [order]


def has_twin() -> bool:
    """Return whether the order of a simdgroup_matrix is known, so that few rows have a kernel with the same bits."""
    return _taken[0].name in ORDERS and _taken[0].rounding == "nearest"


def matrix_rows(m: int) -> int:
    """Return the rows of x of the compiled kernel that multiplies m rows; of unquantized weights as `matrix_tile`."""
    return m if has_twin() and m <= TWIN_ROWS else min(ROWS_ONCE, -(-m // SIDE) * SIDE)


def matrix_tile(x: mx.array, n: int, weights: Quantized | mx.array, *, low: bool = False) -> MatrixTile:
    """Return the tile for x [M, K] and n weight rows; no bits depend on it.

    It has fewer weight rows where a thread's values would exceed its registers or, if `low`, the sums of 16 rows of x
    a threadgroup's memory. Three rows of unquantized weights are multiplied by matrices.
    """
    long, bits = x.dtype == mx.float32, weights.bits if isinstance(weights, Quantized) else 8 * x.dtype.size
    rows = matrix_rows(len(x))
    if rows == TWIN_ROWS and isinstance(weights, mx.array):
        rows = SIDE
    if rows <= TWIN_ROWS:
        many = bits == 32 or (rows == TWIN_ROWS and (long or bits >= 8))
        return MatrixTile(rows, 8 if many else 32 if rows == 1 else 16)
    crossing = bits in (2, 3, 5, 6) and not getattr(weights, "is_blocks", False)
    many = long or (crossing and (rows > SIDE or bits == 2))
    return MatrixTile(rows, 16 if many or n < TALL or (low and rows > SIDE) else 32)


def weight_inputs(weights: Quantized | mx.array, dtype: mx.Dtype) -> tuple[dict[str, mx.array], dict[str, object]]:
    """Return the arrays w, scales and biases of weights, and the template arguments of their format."""
    if isinstance(weights, Quantized):
        return arrays(weights, dtype), format_template(weights, dtype)
    form = {"T": dtype, "S": dtype, "BITS": 8 * dtype.size, "GROUP": 64, "KIND": PLAIN}
    return dict.fromkeys(("w", "scales", "biases"), weights.astype(dtype)), form


def launch_tiles(
    op: str,
    x: mx.array,
    weights: Quantized | mx.array,
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]],
    tile: MatrixTile,
    groups: tuple[int, int, int],
    more: Mapping[str, Any],
    template: Mapping[str, object],
) -> list[mx.array]:
    """Launch kernel `op` with threadgroups of this tile.

    groups: threadgroups along rows of x, weight rows and heads. more: further inputs. template: further template
    arguments.
    """
    given, form = weight_inputs(weights, x.dtype)
    order = _taken[0] if has_twin() else FORWARD  # without a twin the text names the function, but nothing calls it
    before = metal_sum(order.name, order.fused or x.dtype != mx.float32)
    return launch(
        op,
        {**given, "x": x, **more},
        outputs,
        template={**form, "ROWS": tile.rows, "HEIGHT": tile.height, **template},
        grid=(32 * groups[0], SLICES * groups[1], groups[2]),
        group=(32, SLICES, 1),
        before=before,
    )
