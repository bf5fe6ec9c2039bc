"""Normalise config.json before a family's dataclass reads it, and find what that dataclass does not read.

A value takes the name that the dataclass reads: other spellings, rotary embeddings as transformers 5 writes them, null
where the dataclass needs a value, and patterns of layers. `Normalized.check` refuses what changes logits and cannot be
applied; `Normalized.warn` names what else is not read.
"""

import copy
import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args, get_type_hints

from ..machine.errors import first_line
from ..models import field_names, find_family, is_port, text_args
from . import config_rope
from .config_layers import LETTERED, PATTERNS, letters, same_layers
from .config_names import BY_TENSORS, GELU, HARMLESS, HARMLESS_PATTERN, NEUTRAL, SPELLINGS

Config = dict[str, Any]
TEXT = "text_config"
WINDOW = {name: group for group in SPELLINGS for name in group if "sliding_window" in group}
BESIDE = tuple(name for group in SPELLINGS for name in group if "tie_word_embeddings" in group)


@dataclass(frozen=True)
class Normalized:
    """A config in the names that its family reads.

    wrong: what cannot be understood. lost: what changes logits and has no place in the family. unread: other keys that
    the family does not read.
    """

    config: Config
    wrong: str | None = None
    lost: Sequence[str] = ()
    unread: Sequence[str] = ()

    def check(self, file: Path) -> None:
        """Raise ValueError, which names `file`, for what changes logits and cannot be applied."""
        if self.wrong:
            raise ValueError(f"{file}: {self.wrong}")
        if self.lost:
            family = f"the implementation of model_type {self.config['model_type']!r} does not support it"
            raise ValueError(
                f"{file}: {', '.join(self.lost)}: this changes the model's output, and {family}; "
                "remove it from config.json to load the model without it"
            )

    def warn(self, file: Path, stacklevel: int) -> None:
        """Name, in one warning, the keys that are not read."""
        if self.unread:
            family = f"the implementation of model_type {self.config['model_type']!r}"
            text = f"{file}: not read by {family}: {', '.join(self.unread)}; check that they do not change the model"
            warnings.warn(text, stacklevel=stacklevel + 1)


def normalize(config: Config) -> Normalized:
    """Return a config in the names that its family reads; the same config where no family is known."""
    family = find_family(config)
    if family is None:
        return Normalized(config)
    config = copy.deepcopy(config)
    outer, nested = field_names(family.ModelArgs), TEXT in config
    text = config[TEXT] if nested else config
    if nested:
        text |= {name: config[name] for name in BESIDE if name in config and not text.keys() & {*BESIDE}}
    inner = text_args(family, text)
    read = field_names(inner) | (set() if nested else outer)
    try:
        text = getattr(family.ModelArgs, "respelled", dict)(text)
        normal, homeless = _normal(text, read, inner)
    except (ValueError, TypeError, KeyError, ArithmeticError) as e:
        return Normalized(config, wrong=first_line(e))
    reader = Reader(text.get("model_type") or config["model_type"], read, family)
    unread, lost = reader.left_out(normal, homeless)
    if not nested:
        return Normalized(normal, lost=lost, unread=unread)
    beside = {name: value for name, value in config.items() if not isinstance(value, dict) and name not in NEUTRAL}
    unread = [f"{TEXT}.{name}" for name in unread]
    unread += Reader(config["model_type"], outer | read | {TEXT}, family).left_out(beside, {})[0]
    return Normalized(config | {TEXT: normal}, lost=lost, unread=unread)


def with_overrides(config: Config, overrides: Config) -> Config:
    """Return a config with a user's values, which also count before what its `rope_parameters` has inside."""
    inside = config.get("rope_parameters")
    if isinstance(inside, dict) and "rope_parameters" not in overrides:
        kept = {name: value for name, value in inside.items() if name not in overrides}
        if "rope_scaling" in overrides:
            kept = {name: value for name, value in kept.items() if name in ("rope_theta", "partial_rotary_factor")}
        config = config | {"rope_parameters": kept}
    return config | overrides


