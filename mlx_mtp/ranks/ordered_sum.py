"""Sum what the ranks have computed in the order of ranks, so that a row's bits depend on that row alone.

A ring's `all_sum` adds in an order that depends on an element's place in the buffer, and so on how many rows there
are. Gathering all parts moves as many bytes between two ranks, and size / 2 times as many between more.
"""

from functools import cache
from typing import Any

import mlx.core as mx


def ordered_sum(x: mx.array, group: Any) -> mx.array:
    """Sum x [...] over the ranks, in float32: [...], of x's type and the same bits on every rank."""
    first, *others = mx.distributed.all_gather(x[None], group=group)
    total = first.astype(mx.float32)
    for part in others:
        total = total + part.astype(mx.float32)
    return total.astype(x.dtype)


class SummedOverRanks:
    """Mixin in front of a module of which each rank computes a part, in the `ranks_group`."""

    ranks_group: Any

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return ordered_sum(super().__call__(*args, **options), self.ranks_group)  # type: ignore[misc]


def sum_over(module: Any, group: Any) -> None:
    """Let a module return the sum of what it computes on all ranks."""
    module.ranks_group = group
    module.__class__ = _summed(type(module))


def parts_alone(modules: Any) -> list[Any]:
    """Let modules return their parts again, without a sum; returns those that did not."""
    found = [module for module in modules if isinstance(module, SummedOverRanks)]
    for module in found:
        module.__class__ = type(module).__bases__[1]
    return found


@cache
def _summed(kind: type) -> type:
    """Make one class for all modules of a kind."""
    return type(kind.__name__, (SummedOverRanks, kind), {})
