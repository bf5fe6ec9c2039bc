"""Dequantize heads on a CPU, where MLX multiplies with float32 matrices faster than with quantized ones."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import dequantize_model

from ..layers.blocks import Blocks
from ..layers.scaled import SCALE
from .report import DRAFTING, drafting_bytes

LEAST = 1 << 20  # bytes of heads; products of smaller ones take little time
QUANTIZED = nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear


def expand_heads(model: Any) -> None:
    """Dequantize a model's MTP heads if the default device is a CPU and the target is float32 and not quantized.

    MLX's CPU computes a product with a quantized matrix row by row: one row of a head for SmolLM2 in 8 bits takes 4.0
    ms of CPU time and three rows 11.6 ms, in float32 1.5 and 2.7 ms. The report gets the new number of bytes. Heads
    are not changed if they are not quantized, have fewer than LEAST bytes, or have a `foreign` module.
    """
    if mx.default_device() != mx.cpu or drafting_bytes(model) < LEAST or model.no_hidden().dtype != mx.float32:
        return
    drafting = [module for head in model.mtp for module in head.modules()]
    target = [module for path, module in model.named_modules() if not path.startswith(DRAFTING)]
    if any(map(foreign, drafting)) or not _quantized(drafting) or _quantized(target):
        return
    for head in model.mtp:
        dequantize_model(head).set_dtype(mx.float32)  # some formats are dequantized to 16 bits
        mx.eval(head.parameters())
    stored = model.report.head_quantization
    model.runtime.note(
        head_bytes=drafting_bytes(model), head_quantization=f"{stored}, expanded to float32 for the CPU"
    )


def foreign(module: nn.Module) -> bool:
    """Return whether `dequantize_model` cannot read a module's format: tensor-wide scales, GGUF's blocks."""
    return SCALE in module or isinstance(module, Blocks)


def _quantized(modules: list[nn.Module]) -> bool:
    return any(isinstance(module, QUANTIZED) for module in modules)
