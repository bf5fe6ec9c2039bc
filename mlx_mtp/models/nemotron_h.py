"""Port Nemotron-3: mlx-lm's hybrid of Mamba2, attention, MLP and expert layers, with a recycled two-layer MTP head.

The head is `mtp.layers.0`, attention without RoPE on the fused input, and `mtp.layers.1`, experts. Both its inputs,
the target's hidden state and its own output, are taken after a final norm. MLP and expert layers have no cache.
Sources: vLLM `nemotron_h_mtp.py`, llama.cpp `nemotron-h.cpp`; tensor names of Nemotron-3 Super and 3.5 Lightning.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import nemotron_h

from ..cache.layer_cache import CacheKind
from ..cache.recurrent import RecurrentCache
from ..layers.mamba2 import Mamba2
from ..layers.mtp_spec import MTPSpec, pairs
from ..layers.port import Port, Renaming

HEAD_PATTERN = "*E"
CACHED = "M*"


@dataclass
class ModelArgs(nemotron_h.ModelArgs):
    """config.json's fields for `nemotron_h`, with those of the MTP head."""

    mtp_hybrid_override_pattern: str | None = None
    mtp_layers_block_type: list[str] | None = None
    mtp_n_routed_experts: int | None = None

    @classmethod
    def respelled(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with its number of layers, which transformers omits, from its list of layer types."""
        kinds = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
        return config if config.get("num_hidden_layers") or not kinds else {**config, "num_hidden_layers": len(kinds)}

    def __post_init__(self):
        super().__post_init__()
        unknown = set(self.hybrid_override_pattern or []) - set("M*-E")
        if unknown:
            raise ValueError(f"hybrid_override_pattern: {', '.join(sorted(unknown))}; allowed are M, *, - and E")

    @property
    def head(self) -> "ModelArgs":
        """Arguments from which the MTP head is built; ValueError unless its layers are attention, then experts."""
        kinds = [self._block_type_to_char.get(k, k) for k in self.mtp_layers_block_type or ("attention", "moe")]
        pattern = "".join(self.mtp_hybrid_override_pattern or kinds)
        if pattern != HEAD_PATTERN:
            name = "mtp_hybrid_override_pattern" if self.mtp_hybrid_override_pattern else "mtp_layers_block_type"
            raise ValueError(f"{name}: {pattern}; allowed is {HEAD_PATTERN}, attention and then experts")
        experts = self.mtp_n_routed_experts or self.n_routed_experts
        return replace(self, hybrid_override_pattern=list(pattern), n_routed_experts=experts)


class Mamba2Mixer(Mamba2, nemotron_h.NemotronHMamba2Mixer):
    """mlx-lm's Mamba2 mixer with a cache that can roll back rejected tokens."""


class HeadBlock(nn.Module):
    """The MTP head's two layers, attention and experts, [B, L, H] -> [B, L, H]."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.layers = [nemotron_h.NemotronHBlock(args, kind) for kind in HEAD_PATTERN]

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        attention, experts = self.layers
        return experts(attention(x, mask, cache))


class Model(Port, nemotron_h.Model):
    SPEC = MTPSpec(
        prefix=r"(?:model\.|language_model\.)*mtp\.",
        numbered="zero",
        tensors=pairs(
            "layers.0.enorm=enorm layers.0.hnorm=hnorm layers.0.eh_proj=eh_proj layers.1.final_layernorm=norm "
            "layers.0=block.layers.0 layers.1=block.layers.1"
        ),
    )
    OURS = (Mamba2Mixer,)
    ROUTER = (nemotron_h.MoEGate,)
    MOE = (nemotron_h.NemotronHMoE,)
    ATTENTION = (nemotron_h.NemotronHAttention,)
    INSIDE = "backbone."
    RENAMED = (
        Renaming(r"\.experts\.\d+\.up_proj\.", (".switch_mlp.fc1.",), ".experts.*.up_proj."),
        Renaming(r"\.experts\.\d+\.down_proj\.", (".switch_mlp.fc2.",), ".experts.*.down_proj."),
    )

    def head_block(self, depth: int) -> nn.Module:
        return HeadBlock(self.args.head)

    @property
    def model(self) -> Any:
        """The backbone's modules under the names that `Port` expects."""
        return SimpleNamespace(embed_tokens=self.backbone.embeddings, norm=self.backbone.norm_f)

    def stream(self, x: mx.array, cache: Sequence[Any]) -> list[mx.array]:
        caches = iter(cache)
        mask = next((c.make_mask(x.shape[1]) for c in cache if not c.is_state), None)
        stream = [x]
        for layer in self.layers:
            stream.append(layer(stream[-1], mask, next(caches)) if layer.block_type in CACHED else layer(stream[-1]))
        return stream

    def cached_layers(self) -> list[Any]:
        return [layer for layer in self.layers if layer.block_type in CACHED]

    def windows(self) -> list[CacheKind]:
        return [RecurrentCache if layer.block_type == "M" else None for layer in self.cached_layers()]

    def one_layer(self) -> Any:
        return SimpleNamespace(args=self.args.head)
