"""Run mlx-lm's mixtures of experts with fewer operations, and several texts with the bits that each has alone.

Left to itself MLX counts anew, in each product with chosen experts, the rows that it reads; told which these are, it
has three operations less in each of a layer's three products, one of them a launch, and the same bits.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchMLP

SORTED = 64  # choices from which on mlx-lm's modules sort the rows of all texts by expert, for other kernels


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


class InPieces:
    """Mixin in front of a mixture of experts: x [n, L, H] of n texts and their choices [n, L, top_k].

    It runs texts in pieces where they would be sorted together, by kernels whose bits are not those of a text alone.
    """

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        n = len(x)
        if n == 1 or indices.size < SORTED or indices.ndim < 3:
            return super().__call__(x, indices)  # type: ignore[misc]
        texts = max(1, (SORTED - 1) * n // indices.size)  # as many as are not sorted, or one, which is as it is alone
        pieces = [slice(i, i + texts) for i in range(0, n, texts)]
        return mx.concatenate([super(InPieces, self).__call__(x[p], indices[p]) for p in pieces])  # type: ignore[misc]


CUT = {kind: type(kind.__name__, (InPieces, kind), {}) for kind in (SwitchGLU, SwitchMLP)}


def cut_experts(model: nn.Module) -> None:
    """Let a model's mixtures of experts run several texts in pieces."""
    for module in model.modules():
        if type(module) in CUT:
            module.__class__ = CUT[type(module)]
