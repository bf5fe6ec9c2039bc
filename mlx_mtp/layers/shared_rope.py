"""Compute RoPE's angles once for all layers of a pass, on a CPU, where MLX computes them in every call anew.

The bits are those of `mx.fast.rope` where MLX has no kernel for it: halves a and b become a cos - b sin and
b cos + a sin. A GPU has a kernel.
"""

import math
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE


class Angles:
    """The factors of a row and of its halves in the other order, of the last positions asked for, by thread: arrays
    belong to one.

    Cosines, and sines that are negative for the first half, [L, dims]; of several texts [n, 1, L, dims].
    """

    def __init__(self, module: Any):
        self.dims, self.scale = module.dims, getattr(module, "scale", 1.0)
        self.base, self.freqs = getattr(module, "base", 0.0), getattr(module, "_freqs", None)
        self._last: dict[int, tuple] = {}

    def at(self, offset: Any, rows: int) -> tuple[mx.array, mx.array]:
        """Return the factors of `rows` positions from `offset`, an int or int32 [n]."""
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
    """Mixin in front of RoPE modules whose angles layers share; other types than float32 they rotate themselves."""

    _angles: Angles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate x [B, heads, L, D], its first `dims` of D."""
        if x.dtype != mx.float32 or x.ndim != 4:
            return super().__call__(x, offset=offset)  # type: ignore[misc]
        dims = self._angles.dims
        own, other = self._angles.at(offset, x.shape[2])
        x, *rest = mx.split(x, [dims], axis=-1) if dims < x.shape[3] else [x]
        a, b = mx.split(x, 2, axis=-1)
        rotated = x * own + mx.concatenate([b, a], axis=-1) * other
        return mx.concatenate([rotated, *rest], axis=-1) if rest else rotated


SHARED = {kind: type(kind.__name__, (SharedRope, kind), {"plain": kind}) for kind in (nn.RoPE, Llama3RoPE)}


def share_angles(model: nn.Module) -> None:
    """Let the layers of a model whose RoPE is alike compute its angles once."""
    known: dict[tuple, Angles] = {}
    for _, module in model.named_modules():
        rope = module.get("rope")
        if type(rope) not in SHARED or rope.traditional:
            continue
        angles = Angles(rope)
        freqs = None if angles.freqs is None else tuple(angles.freqs.tolist())
        rope._angles = known.setdefault((angles.dims, angles.scale, angles.base, freqs), angles)
        rope.__class__ = SHARED[type(rope)]
