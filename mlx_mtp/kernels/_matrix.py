"""Launch the products of the lane `matrix`, whose rows have the same bits at every number of rows."""

from collections.abc import Mapping

import mlx.core as mx

from ._quantized import Quantized, arrays, format_template
from ._source import launch

PLAIN = 4  # the kind of unquantized weights, as in matrix.h
SLICES = 8  # simdgroups of a threadgroup
TWIN_ROWS = 3  # maximum rows that the twin multiplies
OCTET = 8  # rows of x in a matrix
TALL = 4096  # weight rows from which a threadgroup has 32 of them


def rows_of_tile(m: int, twin: bool = True) -> int:
    """Return the rows of x per threadgroup, of m: each up to three, which the twin multiplies, else 8 or 16."""
    return m if twin and m <= TWIN_ROWS else OCTET if m <= OCTET else 2 * OCTET


def multiply(
    op: str,
    x: mx.array,
    weights: Quantized | mx.array,
    shape: tuple[int, ...],
    more: Mapping[str, mx.array],
    template: Mapping[str, object],
    n: int,
) -> mx.array:
    rows = rows_of_tile(x.shape[0])
    height = 32 if (n >= TALL or rows == 1) and rows not in (2, 3) else 16
    if isinstance(weights, mx.array):
        given = {"w": weights, "scales": weights, "biases": weights}
        form = {"T": x.dtype, "S": x.dtype, "BITS": 8 * x.dtype.size, "GROUP": 64, "KIND": PLAIN}
    else:
        given, form = arrays(weights, x.dtype), format_template(weights, x.dtype)
    return launch(
        op,
        {**given, "x": x, **more},
        {"y": (shape, x.dtype)},
        template={**form, "ROWS": rows, "HEIGHT": height, **template},
        grid=(32 * -(-x.shape[0] // rows), SLICES * -(-n // height), 1),
        group=(32, SLICES, 1),
    )[0]
