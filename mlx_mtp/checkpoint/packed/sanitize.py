"""Pass packed weights through a family's `sanitize`, which may rename, stack and split unquantized weights.

`sanitize` is called for the words, for the groups' scales, for the biases, and first with a number for each row
instead of the weights: the numbers show which weight each row of a parameter comes from, and so which factor
multiplies it.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn import Linear, Module
from mlx_lm.models.switch_layers import SwitchLinear

from ...layers.scaled import SCALE
from .arrays import Arrays

Tensors = dict[str, mx.array]
NUMBERS = mx.int32  # no parameter has this type


def sanitized(
    call: Callable[[Tensors], Tensors], packed: dict[str, Arrays], model: Module, plain: Tensors
) -> Tensors:
    """Return the parameters of `call(weights)`, with scales, biases and output scales of quantized modules; lazy.

    call: returns the sanitized parameters of the whole checkpoint, in which `weights`, by name, stand for the packed
    weights; it is called several times. plain: the checkpoint's other tensors. Packed weights that become something
    else than rows of a quantizable module, such as MLA's, are dequantized to the type of the norms. If groups of the
    target have float16 scales, all bfloat16 parameters become float16 as in mlx-lm, because MLX would compute in
    float32. ValueError if packed weights have another shape than their module.
    """
    if not packed:
        return call({})
    factors = [(m, i) for m, a in packed.items() for i in range(_count(a))]
    origins = _origins(call(_numbers(packed)), packed, factors, model)
    quantized = {module for numbers in origins.values() for module in _modules(numbers, factors)}
    dtype = next((w.dtype for name, w in plain.items() if name.endswith("norm.weight")), mx.bfloat16)
    whole = {f"{m}.weight": a.dequantized(dtype) for m, a in packed.items() if m not in quantized}
    kept = {f"{m}.weight": packed[m] for m in sorted(quantized)}
    found = call({name: a.words for name, a in kept.items()} | whole)
    scales = call({name: a.scales for name, a in kept.items()} | whole)
    affine = any(a.biases is not None for a in kept.values())
    parts = {name: a.scales if a.biases is None else a.biases for name, a in kept.items()}
    biases = call(parts | whole) if affine else {}
    rows = {name: a.factor_of_rows() for name, a in kept.items()}
    each = call(rows | whole) if any(a.by_row for a in kept.values()) else {}
    for path, numbers in origins.items():
        module = path.removesuffix(".weight")
        found[f"{module}.scales"] = scales[path]
        if scales[path].dtype != mx.uint8:
            found[f"{module}.biases"] = biases[path]
        if any(packed[m].by_row for m in _modules(numbers, factors)):
            found[f"{module}.{SCALE}"] = each[path].squeeze(-1)
        elif any(packed[m].factor is not None for m in _modules(numbers, factors)):
            found[f"{module}.{SCALE}"] = _output_scale(numbers, factors, packed)
    if any(scales[path].dtype == mx.float16 for path in origins if not path.startswith("mtp.")):
        return {name: w.astype(mx.float16) if w.dtype == mx.bfloat16 else w for name, w in found.items()}
    return found


def _numbers(packed: dict[str, Arrays]) -> Tensors:
    """Return, instead of each weight, an array [(E,) rows, 1]: for each row, the index of its factor.

    Indices count the factors of all weights, `_count` for each. A weight with a factor per row has a single index;
    its factors go through `sanitize` themselves.
    """
    found, start = {}, 0
    for module, a in packed.items():
        size, shape = _count(a), (*a.words.shape[:-1], 1)
        own = mx.arange(start, start + size, dtype=NUMBERS).reshape(-1, *[1] * (len(shape) - 1))
        found[f"{module}.weight"] = mx.broadcast_to(own, shape)
        start += size
    return found


def _count(a: Arrays) -> int:
    """Return the number of a weight's factors of whole matrices; 1 if it has no factor, or one per row."""
    return 1 if a.factor is None or a.by_row else a.factor.size


def _origins(
    made: Tensors, packed: dict[str, Arrays], factors: list[tuple[str, int]], model: Module
) -> dict[str, np.ndarray]:
    """Return, by parameter that can be quantized, the index in `factors` for each row: int [..., rows].

    made: the parameters that `call` makes from `_numbers`. A parameter is left out if it contains rows of a weight
    any part of which cannot be quantized.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    numbers = {path: np.array(w) for path, w in made.items() if w.dtype == NUMBERS}
    dropped = {p: n for p, n in numbers.items() if not _is_quantizable(p, n, modules, packed, factors)}
    while dropped:
        numbers = {path: n for path, n in numbers.items() if path not in dropped}
        lost = {module for n in dropped.values() for module in _modules(n, factors)}
        dropped = {path: n for path, n in numbers.items() if lost & _modules(n, factors)}
    return {path: n[..., 0] for path, n in numbers.items()}


def _is_quantizable(path: str, numbers: np.ndarray, modules: dict[str, Any], packed: dict, factors: list) -> bool:
    """Return whether a parameter consists of rows of packed weights of one format, and its module can be quantized.

    If a weight has a factor, the module also has to be a Linear or SwitchLinear. ValueError if the weights have
    another shape than the module's.
    """
    module, _, kind = path.rpartition(".")
    if kind != "weight" or numbers.shape[-1:] != (1,) or not hasattr(modules.get(module), "to_quantized"):
        return False
    weights = [packed[name] for name in _modules(numbers, factors)]
    scaled = any(weight.factor is not None for weight in weights)
    if len({(w.mode, w.bits, w.group_size) for w in weights}) > 1:
        return False
    expected, shape = modules[module].weight.shape, (*numbers.shape[:-1], weights[0].shape[-1])
    if shape != expected:
        raise ValueError(f"{weights[0].place} makes {path} of shape {shape}; config.json expects {expected}")
    return not scaled or type(modules[module]) in (Linear, SwitchLinear)


def _modules(numbers: np.ndarray, factors: list[tuple[str, int]]) -> set[str]:
    return {factors[i][0] for i in np.unique(numbers)}


def _output_scale(numbers: np.ndarray, factors: list[tuple[str, int]], packed: dict[str, Arrays]) -> mx.array:
    """Return the factor of each row [(E,) rows] or, if it is the same in all rows of each matrix, [1] or [E].

    numbers: the index in `factors` for each row.
    """
    if (numbers == numbers[..., :1]).all():
        numbers = numbers[..., 0].reshape(-1)
    used, places = np.unique(numbers, return_inverse=True)
    values = [(packed[m].factor, i) for m, i in (factors[n] for n in used)]
    found = mx.concatenate([mx.ones(1) if factor is None else factor[i : i + 1] for factor, i in values])
    return found[mx.array(places.reshape(numbers.shape).astype(np.uint32))]
