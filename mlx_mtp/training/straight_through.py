"""Train weights that will be quantized to few bits: compute with rounded weights, update the exact ones."""

from functools import cache
from typing import Any

import mlx.core as mx


@cache
def rounded(kind: type) -> type:
    """Return a subclass of the linear layer's class `kind` that computes with its weight quantized and dequantized.

    `_format`, set on each layer, has the group_size, bits and mode. The weight itself stays exact, and its gradient
    is that of the rounded weight (Bengio et al., arXiv 1308.3432). Equal kinds return the same class.
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
