"""Port Qwen2 and Qwen2.5: no heads of their own, but drafters exist."""

from dataclasses import dataclass

from mlx_lm.models import qwen2

from ..layers.port import HeadlessPort


@dataclass
class ModelArgs(qwen2.ModelArgs):
    """config.json of `qwen2`."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Model(HeadlessPort, qwen2.Model):
    MLP = (qwen2.MLP,)
    ATTENTION = (qwen2.Attention,)
    BLOCK = (qwen2.TransformerBlock,)
    IGNORED = ("rotary_emb.inv_freq",)
