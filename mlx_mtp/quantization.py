"""Which of a model's modules are stored in how many bits: chosen for target and heads apart, undone, and in words.

Nothing is computed here: parameters stay what they will be computed from.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

MODES = {  # mlx's: group sizes and bits, the default first
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")  # mlx-lm's
DTYPES = ("float16", "bfloat16", "float32")
HEAD_BITS = 8
UNQUANTIZED = 16  # bits of heads that stay as they are
KEPT = re.compile(r"(^|\.)(eh_proj|gate|shared_expert_gate)$")  # of a head: what it fuses with, and routers
PLAIN = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
Predicate = Callable[[str, nn.Module], bool | dict]


@dataclass(frozen=True)
class Format:
    """How MLX packs a matrix."""

    group_size: int
    bits: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.mode} g{self.group_size}"


def make_format(group_size: int | None, bits: int | None, mode: str = "affine", prefix: str = "") -> Format:
    """The format with the mode's defaults for what is None; ValueError names the argument, after `prefix`."""
    if mode not in MODES:
        raise ValueError(f"{prefix}q_mode={mode!r}: allowed are {', '.join(MODES)}")
    sizes, widths = MODES[mode]
    for name, given, allowed in (("q_group_size", group_size, sizes), ("q_bits", bits, widths)):
        if given not in (None, *allowed):
            listed = ", ".join(map(str, sorted(allowed)))
            raise ValueError(f"{prefix}{name}={given}: {mode} allows {listed}")
    return Format(group_size or sizes[0], bits or widths[0], mode)


def formats(model: nn.Module) -> dict[str, Format]:
    """The format of every quantized module, by its path."""
    found: Any = {path: m for path, m in model.named_modules() if "scales" in m}
    return {path: Format(m.group_size, m.bits, getattr(m, "mode", "affine")) for path, m in found.items()}


def listed(model: nn.Module) -> dict[str, Any] | None:
    """config.json's "quantization": the target's usual format, and by path what differs; None where it has none."""
    found = formats(model)
    target = Counter(f for path, f in found.items() if not path.startswith("mtp."))
    if not target:
        return None
    usual = target.most_common(1)[0][0]
    return asdict(usual) | {path: asdict(f) for path, f in found.items() if f != usual}


def quantize_target(model: Any, form: Format, recipe: str | None = None) -> int:
    """Quantize what mlx-lm would, with the family's exceptions or by a recipe of mlx-lm's; how many modules."""
    heads = model.pop("mtp")  # a recipe counts layers by the names that it sees
    predicate = getattr(model, "quant_predicate", None)
    if recipe is not None:
        predicate = mixed_quant_predicate_builder(recipe, model, form.group_size)
    count = _quantize(model, form, predicate)
    model.mtp = heads
    return count


def quantize_heads(model: Any, form: Format) -> int:
    """Quantize the heads but for the matrix that fuses their inputs, and routers; how many modules."""
    return sum(_quantize(head, form, lambda path, _: KEPT.search(path) is None) for head in model.mtp)


def _quantize(module: nn.Module, form: Format, predicate: Predicate | None) -> int:
    """Quantize the submodules that can be, that `predicate` names, and whose rows are whole groups."""

    def choose(path: str, m: Any) -> bool | dict:
        if not hasattr(m, "to_quantized"):
            return False
        chosen = True if predicate is None else predicate(path, m)
        size = chosen["group_size"] if isinstance(chosen, dict) else form.group_size
        return chosen if m.weight.shape[-1] % size == 0 else False

    before = len(formats(module))
    nn.quantize(module, form.group_size, form.bits, mode=form.mode, class_predicate=choose)
    return len(formats(module)) - before


def dequantize(model: nn.Module) -> None:
    """Every quantized module as an ordinary one, of the type of its scales."""
    plain = [(path, _plain(path, m)) for path, m in model.named_modules() if "scales" in m]
    model.update_modules(tree_unflatten(plain))


def _plain(path: str, m: Any) -> nn.Module:
    kind: Any = PLAIN.get(type(m))
    if kind is None or m.get("global_scale") is not None:
        raise ValueError(f"dequantize: {path} is a {type(m).__name__} that cannot be turned back")
    weight = mx.dequantize(m.weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode)
    plain = kind(*[1] * weight.ndim)
    if "bias" in m:
        plain.bias = m.bias
    else:
        plain.pop("bias", None)
    plain.weight = weight
    return plain


def cast(model: Any, dtype: str) -> None:
    """Give floating-point parameters a type, but for those that the family keeps in their own."""
    predicate, wanted = getattr(model, "cast_predicate", None), getattr(mx, dtype)

    def as_wanted(path: str, w: mx.array) -> mx.array:
        kept = not mx.issubdtype(w.dtype, mx.floating) or (predicate is not None and not predicate(path))
        return w if kept else w.astype(wanted)

    model.update(tree_map_with_path(as_wanted, model.parameters()))
