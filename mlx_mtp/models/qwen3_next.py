"""Port Qwen3-Next: mlx-lm's hybrid of gated-delta and full-attention layers, with experts and one recycled MTP layer.

Sources: vLLM `qwen3_next_mtp.py`, SGLang `qwen3_next_mtp.py`.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next

from ..cache.layer_cache import CacheKind
from ..cache.recurrent import RecurrentCache
from ..layers.gated_delta import GatedDelta
from ..layers.port import NUMBERED_EXPERTS, Port
from .qwen3_5 import QWEN_MTP

ModelArgs = qwen3_next.ModelArgs


class GatedDeltaNet(GatedDelta, qwen3_next.Qwen3NextGatedDeltaNet):
    """mlx-lm's gated-delta layer, whose projections are fused by key head, with a cache that can roll back tokens."""

    def inputs(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return mx.concatenate([t.reshape(*x.shape[:2], -1) for t in (q, k, v)], axis=-1), z, b, a

    def grouped(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        products = self.in_proj_qkvz(x), self.in_proj_ba(x)
        qkvz, ba = (mx.unflatten(y, 2, (self.num_k_heads, -1)) for y in products)
        qkv, z = mx.split(qkvz, [self.conv_dim // self.num_k_heads], axis=-1)
        b, a = mx.split(ba, 2, axis=-1)
        return qkv, z, b, a


class Model(Port, qwen3_next.Model):
    SPEC = QWEN_MTP
    OURS = (GatedDeltaNet,)
    MLP = (qwen3_next.Qwen3NextMLP,)
    ATTENTION = (qwen3_next.Qwen3NextAttention,)
    MOE = (qwen3_next.Qwen3NextSparseMoeBlock,)
    BLOCK = (qwen3_next.Qwen3NextDecoderLayer,)
    ZERO_CENTRED = (r"\.mlp\.experts\.\d+\.", r"\.switch_mlp\.")
    RENAMED = (NUMBERED_EXPERTS,)

    def head_block(self, depth: int) -> nn.Module:
        return qwen3_next.Qwen3NextDecoderLayer(self.args, self.args.full_attention_interval - 1)

    def windows(self) -> list[CacheKind]:
        return [RecurrentCache if layer.is_linear else None for layer in self.layers]
