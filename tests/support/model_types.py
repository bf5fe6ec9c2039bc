"""Tiny configurations and checkpoints of every model type of mlx-lm, made from the fields of its arguments."""

import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import tiny
from mlx.utils import tree_flatten
from type_sizes import EXCEPTIONS, INSIDE, SMALL

from mlx_mtp.models import find_family, text_args

# Types that no CPU of ours runs, and why.
NOT_RUN = {
    "bitnet": "its layers run Metal kernels, which no CPU runs",
    "muse_spark": "its layers run Metal kernels, which no CPU runs",
    "olmo": "mlx-lm's own module needs the package ai2-olmo, and adds the word of a mask to scores",
}


def model_types() -> list[str]:
    """Return the names of mlx-lm's files that define a Model, sorted."""
    files = Path(mlx_lm.models.__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if re.search(r"^class Model\b", file.read_text(), re.MULTILINE))


def module_of(model_type: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{model_type}")


def tiny_config(model_type: str) -> dict:
    """Return a config.json of a few layers of every kind that the type has."""
    module, inner = module_of(model_type), INSIDE.get(model_type, model_type)
    family: Any = find_family({"model_type": model_type})
    config = _small(module.ModelArgs, model_type, model_type)
    if "text_config" not in _fields(module.ModelArgs):
        return config
    return config | {"text_config": _small(text_args(family, {"model_type": inner}), inner, model_type)}


def _fields(arguments: type) -> dict[str, bool]:
    """Return the fields of a dataclass by name: whether each is required."""
    missing = dataclasses.MISSING
    return {f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(arguments)}


def _small(arguments: type, model_type: str, outer: str) -> dict:
    """Return small values of a dataclass's fields. KeyError for a required field that no table has.

    outer: the type whose config.json this is part of.
    """
    values = SMALL | EXCEPTIONS.get(model_type, {}) | EXCEPTIONS.get(outer, {}) | {"model_type": model_type}
    fields = _fields(arguments)
    fields.pop("text_config", None)
    return {name: values[name] for name, required in fields.items() if name in values or required}


def random_weights(shapes: dict[str, mx.array], seed: int = 0) -> dict[str, mx.array]:
    """Return random values for a model's parameters; norms are near one, biases small and positive."""
    rng = np.random.default_rng(seed)

    def draw(name: str, like: mx.array) -> mx.array:
        if like.dtype == mx.uint32:
            return mx.array(rng.integers(0, 2**32, like.shape, dtype=np.uint32))
        values = rng.standard_normal(like.shape, dtype=np.float32)
        if name.endswith("signs"):
            values = np.sign(values)
        elif name.endswith("bias"):
            values = 0.05 * np.abs(values)
        elif "norm" in name or ".ln" in name:
            values = 1 + 0.1 * values
        else:
            values *= 0.08 if "emb" in name or "wte" in name else 0.3
        return mx.array(values).astype(like.dtype)

    return {name: draw(name, like) for name, like in shapes.items()}


def save(path: Path, config: dict, seed: int = 0) -> Path:
    """Write a checkpoint with random weights under the names of mlx-lm's own parameters."""
    module = module_of(config["model_type"])
    model = module.Model(module.ModelArgs.from_dict(config))
    return tiny.save(path, config, random_weights(dict(tree_flatten(model.parameters())), seed))
