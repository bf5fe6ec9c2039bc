"""Port Qwen3 with experts, which has no heads; drafters exist."""

from mlx_lm.models import qwen3_moe

from ..layers.port import NUMBERED_EXPERTS, HeadlessPort

ModelArgs = qwen3_moe.ModelArgs


class Model(HeadlessPort, qwen3_moe.Model):
    MLP = (qwen3_moe.MLP,)
    ATTENTION = (qwen3_moe.Attention,)
    MOE = (qwen3_moe.Qwen3MoeSparseMoeBlock,)
    BLOCK = (qwen3_moe.Qwen3MoeDecoderLayer,)
    RENAMED = (NUMBERED_EXPERTS,)
