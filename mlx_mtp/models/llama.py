"""Port Llama 2 and 3, Mistral and other models that mlx-lm reads as `llama`; they have no heads, but drafters
exist.
"""

from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models import llama

from ..layers.mtp_spec import MTPSpec
from ..layers.port import HeadlessPort

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass
class ModelArgs(llama.ModelArgs):
    """config.json's fields for `llama` and for families that mlx-lm reads as `llama`."""

    @classmethod
    def respelled(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config; Mistral's, if it has a window and no layer types, with a window in every layer.

        Without layer types, no layer of Llama's has a window.
        """
        if config["model_type"] != "mistral" or not config.get("sliding_window") or config.get("layer_types"):
            return config
        return {**config, "layer_types": [SLIDING] * config["num_hidden_layers"]}


class Model(HeadlessPort, llama.Model):
    MLP = (llama.MLP,)
    ATTENTION = (llama.Attention,)
    BLOCK = (llama.TransformerBlock,)
    IGNORED = ("rotary_emb.inv_freq",)

    def __init__(self, args: ModelArgs, heads: int = 0, spec: MTPSpec | None = None):
        """Create mlx-lm's model, which requires a full-attention layer to be built, then set the layer types."""
        kinds = args.layer_types or []
        super().__init__(replace(args, layer_types=[FULL] * len(kinds)), heads, spec)
        self.args.layer_types = self.model.layer_types = kinds
        self.model.fa_idx, self.model.swa_idx = (kinds.index(k) if k in kinds else None for k in (FULL, SLIDING))
        self.model.fa_idx = self.model.fa_idx or 0
        for layer, kind in zip(self.layers, kinds, strict=True):
            layer.use_sliding = kind == SLIDING

    def windows(self) -> list[int | str | None]:
        return [self.args.sliding_window if layer.use_sliding else None for layer in self.layers]
