"""Port dense Qwen3, which has no heads; drafters exist."""

from mlx_lm.models import qwen3

from ..layers.port import HeadlessPort

ModelArgs = qwen3.ModelArgs


class Model(HeadlessPort, qwen3.Model):
    MLP = (qwen3.MLP,)
    ATTENTION = (qwen3.Attention,)
    BLOCK = (qwen3.TransformerBlock,)
