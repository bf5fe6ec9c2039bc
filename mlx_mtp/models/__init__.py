"""Find the port of a model_type, and the kinds of external drafters.

A port `mlx_mtp/models/<model_type>.py` defines `ModelArgs`, mlx-lm's dataclass of config.json with
`num_hidden_layers` and `vocab_size`; and `Model(args, heads=0, spec=None)`: in front of mlx-lm's model
`layers.port.Port`, of whose attributes and methods it states what is another one's here. Nothing outside this package
knows a family by name.

A drafter in a directory of its own (DRAFTERS) defines instead `refuses(config, names)`, `make_spec(config, names,
num_hidden_layers, overrides)`, `features(header)`, `make_head(spec, config, names, captured)`, ACCEPTED and IGNORED.
"""

import importlib
from pathlib import Path
from types import ModuleType

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


def drafter_kinds() -> list[ModuleType]:
    """Import every kind of external drafter."""
    return [importlib.import_module(f".{name}", __package__) for name in DRAFTERS]
