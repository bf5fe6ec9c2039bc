"""Find the port of a model_type, and the kinds of external drafters.

A port `mlx_mtp/models/<model_type>.py` defines `ModelArgs`, mlx-lm's dataclass of config.json with
`num_hidden_layers` and `vocab_size`; and `Model(args, heads=0, spec=None)`: in front of mlx-lm's model
`layers.port.Port`, of whose attributes and methods it states what is another one's here. Nothing outside this package
knows a family by name. Where transformers writes a family's config.json in other terms than `ModelArgs` has,
`ModelArgs.respelled(config)` returns it in these.

A drafter in a directory of its own (DRAFTERS) defines instead `refuses(config, names)`, `make_spec(config, names,
num_hidden_layers, overrides)`, `features(header)`, `make_head(spec, config, names, captured)`, ACCEPTED and IGNORED.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

DRAFTERS = ("eagle3",)
# Beside mlx-lm's other names of a model_type: a text model exported without its wrapper, with a flat config.json.
REMAPPED = {**MODEL_REMAPPING, "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def port_names() -> list[str]:
    """List every model_type that has a port."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", *DRAFTERS))


def find_port(config: dict) -> ModuleType | None:
    """Import the port of a config.json's model_type, or of the one that it is another name of; None without one."""
    model_type = REMAPPED.get(config["model_type"], config["model_type"])
    return importlib.import_module(f".{model_type}", __package__) if model_type in port_names() else None


def find_family(config: dict) -> ModuleType | None:
    """Import the module of a config.json's model_type, a port or else mlx-lm's; None where there is neither."""
    if port := find_port(config):
        return port
    name = REMAPPED.get(config["model_type"], config["model_type"])
    try:
        return importlib.import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit):  # one of mlx-lm's modules exits where a package is missing
        return None


def is_port(family: ModuleType) -> bool:
    """Whether a family is one of the ports here."""
    return family.__name__.startswith(f"{__name__}.")


def text_args(family: ModuleType, text: dict) -> Any:
    """Find the dataclass that reads a family's `text_config`; its ModelArgs where that has no such field."""
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
    """List the fields that a dataclass reads of config.json."""
    return {field.name for field in dataclasses.fields(args) if field.init}


def _modules(args: type) -> list[ModuleType]:
    """List the modules that define a class and its bases."""
    names = (kind.__module__ for kind in args.__mro__)
    return [sys.modules[name] for name in names if name.startswith(("mlx_lm.", __name__))]


def _imported(module: ModuleType) -> list[ModuleType]:
    """List the families of mlx-lm that a module imports."""
    inside = (found for found in vars(module).values() if isinstance(found, ModuleType))
    return [found for found in inside if found.__name__.startswith("mlx_lm.models.") and hasattr(found, "ModelArgs")]


def drafter_kinds() -> list[ModuleType]:
    """Import every kind of external drafter."""
    return [importlib.import_module(f".{name}", __package__) for name in DRAFTERS]
