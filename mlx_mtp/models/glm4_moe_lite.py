"""GLM-4.7-Flash: mlx-lm's backbone (MLA and experts) with one recycled MTP layer.

The head is checkpoint layer num_hidden_layers, with an embedding and an LM head of its own that need not equal the
target's. Sources: SGLang `glm4_moe_lite_nextn.py`, llama.cpp PR 24868 (recycles after the norm).
"""

from functools import partial

import mlx.nn as nn
from mlx_lm.models import glm4_moe_lite
from mlx_lm.models.glm4_moe_lite import ModelArgs

from ..layers.mla import AbsorbedMLA
from ..layers.port import MLA_KV_B, NEXTN, NUMBERED_EXPERTS, SCALED_FP8, Port
from ..spec import MTPSpec

__all__ = ["Model", "ModelArgs"]


class Attention(AbsorbedMLA, glm4_moe_lite.Glm4MoeLiteAttention):
    """Absorbed for one row and for the few of a verify."""


class Model(Port, glm4_moe_lite.Model):
    """The port; see the contract in `mlx_mtp.models`."""

    SPEC = NEXTN
    BASE = glm4_moe_lite.Model
    IGNORED = ("rotary_emb.inv_freq",)
    RENAMED = (NUMBERED_EXPERTS, MLA_KV_B, SCALED_FP8)
    MASK_ARRAY = True
    NO_KV_BITS = "multi-head latent attention"

    def __init__(self, args: ModelArgs, heads: int = 0, spec: MTPSpec = SPEC):
        super().__init__(args)
        layers = [glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, args.num_hidden_layers + k) for k in range(heads)]
        self.add_heads(spec, layers, partial(nn.RMSNorm, eps=args.rms_norm_eps), args.hidden_size)
        for layer in [*self.model.layers, *layers]:
            layer.self_attn = Attention(args)
