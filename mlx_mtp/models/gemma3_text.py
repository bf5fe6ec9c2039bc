"""Port Gemma 3's text model: no heads of its own, but drafters exist.

Its embeddings are scaled, its norms add 1 to their weights when they run, and five of six layers have a window.
"""

import mlx.core as mx
from mlx_lm.models import gemma3_text

from ..layers.port import HeadlessPort

ModelArgs = gemma3_text.ModelArgs


class Model(HeadlessPort, gemma3_text.Model):
    IGNORED = ("vision_tower.", "multi_modal_projector.")
    NORM = ()  # mx.fast.rms_norm of 1 + weight

    def embedded(self, tokens: mx.array) -> mx.array:
        x = super().embedded(tokens)
        return x * mx.array(self.args.hidden_size**0.5, mx.bfloat16).astype(x.dtype)

    def windows(self) -> list[int | str | None]:
        return [self.args.sliding_window if layer.self_attn.is_sliding else None for layer in self.layers]
