"""Multiply by latent attention's quantized matrix per attention head, each row with the bits of a one-row call."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.mla import QuantizedMultiLinear

from ..kernels import Quantized, verify_qmm_heads
from .kernel_site import Site


class PerHead(Site):
    """The products of a `QuantizedMultiLinear`, [heads, N, K].

    `heads_first`: the order that what reads the products wants them in.
    """

    op = "verify_qmm_heads"  # for a single row, too: there MLX copies queries that are split from rotated ones

    def __init__(self, module: Any, *, heads_first: bool):
        self.module, self.heads_first = module, heads_first
        w = self.weights
        self.width = self.heads * w.k
        order = "heads first" if heads_first else "rows first"
        self.shape = f"{self.heads} heads x {w.ends[0]}x{w.k} {w.bits}-bit {w.mode} g{w.group_size} {order}"

    @property
    def weights(self) -> Quantized:
        """The weights that the module has now."""
        m = self.module
        return Quantized(m.weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode, (m.weight.shape[1],))

    @property
    def heads(self) -> int:
        return self.module.weight.shape[0]

    def product(self, x: mx.array) -> mx.array:
        """Multiply the first K values of x [1, L, heads, D]: [1, heads, L, N], in memory as it is wanted."""
        y = verify_qmm_heads(x, self.weights, heads_first=self.heads_first)
        return y if self.heads_first else y.swapaxes(1, 2)

    def ours(self, x: mx.array) -> list[mx.array]:
        return self._flat(self.product(x.reshape(1, len(x), self.heads, -1)))

    def stock(self, x: mx.array) -> list[mx.array]:
        heads = x.reshape(1, len(x), self.heads, -1).swapaxes(1, 2)
        return self._flat(QuantizedMultiLinear.__call__(self.module, heads))

    def _flat(self, y: mx.array) -> list[mx.array]:
        return [y.swapaxes(1, 2).reshape(y.shape[2], -1)]


class VerifyMultiLinear(QuantizedMultiLinear):
    """`QuantizedMultiLinear` with a site."""

    site: PerHead

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Multiply x [1, heads, L, K]: [1, heads, L, N]; without `transpose` the other way round."""
        heads = x.shape[1]
        if transpose and heads == self.site.heads and x.shape[2] in self.site.rows:
            return self.site.product(x.swapaxes(1, 2))
        return super().__call__(x, transpose)
