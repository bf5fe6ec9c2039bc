"""Read typed values of a GGUF file's metadata; what is missing or of another type is one line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

REQUIRED = object()
MOST_BLOCKS = 1024
NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys that change logits, and values under which they do not
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.value_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "swiglu_clamp_exp": (0.0,),
    "swiglu_clamp_shexp": (0.0,),
    "expert_count": (0,),
    "rope.freq_base_swa": (),
}


@dataclass
class Meta:
    """Metadata of one file: `file` for messages, all `values`, the shapes of its tensors by name.

    Numbers that are stored in float32 are read as the shortest decimal of their value, 1e-05 for 9.99999975e-06.
    """

    file: str
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: set[str] = field(default_factory=set)

    @property
    def architecture(self) -> str:
        """The name of the family, which begins its keys."""
        return self._typed("general.architecture", str, REQUIRED)

    @property
    def heads(self) -> int:
        """Number of MTP heads, which are the last blocks."""
        return self.integer("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        """Number of the target's layers."""
        if self.heads >= self.blocks:
            raise ValueError(f"{self.file}: block_count is {self.blocks}, of which {self.heads} are heads")
        return self.blocks - self.heads

    @property
    def blocks(self) -> int:
        """Number of the target's layers and heads."""
        if (blocks := self.integer("block_count")) > MOST_BLOCKS:
            raise ValueError(f"{self.file}: metadata block_count is {blocks}; expected at most {MOST_BLOCKS}")
        return blocks

    def has(self, key: str) -> bool:
        """Whether the architecture's key is there."""
        return f"{self.architecture}.{key}" in self.values

    def integer(self, key: str, default: Any = REQUIRED) -> Any:
        """Read an integer of the architecture's, from 0 to 2^31."""
        value = self._typed(f"{self.architecture}.{key}", int, default)
        if isinstance(value, int) and not 0 <= value < 1 << 31:
            raise ValueError(f"{self.file}: metadata {key} is {value}; expected 0 to 2^31")
        return value

    def size(self, key: str, default: Any = REQUIRED) -> Any:
        """Read an integer that is at least 1."""
        value = self.integer(key, default)
        if value == 0:
            raise ValueError(f"{self.file}: metadata {key} is 0; expected at least 1")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """Read a number."""
        value = self._typed(f"{self.architecture}.{key}", float, default)
        if isinstance(value, float) and not np.isfinite(value):
            raise ValueError(f"{self.file}: metadata {key} is {value}; expected a number")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """Read a text."""
        return self._typed(f"{self.architecture}.{key}", str, default)

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Read a truth value."""
        return self._typed(f"{self.architecture}.{key}", bool, default)

    def each(self, key: str, default: Any = REQUIRED) -> list[Any]:
        """Read one value for each block, heads included: a list, or one that holds for all."""
        full, count = f"{self.architecture}.{key}", self.blocks
        self.read.add(full)
        value = self.values.get(full, default)
        if value is REQUIRED:
            raise ValueError(f"{self.file}: metadata {full} is missing")
        values = value if isinstance(value, np.ndarray | list) else [value] * count
        found = [_plain(v) for v in values] if self.layers <= len(values) <= MOST_BLOCKS else []
        if not found or not all(isinstance(v, int | float) and np.isfinite(v) for v in found):
            raise ValueError(f"{self.file}: metadata {full} has {len(values)} values; expected {count} numbers")
        return found

    def refuse_unread(self) -> None:
        """Raise for a key that changes logits, is not neutral, and was not read."""
        before = f"{self.architecture}."
        for key, value in self.values.items():
            neutral = NEUTRAL.get(key.removeprefix(before)) if key.startswith(before) else None
            values = [_plain(v) for v in value] if isinstance(value, np.ndarray | list) else [_plain(value)]
            if neutral is not None and key not in self.read and any(v not in neutral for v in values):
                shown = values[0] if len(values) == 1 else f"{values[:4]} ..."
                raise ValueError(f"{self.file}: metadata {key}={shown} is not supported; give --config-from REPO")

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        self.read.add(key)
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise ValueError(f"{self.file}: metadata {key} is missing")
        value = _plain(value)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not default and type(value) is not kind:
            shown = f"an array of {len(value)}" if isinstance(value, np.ndarray | list) else repr(value)[:80]
            raise ValueError(f"{self.file}: metadata {key} is {shown}; expected {kind.__name__}")
        return value


def _plain(value: Any) -> Any:
    """Return a number as Python's: an array's item, or a float as the shortest decimal of its float32."""
    if isinstance(value, np.generic):
        value = value.item()
    return float(str(np.float32(value))) if type(value) is float and np.float32(value) == value else value
