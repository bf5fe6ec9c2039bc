"""Port MiMo-V2-Flash: mlx-lm's backbone with three sliding-window depths that all read the target's hidden state.

The number of heads is counted from their tensors because config.json does not state it. Sources: SGLang
`mimo_v2_nextn.py` (post-norm hidden states for every depth), llama.cpp `mimo2.cpp` (before the norm), sglang-jax
PR 1256 (chaining the depths instead loses a third of the acceptance).
"""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models import mimo_v2_flash

from ..layers.mtp_spec import MTPSpec, pairs
from ..layers.port import BLOCK_TENSORS, NUMBERED_EXPERTS, SCALED_FP8, Port

UNSTATED = {
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": None,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


@dataclass
class ModelArgs(mimo_v2_flash.ModelArgs):
    """config.json's fields for `mimo_v2_flash`, with the names in the file."""

    @classmethod
    def respelled(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with the checkpoint's keys instead of transformers', and defaults for absent keys."""
        found = dict(config)
        kinds, sparse = found.pop("layer_types", None), found.pop("mlp_layer_types", None)
        if kinds:
            found.setdefault("hybrid_layer_pattern", [int(kind == "sliding_attention") for kind in kinds])
        if sparse:
            found.setdefault("moe_layer_freq", [int(kind == "sparse") for kind in sparse])
        window, size = found.get("sliding_window"), found.get("sliding_window_size")
        if window and size and window == size + 1:  # transformers adds the query's own position
            found["sliding_window_size"] = window
        sizes = {f"swa_{name}": found.get(name) for name in ("num_attention_heads", "head_dim", "v_head_dim")}
        if groups := found.get("num_key_value_heads"):
            sizes["swa_num_key_value_heads"] = 2 * groups
        return {**UNSTATED, **{name: size for name, size in sizes.items() if size}, **found}


class Model(Port, mimo_v2_flash.Model):
    SPEC = MTPSpec(
        topology="target_each",
        prefix=r"model\.mtp\.layers\.(\d+)\.",
        numbered="zero",
        tensors=pairs("enorm hnorm eh_proj final_layernorm=norm pre_mlp_layernorm=block.post_attention_layernorm")
        + BLOCK_TENSORS,
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
