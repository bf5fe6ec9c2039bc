"""Port MiMo-7B: mlx-lm's backbone with one recycled MTP layer that reads [hidden, embedding].

Implementations disagree on whether the head reads the target's hidden state before or after the final norm. vLLM's
`mimo.py` returns it before the norm, the default here; SGLang reads it after. `mtp_overrides` switches.
Sources: vLLM `mimo_mtp.py`, the checkpoint's own `modeling_mimo.py` (MiMoMTPLayers).
"""

import mlx.nn as nn
from mlx_lm.models import mimo

from ..layers.mtp_spec import MTPSpec, pairs
from ..layers.port import BLOCK_TENSORS, Port

ModelArgs = mimo.ModelArgs


class Model(Port, mimo.Model):
    SPEC = MTPSpec(
        capture="pre",
        fuse="he",
        prefix=r"model\.mtp_layers\.(\d+)\.",
        numbered="zero",
        tensors=pairs("token_layernorm=enorm hidden_layernorm=hnorm input_proj=eh_proj final_layernorm=norm")
        + BLOCK_TENSORS,
    )
    MLP = (mimo.MLP,)
    ATTENTION = (mimo.Attention,)
    BLOCK = (mimo.TransformerBlock,)
    IGNORED = ("rotary_emb.inv_freq",)

    def head_block(self, depth: int) -> nn.Module:
        return mimo.TransformerBlock(self.args)
