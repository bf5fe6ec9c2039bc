"""Apply config.json's rotary scaling to a model whose implementation reads it and leaves its rotary modules plain."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

from .config_rope import LENGTH, Rope, scaled

SCALED = tuple(kind for name, kind in vars(rope_utils).items() if isinstance(kind, type) and name.endswith("RoPE"))
APPLIED = ("linear", "dynamic", "llama3", "yarn")  # where the rest of a layer need not change


def apply_scaling(model: nn.Module, config: dict[str, Any]) -> None:
    """Scale the plain rotary modules of a model that scales none, where `config` scales; ValueError if it cannot."""
    text = config.get("text_config") or config
    rope = Rope(text)
    if not rope.stated or not scaled(rope.main):
        return
    places = [(m, name, part) for m in model.modules() for name, part in m.items() if isinstance(part, nn.Module)]
    plain = [place for place in places if type(place[2]) is nn.RoPE and place[2].scale == 1]
    others = [part for _, _, part in places if type(part) in SCALED or (type(part) is nn.RoPE and part.scale != 1)]
    differ = scaled(rope.main) != scaled(rope.local)
    kind = rope.main["rope_type"]
    if plain and not others:
        if differ or kind not in APPLIED:
            raise ValueError(f"rope_parameters of type {kind!r}: the implementation of this family does not apply them")
        for module, name, part in plain:
            longest = text.get("max_position_embeddings")
            module[name] = initialize_rope(part.dims, part.base, part.traditional, rope.main, longest)
            others.append(module[name])
    elif differ and others and not plain:
        raise ValueError("rope_parameters: the implementation of this family scales layers of every type alike")
    if rope.main.get("truncate") is False:
        for part in others:
            if type(part) is YarnRoPE:
                part._freqs = _untruncated(part.dims, rope.main)


def _untruncated(dims: int, parameters: dict[str, Any]) -> mx.array:
    """Compute YaRN's frequencies [dims / 2] with bounds between dimensions, which MLX's module rounds."""
    base, factor, length = (parameters[name] for name in ("rope_theta", "factor", LENGTH))
    rotations = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    low, high = (dims * math.log(length / (n * 2 * math.pi)) / (2 * math.log(base)) for n in rotations)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = mx.clip((mx.arange(dims // 2) - low) / (max(high - low, 1e-3)), 0, 1)
    plain = base ** (mx.arange(0, dims, 2) / dims)
    return 1 / (ramp / (factor * plain) + (1 - ramp) / plain)
