"""Collect the text that MLX would compile for each launch, without running any."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from .kernel import MetalKernel, replaced


class LaunchText(NamedTuple):
    """A kernel's name, its text after MLX's preamble (header, function, instantiation), and a group's threads."""

    kernel: str
    text: str
    threads: int = 1


_collections: list[list[LaunchText]] = []  # of `collected`, the innermost last


class TextKernel(MetalKernel):
    """A stand-in for a kernel of `mx.fast.metal_kernel`: a launch collects its text and returns zeros."""

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        threadgroup: Sequence[int] = (1, 1, 1),
        template: Sequence[tuple[str, object]] | None = None,
        **_: Any,
    ) -> list[mx.array]:
        """Add the text of a launch with these arguments; arrays are not evaluated."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        named = [(str(name), value) for name, value in template or ()]
        text = LaunchText(self.name, self.text(self._signature(arrays, output_dtypes, named)), math.prod(threadgroup))
        for found in _collections:
            found.append(text)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]


def text_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    **_: Any,
) -> TextKernel:
    """Make a kernel whose launches are collected; the arguments are those of `mx.fast.metal_kernel`."""
    names = [str(n) for n in input_names], [str(n) for n in output_names]
    return TextKernel(name, *names, str(source), str(header), ensure_row_contiguous, atomic_outputs)


@contextmanager
def collected() -> Iterator[list[LaunchText]]:
    """Yield the list to which every launch inside adds its text; outputs are zeros, and nothing is compiled."""
    found: list[LaunchText] = []
    _collections.append(found)
    try:
        with replaced(text_kernel):
            yield found
    finally:
        _collections.pop()
