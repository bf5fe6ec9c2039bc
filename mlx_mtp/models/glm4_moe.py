"""Port GLM-4.5, 4.5-Air, 4.6, 4.7: mlx-lm's backbone with one recycled MTP layer.

The head is checkpoint layer num_hidden_layers, in the shards or (4.6) in `mtp.safetensors`; 4.5 repeats the target's
embedding and LM head in it, 4.6 does not. Sources: SGLang `glm4_moe_nextn.py`, vLLM `glm4_moe_mtp.py`, llama.cpp
PR 26534 (recycles after the norm).
"""

from mlx_lm.models import glm4_moe

from ..layers.port import NEXTN, NUMBERED_EXPERTS, Port

ModelArgs = glm4_moe.ModelArgs


class Model(Port, glm4_moe.Model):
    SPEC = NEXTN
    MLP = (glm4_moe.MLP,)
    ROUTER = (glm4_moe.MoEGate,)
    ATTENTION = (glm4_moe.Attention,)
    MOE = (glm4_moe.MoE,)
    BLOCK = (glm4_moe.DecoderLayer,)
    RENAMED = (NUMBERED_EXPERTS,)
