"""Find the vision tower of a model_type.

A module of this package serves one kind of tower and defines:
PREFIXES: beginnings of its tensors' names in checkpoints; the rest of a name is the tensor's own name.
Tower(config): the tower as a module. `stages(patches, grid)` yields arrays to evaluate one after the other, the last of
    which are the features [rows, H]; `sanitized(weights)` returns parameters by path for tensors by their own names.
Pixels(path, config): what prepares pictures for the tower. `grid(height, width, most)` returns a picture's size in rows
    of the prompt (1, h, w), `patches(pixels, most)` the tower's input; `most` limits the pixels after resizing.
find_mark(config): the token that stands for a picture in a rendered chat template.
Tower, Pixels and find_mark raise ValueError, KeyError or TypeError if config.json describes something else.
"""

import importlib
from types import ModuleType

TOWERS = {"qwen3_5": "qwen", "qwen3_5_moe": "qwen"}


def find_tower(config: dict) -> ModuleType | None:
    """Return the module for the vision tower of a config.json's model_type; None if the family has none here."""
    name = TOWERS.get(config["model_type"])
    return None if name is None else importlib.import_module(f".{name}", __package__)


def tower_names() -> list[str]:
    """Return every model_type whose vision tower is supported, sorted."""
    return sorted(TOWERS)
