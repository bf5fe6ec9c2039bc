"""Make a port's parameters from a checkpoint's tensors, plain, of 8-bit floats, or packed."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from ..layers.blocks import place_blocks
from .files import dequantized, read_tensors
from .packed.arrays import read_arrays
from .packed.sanitize import Tensors, sanitized
from .parameters import expected
from .sort_tensors import Contents

Raw = tuple[bool, bool]  # whether the trunk's norms are stored zero-centred, and whether the heads' are


def parameters_of(model: Any, contents: Contents, path: Path, raw: Raw, weights: dict) -> Tensors:
    """Return the model's parameters by path, lazy, made by the port from the checkpoint's tensors.

    The model's modules that are stored in block formats are replaced to load them. raw: parts whose norms get +1 (see
    `Raw`). weights: mlx-lm's argument, ignored. ValueError if a tensor that the port stacks or splits is missing.
    """
    made = {name for module, weight in contents.packed.items() for name in weight.header(module)}
    parts = ({} if contents.alone else contents.trunk, contents.heads)
    plain = [{name: tensor for name, tensor in part.items() if name not in made} for part in parts]
    stored = read_tensors(plain[0] | plain[1])  # no name is in both
    trunk, heads = (dequantized({name: stored[name] for name in part}, part) for part in plain)
    call = partial(_sanitize, model, trunk, heads, contents.heads.keys(), raw)
    try:
        made = sanitized(call, read_arrays(contents.packed), model, trunk | heads)
    except KeyError as e:  # mlx-lm does not check the tensors that it stacks or splits
        ((file, raw_name),) = expected(model, contents, path, [str(e.args[0])])
        raise ValueError(f"{file}: tensor {raw_name} is missing; the rest of its layer needs it") from None
    place_blocks(model, made)
    return made


def _sanitize(
    model: Any, trunk: Tensors, heads: Tensors, of_heads: Collection[str], raw: Raw, weights: Tensors
) -> Tensors:
    """Return the port's parameters from the plain tensors of trunk and heads, and packed modules' weights by name."""
    mine = {name: w for name, w in weights.items() if name in of_heads}
    others = {name: w for name, w in weights.items() if name not in of_heads}
    return model.sanitized(trunk | others, heads | mine, shift_trunk=raw[0], shift_heads=raw[1])
