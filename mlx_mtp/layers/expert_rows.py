"""Tell MLX which rows a product with chosen experts reads: left to itself it counts them anew in each product.

Rows and experts are the same, so are the bits; three operations less in each of a layer's three products, of which
one is a launch.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear


@functools.lru_cache(maxsize=256)
def row_numbers(x: tuple[int, ...], chosen: tuple[int, ...]) -> mx.array:
    """Number the rows of an x of this shape, [..., 1, K], each as often as it is `chosen`: uint32 of that shape.

    Of values, not of an operation, so that any thread can use it.
    """
    rows = x[:-2]
    numbers = np.arange(np.prod(rows), dtype=np.uint32).reshape(rows)
    return mx.array(np.ascontiguousarray(np.broadcast_to(numbers, chosen)))


class NumberedRows(QuantizedSwitchLinear):
    """`QuantizedSwitchLinear`, without biases of its own, that numbers the rows it reads."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Multiply rows x [..., 1, K] by the matrices of `indices` [...]: [..., 1, N]."""
        if sorted_indices:  # with numbers MLX would not take its kernel for sorted ones
            return super().__call__(x, indices, sorted_indices)
        return mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            lhs_indices=row_numbers(x.shape, indices.shape),
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=self.global_scale,
        )


def number_rows(modules: Sequence[nn.Module]) -> None:
    """Let those of the modules that multiply by chosen experts number the rows."""
    for module in modules:
        if type(module) is QuantizedSwitchLinear and "bias" not in module:
            module.__class__ = NumberedRows
