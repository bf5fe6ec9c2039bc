"""Port Qwen2 and Qwen2.5, which have no heads; drafters exist."""

from mlx_lm.models import qwen2

from ..layers.port import HeadlessPort

ModelArgs = qwen2.ModelArgs


class Model(HeadlessPort, qwen2.Model):
    MLP = (qwen2.MLP,)
    ATTENTION = (qwen2.Attention,)
    BLOCK = (qwen2.TransformerBlock,)
    IGNORED = ("rotary_emb.inv_freq",)
