"""Apply config.json's rotary scaling and partial rotation to models whose implementation ignores them."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

from .. import field_names, find_family, text_args
from .rope import LENGTH, RopeConfig, scaled

SCALED = tuple(kind for name, kind in vars(rope_utils).items() if isinstance(kind, type) and name.endswith("RoPE"))
APPLIED = ("linear", "dynamic", "llama3", "yarn")  # types that need no other change of a layer
NOT_APPLIED = "the implementation of this family does not apply them"
KEYS = {"rope_scaling", "rope_parameters"}
NamedPart = tuple[nn.Module, str, Any]  # a module, the name of one of its parts, and the part


def apply_rope(model: nn.Module, config: dict[str, Any]) -> None:
    """Apply the rotary scaling and partial rotation in `config` that the model's implementation ignores.

    The model is modified: plain modules are replaced, if none is scaled, or rotate less; already scaled ones stay,
    but YaRN gets unrounded bounds if `truncate` is false. Raises ValueError if a scaling cannot be applied.
    """
    text = config.get("text_config") or config
    rope = RopeConfig(text)
    if not rope.stated:
        return
    places = [(m, name, part) for m in model.modules() for name, part in m.items() if isinstance(part, nn.Module)]
    plain = [place for place in places if type(place[2]) is nn.RoPE and place[2].scale == 1]
    others = [part for _, _, part in places if type(part) in SCALED or (type(part) is nn.RoPE and part.scale != 1)]
    part, local_part = (parameters.get("partial_rotary_factor", 1) for parameters in (rope.main, rope.local))
    if part != 1 and part == local_part:
        _rotate_in_part([rotary for _, _, rotary in plain], text, part)
    if scaled(rope.main):
        family: Any = find_family(config)
        if not plain and not others and not KEYS & field_names(text_args(family, text)):
            raise ValueError(f"rope_parameters of type {rope.main['rope_type']!r}: {NOT_APPLIED}")
        _scale(plain, others, rope, text.get("max_position_embeddings"))


def _rotate_in_part(modules: list[Any], text: dict[str, Any], part: float) -> None:
    """Make those of the modules that rotate whole heads rotate only the share `part` of each head.

    text: the config of the text model.
    """
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    for module in modules:
        if module.dims == size:
            module.dims = int(size * part)


def _scale(plain: list[NamedPart], others: list[Any], rope: RopeConfig, longest: int | None) -> None:
    """Replace plain modules by scaled ones if none is scaled yet; do not round YaRN's bounds if `truncate` is false.

    plain, others: unscaled places, and scaled modules, to which new ones are appended. longest: the maximum context.
    Raises ValueError for a type of scaling, or a difference between layer types, that cannot be applied.
    """
    kind, differ = rope.main["rope_type"], scaled(rope.main) != scaled(rope.local)
    if plain and not others:
        if differ or kind not in APPLIED:
            raise ValueError(f"rope_parameters of type {kind!r}: {NOT_APPLIED}")
        for module, name, part in plain:
            module[name] = initialize_rope(part.dims, part.base, part.traditional, rope.main, longest)
            others.append(module[name])
    elif differ and others and not plain:
        raise ValueError("rope_parameters: the implementation of this family scales layers of every type alike")
    if rope.main.get("truncate") is False:
        for part in others:
            if type(part) is YarnRoPE:
                part._freqs = _untruncated(part.dims, rope.main)


def _untruncated(dims: int, parameters: dict[str, Any]) -> mx.array:
    """Return YaRN's frequencies [dims / 2] without rounding its bounds to whole dimensions, unlike MLX's module."""
    base, factor, length = (parameters[name] for name in ("rope_theta", "factor", LENGTH))
    rotations = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    low, high = (dims * math.log(length / (n * 2 * math.pi)) / (2 * math.log(base)) for n in rotations)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = mx.clip((mx.arange(dims // 2) - low) / (max(high - low, 1e-3)), 0, 1)
    plain = base ** (mx.arange(0, dims, 2) / dims)
    return 1 / (ramp / (factor * plain) + (1 - ramp) / plain)
