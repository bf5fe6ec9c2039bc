"""Run mlx-lm's mixtures of experts with fewer operations, and with the bits that each sequence has alone.

By default MLX computes the indices of the rows to read in every product with chosen experts. Passing them saves three
operations, one of them a launch, in each of a layer's three products; the bits are the same.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchMLP

SORTED = 64  # number of choices from which mlx-lm sorts all sequences' rows by expert, which uses other kernels


@functools.lru_cache(maxsize=256)
def row_numbers(x: tuple[int, ...], chosen: tuple[int, ...]) -> mx.array:
    """Return the row indices of an array of shape `x`, which is (..., 1, K), broadcast to shape `chosen`, uint32.

    The array is constant, not the result of an operation, so that any thread can use it.
    """
    rows = x[:-2]
    numbers = np.arange(np.prod(rows), dtype=np.uint32).reshape(rows)
    return mx.array(np.ascontiguousarray(np.broadcast_to(numbers, chosen)))


class NumberedRows(QuantizedSwitchLinear):
    """`QuantizedSwitchLinear` without `bias` that passes row indices to MLX."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Multiply rows x [..., 1, K] by the matrices of `indices` [...]: [..., 1, N].

        sorted_indices: whether `indices` ascend; row indices are then not passed.
        """
        return mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            # Given row indices, MLX would not use its kernel for sorted rows.
            lhs_indices=None if sorted_indices else row_numbers(x.shape, indices.shape),
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=self.global_scale,
            sorted_indices=sorted_indices,
        )


def number_rows(modules: Sequence[nn.Module]) -> None:
    """Turn each `QuantizedSwitchLinear` without `bias` into `NumberedRows`, in place."""
    for module in modules:
        if type(module) is QuantizedSwitchLinear and "bias" not in module:
            module.__class__ = NumberedRows


class InPieces:
    """Mixin for a mixture of experts: x [n, L, H] of n sequences and their choices [n, L, top_k].

    It splits the batch of several sequences where mlx-lm would sort its rows, because the kernels for sorted rows
    have other bits than a single sequence gets.
    """

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        n = len(x)
        if n == 1 or indices.size < SORTED or indices.ndim < 3:
            return super().__call__(x, indices)  # type: ignore[misc]
        size = max(1, (SORTED - 1) * n // indices.size)  # the maximum without sorting, at least one sequence
        pieces = [slice(i, i + size) for i in range(0, n, size)]
        return mx.concatenate([super(InPieces, self).__call__(x[p], indices[p]) for p in pieces])  # type: ignore[misc]


CUT = {kind: type(kind.__name__, (InPieces, kind), {}) for kind in (SwitchGLU, SwitchMLP)}


def cut_experts(model: nn.Module) -> None:
    """Add `InPieces` to each SwitchGLU and SwitchMLP of a model, not to their subclasses, in place."""
    for module in model.modules():
        if type(module) in CUT:
            module.__class__ = CUT[type(module)]
