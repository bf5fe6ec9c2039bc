"""Multiply a verify's few rows by unquantized weights, each row with the bits of a one-row call."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import verify_gemv
from .kernel_site import VERIFY_ROWS, Site, rows_of


class Dense(Site):
    """The product of an unquantized module: a linear, an embedding as LM head, or a router."""

    op = "verify_gemv"
    candidates = tuple(VERIFY_ROWS)

    def __init__(self, module: Any):
        self.module = module
        n, self.width = module.weight.shape
        dtype = str(module.weight.dtype).rpartition(".")[2]
        self.shape = f"{n}x{self.width} {dtype}" + (" with bias" if "bias" in module else "")

    def ours(self, x: mx.array) -> list[mx.array]:
        return [verify_gemv(x, self.module.weight, self.module.get("bias"))]

    def stock(self, x: mx.array) -> list[mx.array]:
        if "bias" in self.module:
            return [mx.addmm(self.module.bias, x, self.module.weight.T)]
        return [x @ self.module.weight.T]


class VerifyDense(nn.Linear):
    """`nn.Linear` with a site."""

    site: Dense

    def __call__(self, x: mx.array) -> mx.array:
        return self.site.ours(x)[0] if rows_of(x) in self.site.rows else super().__call__(x)


class VerifyDenseEmbedding(nn.Embedding):
    """`nn.Embedding` that is the LM head, too, with a site."""

    site: Dense

    def as_linear(self, x: mx.array) -> mx.array:
        return self.site.ours(x)[0] if rows_of(x) in self.site.rows else super().as_linear(x)


class _Rows:
    """Stands for x in a router's `x @ weight.T`."""

    def __init__(self, x: mx.array):
        self.x = x

    def __matmul__(self, w: mx.array) -> mx.array:
        return verify_gemv(self.x, w.T)


class VerifyRouter:
    """Mixin in front of a router that is a selection from `x @ weight.T` and uses x for nothing else."""

    site: Dense

    def __call__(self: Any, x: mx.array) -> Any:
        return super().__call__(_Rows(x) if rows_of(x) in self.site.rows else x)  # type: ignore[misc]
