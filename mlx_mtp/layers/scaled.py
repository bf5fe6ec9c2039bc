"""Quantized layers whose output is multiplied by a scale of the weight tensor, as NVFP4's format requires.

`output_scale` is float32: [1], or one per output row [N]; of stacked experts [E] or [E, N]. Scaling the product
instead of the weights keeps the stored integers and group scales, and rounds once more.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..kernels import BLOCK_FORMATS, dequantized_blocks
from .expert_rows import NumberedRows

SCALE = "output_scale"


def widened(x: mx.array) -> mx.array:
    """Return x, but float16 as float32: products with weights before scaling exceed float16's range."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x


def finished(module: Any, y: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return a linear layer's output from its products y [..., N]: in `dtype`, times its output scale, plus its bias.

    Without a scale, y keeps its type.
    """
    if (scale := module.get(SCALE)) is not None:
        y = (y * scale).astype(dtype)
    return y if (bias := module.get("bias")) is None else y + bias


class ScaledLinear(nn.QuantizedLinear):
    """A quantized linear layer with an output scale, which is applied before the bias."""

    def __call__(self, x: mx.array) -> mx.array:
        form = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        parts = self["weight"], self["scales"], self.get("biases")
        return finished(self, mx.quantized_matmul(widened(x), *parts, transpose=True, **form), x.dtype)


class ScaledSwitchLinear(NumberedRows):
    """Stacked quantized experts with output scales, which are applied before the biases."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return outputs [*I, 1, N] of the experts `indices` [*I] for rows x [..., 1, K], broadcast to these."""
        y = super().__call__(widened(x), indices, sorted_indices)
        scale = self[SCALE][indices]
        scale = mx.expand_dims(scale, -2) if self[SCALE].ndim > 1 else scale[..., None, None]
        y = (y * scale).astype(x.dtype)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


SCALED = {nn.QuantizedLinear: ScaledLinear, QuantizedSwitchLinear: ScaledSwitchLinear}


def scale_outputs(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Give quantized linear layers and experts whose "<path>.output_scale" is in `weights` that parameter, of zeros.

    They become ScaledLinear or ScaledSwitchLinear in place, so that `weights` can be loaded.
    """
    for path, module in model.named_modules():
        found = weights.get(f"{path}.{SCALE}")
        if found is not None and (kind := SCALED.get(type(module))):
            module.__class__ = kind
            module[SCALE] = mx.zeros(found.shape)
            module.freeze()


def dequantized_weight(module: Any, dtype: mx.Dtype) -> mx.array:
    """Return a quantized module's weights: affine ones in their scales' type, others in `dtype`.

    NVFP4, MXFP4 and MXFP8 ones are multiplied by the output scale, if there is one.
    """
    if module.mode in BLOCK_FORMATS:
        return dequantized_blocks(module.weight, module.scales, module.mode).astype(dtype)
    form = module.group_size, module.bits, module.mode
    if module.mode == "affine":
        return mx.dequantize(module.weight, module.scales, module.biases, *form)
    weight = mx.dequantize(module.weight, module.scales, None, *form, dtype=mx.float32)
    if (scale := module.get(SCALE)) is not None:
        weight = weight * scale.reshape(*scale.shape, *[1] * (weight.ndim - scale.ndim))
    return weight.astype(dtype)
