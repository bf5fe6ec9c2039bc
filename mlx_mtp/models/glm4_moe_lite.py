"""Port GLM-4.7-Flash: mlx-lm's backbone (MLA and experts) with one recycled MTP layer.

The head is checkpoint layer num_hidden_layers, with an embedding and an LM head of its own that need not equal the
target's. Sources: SGLang `glm4_moe_lite_nextn.py`, llama.cpp PR 24868 (recycles after the norm).
"""

from mlx_lm.models import glm4_moe_lite

from ..layers.mla import AbsorbedMLA, MLAPort

ModelArgs = glm4_moe_lite.ModelArgs


class Attention(AbsorbedMLA, glm4_moe_lite.Glm4MoeLiteAttention):
    """MLA; a few rows, as in a verify, use absorbed projections, and more rows mlx-lm's own forward pass."""


class Model(MLAPort, glm4_moe_lite.Model):
    MLP = (glm4_moe_lite.Glm4MoeLiteMLP,)
    ROUTER = (glm4_moe_lite.MoEGate,)
    MOE = (glm4_moe_lite.Glm4MoeLiteMoE,)
    BLOCK = (glm4_moe_lite.Glm4MoeLiteDecoderLayer,)
    OURS = (Attention,)
