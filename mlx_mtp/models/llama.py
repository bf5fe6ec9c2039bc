"""Port Llama 2 and 3, Mistral and what else mlx-lm reads as `llama`: no heads of their own, but drafters exist."""

from mlx_lm.models import llama

from ..layers.port import HeadlessPort

ModelArgs = llama.ModelArgs


class Model(HeadlessPort, llama.Model):
    MLP = (llama.MLP,)
    ATTENTION = (llama.Attention,)
    BLOCK = (llama.TransformerBlock,)
    IGNORED = ("rotary_emb.inv_freq",)

    def windows(self) -> list[int | str | None]:
        return [self.args.sliding_window if layer.use_sliding else None for layer in self.layers]
