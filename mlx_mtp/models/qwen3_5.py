"""Port Qwen3.5, 3.6, 3.8: mlx-lm's hybrid of gated-delta and full-attention layers, with one recycled MTP layer.

The head is a full-attention layer under `mtp.` that shares the target's embedding and LM head. It reads hidden states
after the final norm: 80% were accepted, against 75% before the norm (vllm-mlx issue 660, LightLLM PR 1402).
Sources: vLLM `qwen3_5_mtp.py`, SGLang `qwen3_5_mtp.py`.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP, Qwen3NextSparseMoeBlock

from ..cache.layer_cache import CacheKind
from ..cache.recurrent import RecurrentCache
from ..layers.gated_delta import GatedDelta
from ..layers.mtp_spec import MTPSpec, pairs
from ..layers.port import FUSED_EXPERTS, Port, Renaming
from ..layers.three_axes import AxesAttention

QWEN_MTP = MTPSpec(
    prefix=r"(?:(?:model\.|language_model\.)*mtp\.)?",  # heads published on their own have no prefix
    numbered="zero",
    tensors=pairs("fc=eh_proj pre_fc_norm_embedding=enorm pre_fc_norm_hidden=hnorm norm layers.0=block"),
)


@dataclass
class ModelArgs(qwen3_5.ModelArgs):
    """config.json's fields for `qwen3_5`; `text` has those of its `text_config`."""

    def __post_init__(self):
        self.text = text = qwen3_5.TextModelArgs.from_dict(self.text_config)
        self.num_hidden_layers, self.vocab_size = text.num_hidden_layers, text.vocab_size
        self.tie_word_embeddings = text.tie_word_embeddings

    @property
    def head_dim(self) -> int:
        return self.text.head_dim or self.text.hidden_size // self.text.num_attention_heads


class GatedDeltaNet(GatedDelta, qwen3_5.GatedDeltaNet):
    """mlx-lm's gated-delta layer with a cache that can roll back rejected tokens."""


class Attention(AxesAttention, Qwen3NextAttention):
    """mlx-lm's attention, but RoPE uses the cache's `position`, which pictures can make different from `offset`."""


class Model(Port, qwen3_5.Model):
    SPEC = QWEN_MTP
    OURS = (GatedDeltaNet, Attention)
    MLP = (Qwen3NextMLP,)
    ATTENTION = (Attention,)
    MOE = (Qwen3NextSparseMoeBlock,)
    BLOCK = (qwen3_5.DecoderLayer,)
    IGNORED = ("model.visual.", "visual.", "vision_tower.")
    IMPLIED = (("attn_output_gate", True),)
    ZERO_CENTRED = (r"^model\.language_model\.|\.experts\.gate_up_proj$", r"^language_model\.model\.|\.switch_mlp\.")
    RENAMED = (
        *FUSED_EXPERTS,
        Renaming(r"^model\.language_model\.", ("language_model.model.",)),
        Renaming(r"^(?!language_model\.|mtp\.\d)", ("language_model.",)),
    )

    def head_block(self, depth: int) -> nn.Module:
        return qwen3_5.DecoderLayer(self.args.text, self.args.text.full_attention_interval - 1)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(self.args.text.rope_parameters.get("mrope_section", (11, 11, 10)))

    @property
    def language(self) -> Any:
        return self.language_model

    def shard(self, group: Any = None) -> None:
        """Split the layers over a group's ranks as mlx-lm does, but keep the LM head whole, as in other families."""
        inner = self.language_model
        text = inner.args
        inner.args = replace(text, tie_word_embeddings=True)
        super().shard(group)
        inner.args = text

    def windows(self) -> list[CacheKind]:
        return [RecurrentCache if layer.is_linear else None for layer in self.layers]

    def one_layer(self) -> Any:
        inner: Any = SimpleNamespace(args=replace(self.args.text, num_hidden_layers=1))
        inner.sanitize = partial(qwen3_5.TextModel.sanitize, inner)
        return SimpleNamespace(language_model=inner)
