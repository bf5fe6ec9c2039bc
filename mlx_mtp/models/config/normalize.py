"""Normalise config.json before a family's dataclass reads it, and find the keys that the dataclass does not read.

Each value takes the name that the dataclass reads. This covers other spellings, transformers 5's rotary embeddings,
null where the dataclass needs a value, and layer patterns. `Normalized.check` refuses unread values that change
logits; `Normalized.warn` names the other unread keys.
"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args, get_type_hints

from ...machine.errors import first_line, with_type
from .. import field_names, find_family, text_args
from . import rope as rotary
from .layers import LETTERED, PATTERNS, letters
from .names import COMMON, NEUTRAL, NULLABLE, SPELLINGS, TIES, WINDOW
from .unread import UnreadKeys

Config = dict[str, Any]
TEXT = "text_config"
SHARED = ("torch_dtype", "eos_token_id")  # fields of text_config that readers expect at the top level
MISREAD = (TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Normalized:
    """A config with the names that its family reads.

    wrong: why the config cannot be read. unsupported: "name=value" for values that change logits and that the family
    cannot apply.
    unread: other keys that the family does not read and that may change the model.
    """

    config: Config
    wrong: str | None = None
    unsupported: Sequence[str] = ()
    unread: Sequence[str] = ()

    def check(self, file: Path) -> None:
        """Raise ValueError, naming `file`, if the config is invalid or has unsupported values that change logits."""
        if self.wrong:
            raise ValueError(f"{file}: {self.wrong}")
        if self.unsupported:
            family = f"the implementation of model_type {self.config['model_type']!r} does not support it"
            raise ValueError(
                f"{file}: {', '.join(self.unsupported)}: this changes the model's output, and {family}; "
                "remove it from config.json to load the model without it"
            )

    def warn(self, file: Path, stacklevel: int) -> None:
        """Emit one warning that names the keys in `unread`, if there are any; stacklevel: 1 for the caller's line."""
        if self.unread:
            family = f"the implementation of model_type {self.config['model_type']!r}"
            text = f"{file}: not read by {family}: {', '.join(self.unread)}; check that they do not change the model"
            warnings.warn(text, stacklevel=stacklevel + 1)


def normalize(config: Config) -> Normalized:
    """Return a `Normalized` config, which is unchanged if the family is unknown or reading it fails.

    Errors of values are in `wrong`, not raised; only a config without model_type raises KeyError. `config` is not
    modified.
    """
    family = find_family(config)
    if family is None:
        return Normalized(config)
    try:
        return _of_family(family, copy.deepcopy(config))
    except ValueError as e:
        return Normalized(config, wrong=first_line(e))
    except MISREAD as e:
        return Normalized(config, wrong=f"the model cannot be built from it ({with_type(e)})")


def _of_family(family: ModuleType, config: Config) -> Normalized:
    outer, nested = field_names(family.ModelArgs), TEXT in config
    text = config[TEXT] if nested else config
    if nested and all(text.get(name) is None for name in TIES):
        text |= {name: config[name] for name in TIES if name in config}
    inner = text_args(family, text)
    read = field_names(inner) | (set() if nested else outer)
    normal, unplaced = _normal(getattr(family.ModelArgs, "respelled", dict)(text), read, inner)
    reader = UnreadKeys(text.get("model_type") or config["model_type"], read, family)
    unread, unsupported = reader.unread_keys(normal, unplaced)
    if not nested:
        return Normalized(normal, unsupported=unsupported, unread=unread)
    rest = {name: value for name, value in config.items() if not isinstance(value, dict) and name not in NEUTRAL}
    unread = [f"{TEXT}.{name}" for name in unread]
    unread += UnreadKeys(config["model_type"], outer | read | {TEXT}, family).unread_keys(rest, {})[0]
    shared = {name: normal[name] for name in SHARED if normal.get(name) is not None}
    stated = {name: value for name, value in config.items() if value is not None or name not in shared}
    return Normalized(_with_dtype({**shared, **stated, TEXT: normal}), unsupported=unsupported, unread=unread)


