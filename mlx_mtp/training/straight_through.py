"""Train weights that will be quantized to few bits: forward with rounded weights, gradients as if they were exact."""

from functools import cache
from typing import Any

import mlx.core as mx


@cache
def rounded(kind: type) -> type:
    """Return the subclass of a linear layer's class whose calls use the weight rounded to `_format`.

    The gradient of the rounded weight is passed on to the exact one (Bengio et al., arXiv 1308.3432).
    """

    def call(self: Any, x: mx.array) -> mx.array:
        exact = self.weight
        near = mx.dequantize(*mx.quantize(mx.stop_gradient(exact), **self._format), **self._format)
        self.weight = exact + mx.stop_gradient(near.astype(exact.dtype) - exact)
        try:
            return kind.__call__(self, x)
        finally:
            self.weight = exact

    return type(f"Rounded{kind.__name__}", (kind,), {"__call__": call})
