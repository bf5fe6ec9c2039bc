"""Add to the residual stream and norm the sum in one launch instead of two."""

from typing import Any

import mlx.core as mx

from ..kernels import add_norm
from .kernel_site import Site, rows_of


class Sum(Site):
    """Site of a residual sum whose kernel also computes the following norm, which may belong to the next layer.

    norm: the module of that norm.
    """

    op = "add_norm"
    stock_exact = True

    def __init__(self, norm: Any):
        self.norm, self.width = norm, norm.weight.size
        self.shape = f"{self.width} eps {norm.eps:g}"
        self.read: tuple[mx.array | None, mx.array | None] = (None, None)

    def __call__(self, x: mx.array, r: mx.array) -> mx.array:
        """Return x + r [..., H]; if the site is on for these rows, also keep the sum's norm for the norm module.

        The norm module uses it if its next call, before the next sum, is with the returned array itself.
        """
        if rows_of(x) not in self.rows:
            return x + r
        self.read = add_norm(x, r, self.norm.weight, self.norm.eps)
        return self.read[0]  # type: ignore[return-value]

    def normed(self, x: mx.array) -> mx.array | None:
        """Return the kept norm if x is the array of the last sum, else None; either way it is no longer kept."""
        (h, normed), self.read = self.read, (None, None)
        return normed if h is x else None

    def ours(self, x: mx.array) -> list[mx.array]:
        return list(add_norm(x, x[:, ::-1], self.norm.weight, self.norm.eps))

    def stock(self, x: mx.array) -> list[mx.array]:
        h = x + x[:, ::-1]
        return [h, mx.fast.rms_norm(h, self.norm.weight, self.norm.eps)]


class VerifyNorm:
    """Mixin for the norm of a Sum: returns the norm kept by the Sum if x is its last sum, else computes it."""

    sum: Sum

    def __call__(self: Any, x: mx.array) -> mx.array:
        normed = self.sum.normed(x)
        return super().__call__(x) if normed is None else normed  # type: ignore[misc]


class VerifyBlock:
    """Mixin for a decoder layer that computes h = x + mixer(norm(x)), then h + mlp(norm(h)), and nothing else.

    `after`: the sum whose norm belongs to the next layer or the model; None in an MTP head's block.
    """

    middle: Sum
    after: Sum | None

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        mixer = self["linear_attn" if getattr(self, "is_linear", False) else "self_attn"]
        h = self.middle(x, mixer(self["input_layernorm"](x), mask, cache))
        r = self["mlp"](self["post_attention_layernorm"](h))
        return h + r if self.after is None else self.after(h, r)
