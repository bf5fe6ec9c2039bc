"""Port DeepSeek-V3.2: mlx-lm's backbone (MLA with an indexer, and experts) with one recycled MTP layer.

The head is checkpoint layer num_hidden_layers and has its own indexer. Sources: DeepSeek-V3.2 (arXiv 2512.02556),
vLLM `deepseek_mtp.py`, llama.cpp `deepseek32.cpp`.
"""

from mlx_lm.models import deepseek_v32

from ..layers.mla import MLAPort
from ..layers.sparse_mla import SparseMLA

ModelArgs = deepseek_v32.ModelArgs


class Attention(SparseMLA, deepseek_v32.DeepseekV32Attention):
    """MLA over the positions that the indexer selects for each row, absorbed for the few rows of a verify."""


class Model(MLAPort, deepseek_v32.Model):
    MLP = (deepseek_v32.DeepseekV32MLP,)
    ROUTER = (deepseek_v32.MoEGate,)
    MOE = (deepseek_v32.DeepseekV32MoE,)
    BLOCK = (deepseek_v32.DeepseekV32DecoderLayer,)
    OURS = (Attention,)
    IMPLIED = (("rope_interleave", True),)
