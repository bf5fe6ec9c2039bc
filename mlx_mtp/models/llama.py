"""Port Llama 2 and 3, Mistral and what else mlx-lm reads as `llama`: no heads of their own, but drafters exist."""

from dataclasses import dataclass

from mlx_lm.models import llama

from ..layers.port import HeadlessPort


@dataclass
class ModelArgs(llama.ModelArgs):
    """config.json of `llama`."""

    def __post_init__(self):
        super().__post_init__()
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads


class Model(HeadlessPort, llama.Model):
    MLP = (llama.MLP,)
    ATTENTION = (llama.Attention,)
    BLOCK = (llama.TransformerBlock,)
    IGNORED = ("rotary_emb.inv_freq",)

    def windows(self) -> list[int | str | None]:
        return [self.args.sliding_window if layer.use_sliding else None for layer in self.layers]
