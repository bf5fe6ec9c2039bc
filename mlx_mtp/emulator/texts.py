"""Collect the text that MLX would compile for each launch, without running it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import mlx.core as mx

from .kernel import MetalKernel, metal_kernel, replaced


class LaunchText(NamedTuple):
    """A kernel's name and its text after MLX's preamble: header, generated function, instantiation."""

    kernel: str
    text: str


class RecordedLaunch(NamedTuple):
    """A launch's text, the arguments of `mx.fast.metal_kernel`, and those of its result."""

    text: LaunchText
    kernel: dict[str, Any]
    call: dict[str, Any]

    @property
    def threads(self) -> int:
        """Number of threads in a threadgroup."""
        return math.prod(self.call["threadgroup"])


_recordings: list[list[RecordedLaunch]] = []  # entered `recorded` blocks, innermost last


class TextKernel(MetalKernel):
    """Replaces a kernel of `mx.fast.metal_kernel`: a launch records its text and returns zeros."""

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, object]] | None = None,
        **sizes: Any,
    ) -> list[mx.array]:
        """Record a launch in every open `recorded` block, and return zeros; arrays are not evaluated."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        named = [(str(name), value) for name, value in template or ()]
        text = LaunchText(self.name, self.text(self._signature(arrays, output_dtypes, named)))
        kernel = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        outputs = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        call = {"inputs": inputs, "template": named, **outputs, **sizes}
        for found in _recordings:
            found.append(RecordedLaunch(text, kernel, call))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]


def text_kernel(*arguments: Any, **options: Any) -> TextKernel:
    """Return a kernel whose launches are recorded; the arguments are those of `mx.fast.metal_kernel`."""
    made = metal_kernel(*arguments, **options)
    return TextKernel(**{f.name: getattr(made, f.name) for f in fields(made) if f.init})


@contextmanager
def recorded() -> Iterator[list[RecordedLaunch]]:
    """Yield a list to which every launch inside the block, or a nested one, is added in order.

    Outputs are zeros, nothing is compiled, and modules' kernels are recreated as in `replaced`.
    """
    found: list[RecordedLaunch] = []
    _recordings.append(found)
    try:
        with replaced(text_kernel):
            yield found
    finally:
        _recordings.pop()
