"""Port MiMo-V2-Flash: mlx-lm's backbone with three sliding-window depths that all read the target's hidden state.

The checkpoint's config.json has no number of heads; they are counted by their tensors. Sources: SGLang
`mimo_v2_nextn.py` (post-norm hidden states for every depth), llama.cpp `mimo2.cpp` (before the norm), sglang-jax
PR 1256 (chaining the depths instead loses a third of the acceptance).
"""

import mlx.nn as nn
from mlx_lm.models import mimo_v2_flash

from ..layers.mtp_spec import MTPSpec
from ..layers.port import BLOCK_TENSORS, NUMBERED_EXPERTS, SCALED_FP8, Port

ModelArgs = mimo_v2_flash.ModelArgs


class Model(Port, mimo_v2_flash.Model):
    SPEC = MTPSpec(
        topology="target_each",
        prefix=r"model\.mtp\.layers\.(\d+)\.",
        numbered="zero",
        tensors=(
            *((n, n) for n in ("enorm", "hnorm", "eh_proj")),
            ("final_layernorm", "norm"),
            ("pre_mlp_layernorm", "block.post_attention_layernorm"),
            *BLOCK_TENSORS,
        ),
    )
    MLP = (mimo_v2_flash.MLP,)
    ROUTER = (mimo_v2_flash.MoEGate,)
    ATTENTION = (mimo_v2_flash.Attention,)
    MOE = (mimo_v2_flash.MoE,)
    BLOCK = (mimo_v2_flash.DecoderLayer,)
    RENAMED = (NUMBERED_EXPERTS, SCALED_FP8)
    NO_KV_BITS = "attention sinks"

    def __init__(self, args: ModelArgs, heads: int = 0, spec: MTPSpec | None = None):
        super().__init__(args, heads, spec)
        for head in self.mtp:
            head.window = args.sliding_window_size

    def head_block(self, depth: int) -> nn.Module:
        return mimo_v2_flash.DecoderLayer(self.args, is_moe=False, is_sliding_window=True)

    def windows(self) -> list[int | str | None]:
        return [self.args.sliding_window_size if layer.is_sliding_window else None for layer in self.layers]
