"""Find the port of a model_type and the supported kinds of external drafters.

A port `mlx_mtp/models/<model_type>.py` defines two names. `ModelArgs` is mlx-lm's dataclass of config.json, with
`num_hidden_layers` and `vocab_size`. `Model(args, heads=0, spec=None)` inherits from `layers.port.Port` and from
mlx-lm's model, and overrides the attributes and methods of `Port` in which the family differs. Nothing outside this
package names a family. If transformers writes a family's config.json with other names than `ModelArgs` has,
`ModelArgs.respelled(config)` translates it.

A drafter in a directory of its own (DRAFTERS) defines `refuses(config, names)`, `make_spec(config, names,
num_hidden_layers, overrides)`, `features(header)` and `make_head(spec, config, names, captured)` instead; ACCEPTED, a
description of its directory for messages; JOINS_HEADS, whether it drafts next to the target's MTP heads instead of
replacing them; and IGNORED, endings of the names of tensors that are not loaded.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from ..layers.wrapped import wrapped_port

DRAFTERS = ("eagle3", "dflash")
# Added to mlx-lm's aliases of a model_type: a text model exported without its wrapper, with a flat config.json.
REMAPPED = {**MODEL_REMAPPING, "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def port_names() -> list[str]:
    """Return every model_type that has a port, sorted."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", *DRAFTERS))


def find_port(config: dict) -> ModuleType | None:
    """Return the port of a config.json's model_type, aliases included; None if it has no port.

    The port of a wrapper (`layers.wrapped`) is made from that of its language model. KeyError without a model_type.
    """
    name = _aliased(config["model_type"])
    return _written(name) or wrapped_port(_of_mlx_lm(name), config, _written)


def find_family(config: dict) -> ModuleType | None:
    """Return the module of a config.json's model_type or its alias: its port, else mlx-lm's module, else None."""
    return find_port(config) or _of_mlx_lm(_aliased(config["model_type"]))


def _aliased(model_type: str) -> str:
    return REMAPPED.get(model_type, model_type)


def _written(name: str) -> ModuleType | None:
    """Return the port in this directory with this name, None without one."""
    return importlib.import_module(f".{name}", __package__) if name in port_names() else None


def _of_mlx_lm(name: str) -> ModuleType | None:
    """Return mlx-lm's module of a family, None if there is none that can be imported."""
    try:
        return importlib.import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit):  # one of mlx-lm's modules exits where a package is missing
        return None


def is_port(family: ModuleType) -> bool:
    """Return whether a family's module is a port of this package."""
    return family.__name__.startswith(f"{__name__}.")


def text_args(family: ModuleType, text: dict) -> Any:
    """Return the dataclass that reads a family's `text_config` (`text`).

    It is ModelArgs if the family has no field `text_config`, or no dataclass for it is found.
    """
    args = family.ModelArgs
    if "text_config" not in field_names(args):
        return args
    for module in _modules(args):
        for name, found in vars(module).items():
            if "Text" in name and dataclasses.is_dataclass(found):
                return found
    inner = {m.__name__.rpartition(".")[2]: m for module in _modules(args) for m in _imported(module)}
    own = text.get("model_type") or ""
    chosen = inner.get(REMAPPED.get(own, own)) or next(iter(inner.values()), None)
    return args if chosen is None else text_args(chosen, text)


def field_names(args: Any) -> set[str]:
    """Return the names of the fields that a dataclass reads from config.json."""
    return {field.name for field in dataclasses.fields(args) if field.init}


def _modules(args: type) -> list[ModuleType]:
    """Return this package's and mlx-lm's modules that define a class and its bases."""
    names = (kind.__module__ for kind in args.__mro__)
    return [sys.modules[name] for name in names if name.startswith(("mlx_lm.", __name__))]


def _imported(module: ModuleType) -> list[ModuleType]:
    """Return the families of mlx-lm that a module imports."""
    inside = (found for found in vars(module).values() if isinstance(found, ModuleType))
    return [found for found in inside if found.__name__.startswith("mlx_lm.models.") and hasattr(found, "ModelArgs")]


def drafter_kinds() -> list[ModuleType]:
    """Return the modules of all kinds of external drafters, in the order in which they are tried."""
    return [importlib.import_module(f".{name}", __package__) for name in DRAFTERS]