def _normal(config: Config, read: set[str], args: Any) -> tuple[Config, Config]:
    """Return the config in the names of `read`, and by name what of its rotary embeddings has no place there."""
    rope, homeless = config_rope.write(config, read)
    config = _without_nulls(_spelled({**config, **rope}, read), args)
    lettered = str in get_args(get_type_hints(args).get(LETTERED))
    for name, (source, pattern) in PATTERNS.items():
        of_letters = name == LETTERED and lettered
        unset = config.get(name) is None or (of_letters and not isinstance(config[name], str))
        if name in read and unset and isinstance(config.get(source), list):
            value = letters(config[source]) if of_letters else pattern(config[source])
            config |= {} if value is None and not of_letters else {name: value}
    return config, homeless


def _spelled(config: Config, read: set[str]) -> Config:
    """Add the names that are read of values that have another name."""
    found = dict(config)
    for group in SPELLINGS:
        ours = [name for name in group if name in read]
        value = next((config[name] for name in group if config.get(name) is not None), None)
        if ours and value is not None and all(config.get(name) is None for name in ours):
            found[ours[0]] = value
    dtype = config.get("torch_dtype") or config.get("dtype")
    return found | ({"torch_dtype": dtype} if dtype else {})


def _without_nulls(config: Config, args: Any) -> Config:
    """Replace null where the dataclass takes no None: head sizes by what they are derived from, else its default."""
    hints, found = get_type_hints(args), dict(config)
    derived = {"num_key_value_heads": config.get("num_attention_heads")}
    derived |= dict.fromkeys(WINDOW, config.get("max_position_embeddings"))  # null is no window
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and isinstance(config.get("hidden_size"), int):
        derived["head_dim"] = config["hidden_size"] // heads
    for known in fields(args):
        name, required = known.name, known.default is MISSING and known.default_factory is MISSING
        takes_none = known.default is None or hints[name] is Any or NoneType in get_args(hints[name])
        if takes_none or name in NEUTRAL or found.get(name) is not None or not (name in found or required):
            continue
        if derived.get(name) is not None:
            found[name] = derived[name]
        elif not required:
            found.pop(name, None)
    return found


@dataclass(frozen=True)
class Reader:
    """What reads a config: the fields of its family's dataclass, and what the family implements without reading it."""

    model_type: str
    read: set[str]
    family: ModuleType

    def left_out(self, config: Config, homeless: Config) -> tuple[list[str], list[str]]:
        """List the keys that are not read: those to warn of, and in words those that change logits.

        homeless: of rotary embeddings, what has no field. What the family has by default it implements.
        """
        left = {name: value for name, value in config.items() if self._matters(name, value, config)}
        warned, refused = [f"rope_parameters.{name}" for name in config_rope.Rope(config).unread()], []
        if not left and not homeless:
            return warned, refused
        known = {name: value for name, value in config.items() if name in self.read | config_rope.KEYS}
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
        rope = config_rope.usual(usual)
        lost = [f"{name}={value!r}" for name, value in homeless.items() if rope is not None and value != rope.get(name)]
        return warned, lost + [f"{name}={config[name]!r}" for name in refused]

    def _matters(self, name: str, value: Any, config: Config) -> bool:
        """Whether a key is not read, and its value may mean something."""
        read = self.read
        if name in read or value is None or name in config_rope.KEYS:
            return False
        implied = getattr(self.family.Model, "IMPLIED", {})
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
        if name in BY_TENSORS and is_port(self.family):
            return False
        return name in NEUTRAL or not (name in HARMLESS or HARMLESS_PATTERN.fullmatch(name))


def _windowed(config: Config) -> bool:
    """Whether some layer attends to fewer positions than the model has."""
    window = next((config[name] for name in WINDOW if config.get(name) is not None), None)
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if window is None or config.get("use_sliding_window") is False:
        return False
    if isinstance(kinds, list):
        sliding = bool(set(kinds) - {config_rope.FULL, "linear_attention"})
    else:
        first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
        sliding = not isinstance(first, int) or not isinstance(layers, int) or first < layers
    longest = config.get("max_position_embeddings")
    return sliding and not (isinstance(longest, int) and isinstance(window, int) and window >= longest)


def _as_transformers_has_it(model_type: str, known: Config) -> Config:
    """Return all keys as transformers derives them from the known ones; empty where it has no such family.

    What equals them says nothing that the family's implementation, made for these defaults, does not do.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # seconds to import

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for values in (known, {}):
            with suppress(Exception):  # of many kinds, where values do not go together
                return CONFIG_MAPPING[model_type](**copy.deepcopy(values)).to_dict()
    finally:
        logger.setLevel(level)
    return {}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {str(name): _plain(item) for name, item in value.items()} if isinstance(value, dict) else value
