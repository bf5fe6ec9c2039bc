"""Compute DoRA layers with their norms computed once, on linear layers with or without quantized weights."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear

from .adapters import shape_of
from .scaled import dequantized_weight


class DoRA(nn.Module):
    """mlx-lm's `DoRALinear`: W x + scale * (x A) B, times m / |W + scale * A B| per output, plus the bias of W.

    m: the magnitudes [N]; `finish` divides them by the norms. The product with W is the linear layer's own, so that
    quantized weights stay quantized.
    """

    def __init__(self, layer: DoRALinear):
        super().__init__()
        self.linear, self.scale = layer.linear, layer.scale
        size, width = shape_of(self.linear)
        rank = layer.lora_b.shape[0]
        self.lora_a, self.lora_b = mx.zeros((width, rank)), mx.zeros((rank, size))
        self.m = mx.linalg.norm(weight_of(self.linear), axis=1)

    def finish(self) -> None:
        """Divide the magnitudes by the norms of the adapted weights, once all tensors are loaded."""
        weight = weight_of(self.linear)
        a, b, m = (array.astype(mx.float32) for array in (self.lora_a, self.lora_b, self.m))
        self.m = m / mx.linalg.norm(weight + self.scale * (a @ b).T, axis=1)
        mx.eval(self.m)  # now, as the weights in float32 are large

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x) + (self.scale * ((x @ self.lora_a) @ self.lora_b)).astype(x.dtype)
        y = self.m * y
        if "bias" in self.linear:
            y = y + (1 - self.m) * self.linear.bias
        return y.astype(x.dtype)


def weight_of(linear: Any) -> mx.array:
    """Return the weights of a linear layer in float32, dequantized if they are quantized."""
    if "scales" not in linear:
        return linear.weight.astype(mx.float32)
    return dequantized_weight(linear, mx.float32).astype(mx.float32)
