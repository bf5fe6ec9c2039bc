"""Rotate rows of pictures to their positions on three axes, by the RoPE module that rotates text.

Each rotary frequency turns with one axis: t, y or x. Sources: `apply_interleaved_mrope` of transformers, Qwen2-VL
(arXiv 2409.12191), section 2.1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..cache.layer_cache import LayerCache


class ThreeAxes:
    """Mixin for RoPE modules: an offset of shape [3, L] contains the positions of L rows on three axes.

    sections: number of frequencies that turn with each axis. Frequency i turns with axis i % 3, for y and x only
    while i < 3 * sections[axis], else with t. plain: the class without three axes, by which `kernels.RopeArguments`
    and `shared_rope` recognise the rotation.
    """

    sections: tuple[int, ...]
    plain: type

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Return x rotated to `offset`: one that `plain` takes, or positions [3, L] for the rows of [1, heads, L, D].

        With such positions rows are rotated on the batch axis, so that a row with three equal positions has a text
        row's bits.
        """
        if getattr(offset, "ndim", 0) < 2:
            return super().__call__(x, offset=offset)  # type: ignore[misc]
        rows = x.swapaxes(0, 2)
        t, *others = (self(rows, offset=axis) for axis in offset)
        frequencies = np.arange(self.dims // 2)  # type: ignore[attr-defined]
        for axis, rotated in enumerate(others, 1):
            turns = (frequencies % 3 == axis) & (frequencies < 3 * self.sections[axis])
            mask = np.pad(np.tile(turns, 2), (0, x.shape[-1] - 2 * turns.size))
            t = mx.where(mx.array(mask), rotated, t)
        return t.swapaxes(0, 2)


@cache
def three_axes(kind: type, sections: tuple[int, ...]) -> type:
    """Return the subclass of `kind`, a class of RoPE modules, whose modules also take positions on three axes."""
    return type(kind.__name__, (ThreeAxes, kind), {"plain": kind, "sections": sections})


def add_axes(model: nn.Module, sections: tuple[int, ...]) -> None:
    """Let all modules `rope` of a model take positions on three axes, in place."""
    for _, module in model.named_modules():
        if (rope := module.get("rope")) is not None:
            assert not getattr(rope, "traditional", False), "three axes are implemented for rotated halves"
            rope.__class__ = three_axes(type(rope), sections)


class CacheAt:
    """A layer's cache with another `offset`, to which one call of mlx-lm's attention rotates the rows."""

    def __init__(self, cache: LayerCache, offset: Any):
        self._cache, self.offset = cache, offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class AxesAttention:
    """Mixin for mlx-lm's attention modules: rows are rotated to the `position` of this package's caches."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        position = getattr(cache, "position", None)
        if position is not None and position is not cache.offset:
            cache = CacheAt(cache, position)
        return super().__call__(x, mask, cache)  # type: ignore[misc]


def position_of(module: Any, cache: Any) -> Any:
    """Return what an attention module rotates a cache's next rows to: `position` in AxesAttention, else `offset`."""
    return cache.position if isinstance(module, AxesAttention) else cache.offset


@contextmanager
def on_axes(caches: Sequence[LayerCache], positions: mx.array | None) -> Iterator[None]:
    """Context in which rows that are read into caches have these positions, int32 [3, L]; None: those of text."""
    try:
        for c in caches:
            c.axes = positions
        yield
    finally:
        for c in caches:
            c.axes = None
