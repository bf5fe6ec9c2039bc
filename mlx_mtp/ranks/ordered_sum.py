"""Sum the ranks' parts in rank order, so that a row's bits do not depend on the number of rows.

A ring's `all_sum` adds in an order that depends on an element's index in the buffer. Gathering all parts moves the
same number of bytes between two ranks, and size / 2 times as many between more.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def ordered_sum(x: mx.array, group: Any) -> mx.array:
    """Return the sum of x over the ranks, added in float32 in rank order; it has x's shape and type, and is lazy."""
    first, *others = mx.distributed.all_gather(x[None], group=group)
    total = first.astype(mx.float32)
    for part in others:
        total = total + part.astype(mx.float32)
    return total.astype(x.dtype)


class SummedOverRanks:
    """Mixin that sums a module's outputs over the ranks of `ranks_group`."""

    ranks_group: Any

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return ordered_sum(super().__call__(*args, **options), self.ranks_group)  # type: ignore[misc]


class OrderedRMSNorm(nn.RMSNorm):
    """A norm of rows of which each rank of `group` has a part; their sums of squares are added in rank order."""

    group: Any

    def __call__(self, x: mx.array) -> mx.array:
        x32 = x.astype(mx.float32)
        squares = ordered_sum(x32.square().sum(axis=-1, keepdims=True), self.group)
        scale = mx.rsqrt(squares / (x.shape[-1] * self.group.size()) + self.eps)
        return (x32 * scale * self.weight).astype(x.dtype)


def sum_over(module: Any, group: Any) -> None:
    """Change a module in place (its class), so that it returns the sum of its outputs on all ranks of the group."""
    module.ranks_group = group
    module.__class__ = _summed(type(module))


def parts_alone(modules: Any) -> list[Any]:
    """Undo `sum_over` for those modules that it was applied to, and return these.

    The returned modules then compute this rank's part.
    """
    found = [module for module in modules if isinstance(module, SummedOverRanks)]
    for module in found:
        module.__class__ = type(module).__bases__[1]
    return found


@cache
def _summed(kind: type) -> type:
    """Return the subclass of a module class whose output is summed over the ranks."""
    return type(kind.__name__, (SummedOverRanks, kind), {})
