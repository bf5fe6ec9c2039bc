"""Find the vision tower of a model_type.

A module of this package serves one kind of tower and defines:
PREFIXES: prefixes of its tensors' names in checkpoints. own_name(name): a tensor's name inside the tower.
Tower(config): the tower as a module with features of `width` columns. `stages(patches, grid)` yields arrays to
    evaluate one after the other, the last of which are the features [rows, width]; `scratch(grid)` estimates the
    bytes of its temporary arrays; `sanitized(weights)` returns parameters by path for tensors by their own names.
    `embed` is set to the function that returns the language model's embeddings of tokens.
Pixels(settings, config, path): what prepares pictures for the tower. `grid(height, width, most)` returns a picture's
    size (1, h, w) in rows of the prompt, resized to at most `most` pixels (None: its own maximum), or to the smallest
    size that the tower was trained on if that has more; `patches(pixels, grid)` returns the tower's input.
find_mark(config): the id of the token that stands for a picture in a rendered chat template.
find_written(config): the ids of all tokens that a chat template writes for a picture, with that one among them.
Tower, Pixels and find_mark raise ValueError, KeyError, TypeError, AttributeError or ZeroDivisionError if config.json
describes something else.
"""

import importlib
from types import ModuleType

from .. import REMAPPED

TOWERS = {"qwen3_5": "qwen", "qwen3_5_moe": "qwen", "step3p7": "step"}


def find_tower(config: dict) -> ModuleType | None:
    """Return the module for the vision tower of a config.json's model_type; None if the family has none here."""
    family = str(config.get("model_type"))
    name = TOWERS.get(REMAPPED.get(family) or family)
    return None if name is None else importlib.import_module(f".{name}", __package__)


def tower_names() -> list[str]:
    """Return every model_type whose vision tower is supported, sorted."""
    return sorted(TOWERS)
