"""Read typed values of a GGUF file's metadata; a missing value, or one of another type, is a one-line ValueError."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

REQUIRED = object()
MOST_BLOCKS = 1024
FACTORS = """
logit_scale residual_scale embedding_scale attention.value_scale rope.scaling.factor expert_weights_scale
"""
ZERO_IS_NEUTRAL = """
attn_logit_softcapping final_logit_softcapping router_logit_softcapping attention.scale attention.clamp_kqv
attention.max_alibi_bias rope.scaling.yarn_log_multiplier swiglu_clamp_exp swiglu_clamp_shexp
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys that change logits, and values under which they do not
    **dict.fromkeys(FACTORS.split(), (0.0, 1.0)),
    **dict.fromkeys(ZERO_IS_NEUTRAL.split(), (0.0,)),
    **dict.fromkeys(("attention.sliding_window", "expert_count"), (0,)),
    "attention.causal": (True,),
    "rope.scaling.type": ("none",),
    "rope.scaling.attn_factor": (1.0,),
    "expert_group_count": (0, 1),
    "rope.freq_base_swa": (),
}


@dataclass
class Meta:
    """Metadata of one GGUF file: `file` for messages, `values` by full key, tensors' `shapes` by name.

    read: the full keys that were looked up.

    Methods take keys without the architecture's prefix. They return `default` for a missing key, and raise ValueError
    if no default is given. A number stored in float32 is returned as its shortest decimal, 1e-05 for 9.99999975e-06.
    """

    file: str
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: set[str] = field(default_factory=set)

    @property
    def architecture(self) -> str:
        """The file's general.architecture, such as "llama", which is the prefix of its other keys."""
        return self._typed("general.architecture", str, REQUIRED)

    @property
    def heads(self) -> int:
        """Number of MTP heads, which are the last blocks; 0 if the metadata do not state it."""
        return self.integer("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        """Number of the target's layers, which are the blocks before the heads; ValueError if there are none.

        ValueError, too, if the metadata lack block_count.
        """
        if self.heads >= self.blocks:
            raise ValueError(f"{self.file}: block_count is {self.blocks}; expected more than {self.heads}, the heads")
        return self.blocks - self.heads

    @property
    def blocks(self) -> int:
        """Number of blocks, which are the target's layers and the heads; ValueError for more than MOST_BLOCKS."""
        if (blocks := self.integer("block_count")) > MOST_BLOCKS:
            raise ValueError(f"{self.file}: metadata block_count is {blocks}; expected at most {MOST_BLOCKS}")
        return blocks

    def has(self, key: str) -> bool:
        """Return whether the metadata contain a key; this does not count as reading it."""
        return f"{self.architecture}.{key}" in self.values

    def integer(self, key: str, default: Any = REQUIRED) -> Any:
        """Return an integer; ValueError unless it is at least 0 and less than 2^31."""
        value = self._typed(f"{self.architecture}.{key}", int, default)
        if isinstance(value, int) and not 0 <= value < 1 << 31:
            raise ValueError(f"{self.file}: metadata {key} is {value}; expected 0 to 2^31 - 1")
        return value

    def size(self, key: str, default: Any = REQUIRED) -> Any:
        """Return an integer; ValueError unless it is at least 1 and less than 2^31."""
        value = self.integer(key, default)
        if value == 0:
            raise ValueError(f"{self.file}: metadata {key} is 0; expected at least 1")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a float, also for a stored integer; ValueError for NaN or infinity."""
        value = self._typed(f"{self.architecture}.{key}", float, default)
        if isinstance(value, float) and not np.isfinite(value):
            raise ValueError(f"{self.file}: metadata {key} is {value}; expected a finite number")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a string."""
        return self._typed(f"{self.architecture}.{key}", str, default)

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a bool."""
        return self._typed(f"{self.architecture}.{key}", bool, default)

    def each(self, key: str, default: Any = REQUIRED) -> list[Any]:
        """Return one number per block: a stored list, or a single value repeated for every block, heads included.

        A list is returned as it is: it needs at least one number per layer of the target and at most MOST_BLOCKS; the
        heads' numbers may be missing. ValueError for a list of another length, a missing value without `default`, and
        anything but finite numbers.
        """
        full = f"{self.architecture}.{key}"
        self.read.add(full)
        value = self.values.get(full, default)
        if value is REQUIRED:
            raise ValueError(f"{self.file}: metadata {full} is missing")
        values = value if isinstance(value, np.ndarray | list) else [value] * self.blocks
        found = [_plain(v) for v in values] if self.layers <= len(values) <= MOST_BLOCKS else []
        if not found or not all(isinstance(v, int | float) and np.isfinite(v) for v in found):
            expected = f"a finite number, or a list of {self.layers} to {MOST_BLOCKS} finite numbers"
            raise ValueError(f"{self.file}: metadata {full}: expected {expected}")
        return found

    def refuse_unread(self) -> None:
        """Raise ValueError for a key that changes logits (NEUTRAL) and was not read, unless its value is neutral.

        Call it after config.json has been made from the metadata.
        """
        before = f"{self.architecture}."
        for key, value in self.values.items():
            neutral = NEUTRAL.get(key.removeprefix(before)) if key.startswith(before) else None
            values = [_plain(v) for v in value] if isinstance(value, np.ndarray | list) else [_plain(value)]
            if neutral is not None and key not in self.read and any(v not in neutral for v in values):
                stated = values[0] if len(values) == 1 else f"{values[:4]} ..."
                raise ValueError(f"{self.file}: metadata {key}={stated} is not supported; give --config-from REPO")

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        self.read.add(key)
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise ValueError(f"{self.file}: metadata {key} is missing")
        value = _plain(value)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not default and type(value) is not kind:
            raise ValueError(f"{self.file}: metadata {key} is {shown(value)}; expected {kind.__name__}")
        return value


def shown(value: Any) -> str:
    """Return a metadata value as text for messages, on one line of at most 80 characters."""
    return f"an array of {len(value)}" if isinstance(value, np.ndarray | list) else repr(value)[:80]


def _plain(value: Any) -> Any:
    """Return a NumPy number as Python's, and a float that float32 can hold as the shortest decimal; else `value`."""
    if isinstance(value, np.generic):
        value = value.item()
    return float(str(np.float32(value))) if type(value) is float and np.float32(value) == value else value
