"""Compute RoPE's angles on a CPU once per pass for all layers, where MLX computes them in every call.

The bits are those of `mx.fast.rope` without a kernel: halves a and b become a cos - b sin and b cos + a sin. On a GPU
MLX has a kernel.
"""

import math
import threading
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE


class Angles:
    """Cosines and signed sines of positions; those requested last are kept, for the thread that requested them.

    Shapes [L, dims], or [n, 1, L, dims] for several sequences. Sines of the first half are negative: they multiply
    the row with its halves swapped.
    """

    def __init__(self, module: Any):
        self.dims, self.scale = module.dims, getattr(module, "scale", 1.0)
        self.base, self.freqs = getattr(module, "base", 0.0), getattr(module, "_freqs", None)
        self._last: dict[int, tuple] = {}

    def at(self, offset: Any, rows: int) -> tuple[mx.array, mx.array]:
        """Return cosines and signed sines of `rows` positions from `offset` on, an int or int32 [n]."""
        thread = threading.get_ident()
        known, n, found = self._last.get(thread, (None, 0, None))
        same = known == offset if isinstance(known, int) and isinstance(offset, int) else known is offset
        if found is None or n != rows or not same:
            first = offset if isinstance(offset, int) or offset.size == 1 else offset[:, None, None]
            theta = ((mx.arange(rows, dtype=mx.float32) + first) * self.scale)[..., None] * self._inverse()
            cos, sin = mx.cos(theta), mx.sin(theta)
            found = mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
            self._last = {thread: (offset, rows, found)}
        return found

    def _inverse(self) -> mx.array:
        if self.freqs is not None:
            return mx.reciprocal(self.freqs)
        half = self.dims // 2
        return mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(self.base) / half))


class SharedRope:
    """Mixin for RoPE modules with shared angles.

    For x that is not float32 or not of 4 axes, and for an offset of more than one axis, the module's own rotation is
    used.
    """

    _angles: Angles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate x [B, heads, L, D], its first `dims` of D."""
        if x.dtype != mx.float32 or x.ndim != 4 or getattr(offset, "ndim", 0) > 1:
            return super().__call__(x, offset=offset)  # type: ignore[misc]
        dims = self._angles.dims
        own, other = self._angles.at(offset, x.shape[2])
        x, *rest = mx.split(x, [dims], axis=-1) if dims < x.shape[3] else [x]
        a, b = mx.split(x, 2, axis=-1)
        rotated = x * own + mx.concatenate([b, a], axis=-1) * other
        return mx.concatenate([rotated, *rest], axis=-1) if rest else rotated


KINDS = nn.RoPE, Llama3RoPE


@cache
def _sharing(kind: type, plain: type) -> type:
    """Return the class of RoPE modules of `kind`, which is `plain` or a subclass of it, with shared angles."""
    return type(kind.__name__, (SharedRope, kind), {"plain": plain})


def share_angles(model: nn.Module) -> None:
    """Share angles among a model's modules `rope` with equal parameters, in place.

    Only modules of a class in KINDS, or of `three_axes` of one, change; traditional ones, which rotate neighbouring
    features, do not.
    """
    known: dict[tuple, Angles] = {}
    for _, module in model.named_modules():
        rope = module.get("rope")
        plain = getattr(rope, "plain", type(rope))
        if plain not in KINDS or isinstance(rope, SharedRope) or rope.traditional:
            continue
        angles = Angles(rope)
        freqs = None if angles.freqs is None else tuple(angles.freqs.tolist())
        rope._angles = known.setdefault((angles.dims, angles.scale, angles.base, freqs), angles)
        rope.__class__ = _sharing(type(rope), plain)
