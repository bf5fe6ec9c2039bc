"""Port DeepSeek-V3, R1 and V3-shaped derivatives: mlx-lm's backbone with one recycled MTP layer.

The head is checkpoint layer num_hidden_layers. The hub's block-wise fp8 weights are dequantized in trunk and head.
Sources: DeepSeek-V3 technical report (arXiv 2412.19437), vLLM `deepseek_mtp.py`, SGLang `deepseek_nextn.py`.
"""

from mlx_lm.models import deepseek_v3

from ..layers.mla import AbsorbedMLA, MLAPort

ModelArgs = deepseek_v3.ModelArgs


class Attention(AbsorbedMLA, deepseek_v3.DeepseekV3Attention):
    """MLA; a few rows, as in a verify, use absorbed projections, and more rows mlx-lm's own forward pass."""


class Model(MLAPort, deepseek_v3.Model):
    MLP = (deepseek_v3.DeepseekV3MLP,)
    ROUTER = (deepseek_v3.MoEGate,)
    MOE = (deepseek_v3.DeepseekV3MoE,)
    BLOCK = (deepseek_v3.DeepseekV3DecoderLayer,)
    OURS = (Attention,)