def with_overrides(config: Config, overrides: Config) -> Config:
    """Return a copy of a config with a user's values; those inside its `rope_parameters` are removed (`_without`).

    Overriding `rope_parameters` itself replaces it.
    """
    inside = config.get("rope_parameters")
    if isinstance(inside, dict) and "rope_parameters" not in overrides:
        config = config | {"rope_parameters": _without(inside, overrides)}
    return config | overrides


def _without(parameters: Config, overrides: Config) -> Config:
    """Return rotary parameters, for all layers or per type of layer, without the values that a user overrides.

    Overriding rope_scaling overrides all but theta and the rotated share.
    """
    kept = {name: value for name, value in parameters.items() if name not in overrides}
    if "rope_scaling" in overrides:
        own = ("rope_theta", "partial_rotary_factor")
        kept = {name: value for name, value in kept.items() if name in own or isinstance(value, dict)}
    return {name: _without(value, overrides) if isinstance(value, dict) else value for name, value in kept.items()}


def _normal(config: Config, read: set[str], args: Any) -> tuple[Config, Config]:
    """Return (the config with its values also under names in `read`, the rotary values that no field can hold).

    Both are dicts by name. read: names of the family's fields. args: the family's dataclass; nulls that its fields do
    not accept are replaced or removed, as by `_without_nulls`. Other keys of the config are kept. ValueError as of
    `rotary.write`.
    """
    rope, unplaced = rotary.write(config, read)
    config = _without_nulls(_spelled({**config, **rope}, read), args)
    lettered = str in get_args(get_type_hints(args).get(LETTERED))
    for name, (source, pattern) in PATTERNS.items():
        of_letters = name == LETTERED and lettered
        unset = config.get(name) is None or (of_letters and not isinstance(config[name], str))
        if name in read and unset and isinstance(config.get(source), list):
            value = letters(config[source]) if of_letters else pattern(config[source])
            config |= {} if value is None and not of_letters else {name: value}
    return config, unplaced


def _spelled(config: Config, read: set[str]) -> Config:
    """Return the config with each value also under the family's name for it, if only another spelling is set.

    read: names of the family's fields. Values with several spellings of which the first is in COMMON are also under
    that one; the type of the weights is also under torch_dtype.
    """
    found = dict(config)
    for group in SPELLINGS:
        ours = [name for name in group if name in read]
        value = next((config[name] for name in group if config.get(name) is not None), None)
        if ours and value is not None and all(config.get(name) is None for name in ours):
            found[ours[0]] = value
        if group[0] in COMMON and value is not None:
            found.setdefault(group[0], value)
    return _with_dtype(found)


def _with_dtype(config: Config) -> Config:
    """Return the config with the type of its weights also under transformers 4's name, torch_dtype."""
    dtype = config.get("torch_dtype") or config.get("dtype")
    return config | ({"torch_dtype": dtype} if isinstance(dtype, str) else {})


def _without_nulls(config: Config, args: Any) -> Config:
    """Return a copy of the config without nulls in fields of `args` that do not accept None.

    args: the family's dataclass. Keys of NEUTRAL and NULLABLE stay. Sizes of heads, the number of KV heads and the
    window are derived, also if they are absent and required; other fields get their default, and required ones that
    cannot be derived stay null.
    """
    hints, found = get_type_hints(args), dict(config)
    derived = {"num_key_value_heads": config.get("num_attention_heads")}
    derived |= dict.fromkeys(WINDOW, config.get("max_position_embeddings"))  # null is no window
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and isinstance(config.get("hidden_size"), int):
        derived["head_dim"] = config["hidden_size"] // heads
    for known in fields(args):
        name, required = known.name, known.default is MISSING and known.default_factory is MISSING
        takes_none = known.default is None or hints[name] is Any or NoneType in get_args(hints[name])
        takes_none |= name in NEUTRAL or name in NULLABLE
        if takes_none or found.get(name) is not None or not (name in found or required):
            continue
        if derived.get(name) is not None:
            found[name] = derived[name]
        elif not required:
            found.pop(name, None)
    return found
