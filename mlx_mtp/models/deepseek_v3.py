"""DeepSeek-V3, R1 (and V3-shaped derivatives): mlx-lm's backbone with one recycled MTP layer.

The head is checkpoint layer num_hidden_layers. The hub's fp8 weights are dequantized by blocks, in the head as in the
trunk. Sources: DeepSeek-V3 technical report (arXiv 2412.19437), vLLM `deepseek_mtp.py`, SGLang `deepseek_nextn.py`.
"""

from functools import partial

import mlx.nn as nn
from mlx_lm.models import deepseek_v3
from mlx_lm.models.deepseek_v3 import ModelArgs

from ..layers.mla import AbsorbedMLA
from ..layers.port import MLA_KV_B, NEXTN, NUMBERED_EXPERTS, SCALED_FP8, Port
from ..spec import MTPSpec

__all__ = ["Model", "ModelArgs"]


class Attention(AbsorbedMLA, deepseek_v3.DeepseekV3Attention):
    """Absorbed for one row and for the few of a verify."""


class Model(Port, deepseek_v3.Model):
    """The port; see the contract in `mlx_mtp.models`."""

    SPEC = NEXTN
    BASE = deepseek_v3.Model
    IGNORED = ("rotary_emb.inv_freq",)
    RENAMED = (NUMBERED_EXPERTS, MLA_KV_B, SCALED_FP8)
    MASK_ARRAY = True
    NO_KV_BITS = "multi-head latent attention"

    def __init__(self, args: ModelArgs, heads: int = 0, spec: MTPSpec = SPEC):
        super().__init__(args)
        layers = [deepseek_v3.DeepseekV3DecoderLayer(args, args.num_hidden_layers + k) for k in range(heads)]
        self.add_heads(spec, layers, partial(nn.RMSNorm, eps=args.rms_norm_eps), args.hidden_size)
        for layer in [*self.model.layers, *layers]:
            layer.self_attn = Attention(args)
