"""Find the keys of a normalised config.json that its family does not read, and those that change logits."""

import copy
import logging
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .. import is_port
from . import rope as rotary
from .layers import same_layers
from .names import BY_TENSORS, GELU, HARMLESS, HARMLESS_PATTERN, NEUTRAL, SPELLINGS, WINDOW

Config = dict[str, Any]
DECIDED, NO_MATTER = frozenset(BY_TENSORS.split()), frozenset(HARMLESS.split())


@dataclass(frozen=True)
class UnreadKeys:
    """Finds the keys of a config that a family does not read.

    read: the fields of its dataclass. family: its module, whose Model lists keys in IMPLIED of which it implements
    one value.
    """

    model_type: str
    read: set[str]
    family: ModuleType

    def unread_keys(self, config: Config, unplaced: Config) -> tuple[list[str], list[str]]:
        """Return the unread keys to warn about, and "name=value" of the unread keys that change logits.

        unplaced: rotary values that no field holds. Values equal to transformers' defaults for the family count as
        implemented. A window that equals the default is a warning.
        """
        left = {name: value for name, value in config.items() if self._matters(name, value, config)}
        warned, refused = [f"rope_parameters.{name}" for name in rotary.RopeConfig(config).unread()], []
        if not left and not unplaced:
            return warned, refused
        known = {name: value for name, value in config.items() if name in self.read | rotary.KEYS}
        usual = _as_transformers_has_it(self.model_type, {})
        derived = _as_transformers_has_it(self.model_type, known) if left else {}
        for name, value in left.items():
            equal = any(name in keys and _plain(keys[name]) == _plain(value) for keys in (derived, usual))
            if name in WINDOW:
                (warned if equal else refused).append(name)
            elif equal:
                continue
            elif name not in NEUTRAL or (GELU in str(value) and GELU in str(usual.get(name))):
                warned.append(name)
            else:
                refused.append(name)
        rope = rotary.usual(usual)
        unsupported = {
            name: value for name, value in unplaced.items() if rope is not None and value != rope.get(name)
        }
        return warned, [
            f"{name}={value!r}" for name, value in (unsupported | {n: config[n] for n in refused}).items()
        ]

    def _matters(self, name: str, value: Any, config: Config) -> bool:
        """Return whether a key is unread and may change the model's output."""
        read = self.read
        if name in read or value is None or name in rotary.KEYS:
            return False
        implied = dict(getattr(self.family.Model, "IMPLIED", ()))
        if name in implied:
            return value != implied[name]
        if name in NEUTRAL and value in NEUTRAL[name]:
            return False
        others = (config.get(other) for group in SPELLINGS if name in group for other in group if other in read)
        if any(_plain(value) == _plain(other) for other in others):
            return False
        if name in WINDOW or name == "use_sliding_window":
            return _windowed(config) and not read & {*WINDOW}
        if name in ("layer_types", "mlp_layer_types"):
            return not same_layers(name, value, config, read) and (name != "layer_types" or _windowed(config))
        if name in DECIDED and is_port(self.family):
            return False
        return name in NEUTRAL or not (name in NO_MATTER or HARMLESS_PATTERN.fullmatch(name))


def _windowed(config: Config) -> bool:
    """Return whether some layer has a window that is shorter than the model's longest context."""
    window = next((config[name] for name in WINDOW if config.get(name) is not None), None)
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if window is None or config.get("use_sliding_window") is False:
        return False
    if isinstance(kinds, list):
        sliding = bool(set(kinds) - {rotary.FULL, "linear_attention"})
    else:
        first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
        sliding = not isinstance(first, int) or not isinstance(layers, int) or first < layers
    longest = config.get("max_position_embeddings")
    return sliding and not (isinstance(longest, int) and isinstance(window, int) and window >= longest)


def _as_transformers_has_it(model_type: str, known: Config) -> Config:
    """Return all keys as transformers derives them from the known ones; {} if transformers lacks the family.

    If transformers refuses the known ones, its defaults alone are returned. An unread key with its derived value is
    harmless: the family's implementation was written for these defaults.
    """
    from transformers import CONFIG_MAPPING  # seconds to import

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for values in (known, {}):
            with suppress(Exception):  # invalid combinations raise many types
                return CONFIG_MAPPING[model_type](**copy.deepcopy(values)).to_dict()
    finally:
        logger.setLevel(level)
    return {}


def _plain(value: Any) -> Any:
    """Return a value as JSON represents it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {str(name): _plain(item) for name, item in value.items()} if isinstance(value, dict) else value
