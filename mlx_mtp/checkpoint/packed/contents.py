"""Recognize the packed weights of a sorted checkpoint, and check the few values that decide how they are read."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files import Header, read_tensors
from ..quant_methods import QuantSettings, settings_of
from ..sort_tensors import OF_ACTIVATIONS, Contents
from ..weight_files import StoredTensors
from .find import find_packed, replaced
from .modules import Packed, PackedModule

MANTISSA, EXPONENT, INFINITY = 0x7FFFFF, 23, 255  # of float32: mask, bits after the exponent, its largest value
BLOCK = 512  # bytes of a block in `stat`
ORDERS = ("g_idx", "weight_g_idx")


def with_packed(contents: Contents, path: Path, config: dict[str, Any]) -> Contents:
    """Return a checkpoint's contents with its packed weights, whose header entries are those of MLX's formats.

    Of a checkpoint opened for its heads, only the heads' packed weights are recognized. ValueError for incomplete or
    unsupported packed weights.
    """
    header = contents.heads | ({} if contents.alone else contents.trunk)
    packed = recognize(path, config, header, contents.stored)
    trunk, heads = (replaced(part, packed) for part in (contents.trunk, contents.heads))
    return replace(contents, trunk=trunk, heads=heads, packed=packed)


def recognize(path: Path, config: dict[str, Any], header: Header, stored: StoredTensors | None) -> dict[str, Packed]:
    """Return the packed weights among a checkpoint's tensors by module; ValueError as `with_packed`.

    Read here are the order of columns in groups, where it is stored (ValueError for another order than that of the
    columns), and float32 scales that should be powers of two; a weight whose scales are not is left out.
    """
    used = {name: tensor for name, tensor in header.items() if not name.endswith(OF_ACTIVATIONS)}
    folders = {tensor.file.parent for tensor in used.values()}
    settings = {folder: _settings(path, config, folder) for folder in folders}
    packed = find_packed(path, used, settings, stored)
    checks = {module: check for module, weight in packed.items() if (check := _check(weight, module)) is not None}
    mx.eval(list(checks.values()))
    failed = {module for module, check in checks.items() if not check.item()}
    for module in failed:
        weight = packed[module]
        if (order := next((name for name in ORDERS if name in weight.parts), None)) is not None:
            found = PackedModule(path, module, weight.parts, settings[weight.tensor.file.parent])
            raise found.refuse(f"tensor {module}.{order} puts columns into groups out of order (act-order, desc_act)")
    return {module: weight for module, weight in packed.items() if module not in failed}


def _settings(path: Path, config: dict[str, Any], folder: Path) -> QuantSettings:
    """Return the quantization settings of weight files in a folder: those of `config` for a folder inside `path`.

    Another folder belongs to another checkpoint, whose config.json in that folder is used; a missing or damaged
    config.json counts as empty.
    """
    if folder.is_relative_to(path):
        return settings_of(path, config)
    found: Any = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / "config.json").read_text())
    return settings_of(folder, found if isinstance(found, dict) else {})


def _check(weight: Packed, module: str) -> mx.array | None:
    """Return a lazy bool: whether columns are in order, or scales powers of two; None if neither is to be checked.

    Of a file without data, no scales are checked, and the order is the one that config.json states.
    """
    order = next((name for name in ORDERS if name in weight.parts), None)
    hole = _is_hole(weight.tensor.file)
    if order is None and (weight.kind != "mxfp8" or weight.parts[weight.scales].dtype != "F32" or hole):
        return None
    if order is not None and hole:
        return mx.array(not weight.act_order)
    name = f"{module}.{order or weight.scales}"
    (values,) = read_tensors({name: weight.raw(module)[name]}).values()
    if order is not None:
        return mx.array_equal(values.view(mx.int32), mx.arange(values.size, dtype=mx.int32) // weight.block[1])
    bits = values.view(mx.uint32)
    return ((bits & MANTISSA == 0) & (bits >> EXPONENT > 0) & (bits >> EXPONENT < INFINITY)).all()


@cache
def _is_hole(file: Path) -> bool:
    """Return whether a file has a header and no data, as those of hub checkpoints that are only inspected."""
    stat = file.stat()
    return 2 * BLOCK * stat.st_blocks < stat.st_size
