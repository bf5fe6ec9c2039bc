"""Quantize, dequantize and cast a model's parameters for a conversion, the target and the MTP heads separately.

All arrays stay lazy: they are computed when they are written.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..kernels import BLOCK_FORMATS
from ..layers import blocks
from ..layers.scaled import SCALE, ScaledLinear, ScaledSwitchLinear, dequantized_weight
from .parameters import named

MODES = {  # MLX's group sizes and bits, the default first
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")  # mlx-lm's
DTYPES = ("float16", "bfloat16", "float32")
HEAD_BITS = 8
UNQUANTIZED = 16  # bits of heads that stay unchanged
# A head's fusion of its inputs, and routers; of a block drafter the inputs of its convolutions, selector and heads.
WIDE = "kernel_projection|hidden_projection|markov_w1|markov_head.gate_proj|joint_proj|confidence_head.proj"
KEPT = re.compile(rf"(^|\.)(eh_proj|fc|gate|shared_expert_gate|{WIDE})$")
PLAIN = {
    nn.QuantizedLinear: nn.Linear,
    ScaledLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    ScaledSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
    **blocks.PLAIN,
}


@dataclass(frozen=True)
class Format:
    """A quantization format: MLX's, or one of BLOCK_FORMATS."""

    group_size: int
    bits: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.mode} g{self.group_size}"


@dataclass(frozen=True)
class Precision:
    """The formats of a conversion; None leaves parameters unchanged. ValueError for contradictions and unknown names.

    recipe: name of mlx-lm's mixture of bits, for the target. heads_named: the user chose the heads' format, so that
    heads that cannot have it are an error. dtype: of floating-point parameters, the target's and the heads', also
    scales; None is config.json's.
    """

    target: Format | None = None
    recipe: str | None = None
    heads: Format | None = None
    heads_named: bool = False
    dequantize: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("dtype", self.dtype, DTYPES), ("quant_predicate", self.recipe, RECIPES)):
            if value not in (None, *allowed):
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
        if self.recipe is not None and (self.target is None or self.target.mode != "affine"):
            raise ValueError(f"quant_predicate={self.recipe!r}: only with quantize=True and q_mode='affine'")
        if self.dequantize and (self.target or self.heads):
            raise ValueError("dequantize=True: not together with quantize=True or bits of the heads")

    def apply(self, model: Any, declared: str | None) -> None:
        """Cast, dequantize and quantize a port's model in place; ValueError if that is impossible.

        declared: config.json's type, which is used if no `dtype` was chosen; types outside DTYPES are ignored. Heads
        that cannot be quantized are an error only if `heads_named`.
        """
        if (dtype := self.dtype or declared) in DTYPES:
            _cast(model, getattr(mx, dtype))
        plain = getattr(mx, dtype) if dtype in DTYPES else mx.bfloat16
        if self.dequantize:
            _dequantize(model, plain, list(formats(model)))
        # 8-bit floats with an output scale, as in FP8 releases, of the parts that are to be quantized
        scaled = [path for path, m in model.named_modules() if SCALE in m and m.mode == "mxfp8"]
        _dequantize(model, plain, [p for p in scaled if (self.heads if p.startswith("mtp.") else self.target)])
        before = formats(model)
        if self.target and not _quantize_target(model, self.target, self.recipe):
            raise ValueError(f"quantize=True: {_nothing_left(before, heads=False)}")
        if self.heads and self.heads_named and not model.mtp:
            raise ValueError(f"mtp_q_bits={self.heads.bits}: the checkpoint has no MTP heads")
        if self.heads:
            count = sum(_quantize(head, self.heads, lambda at, _: KEPT.search(at) is None) for head in model.mtp)
            if not count and self.heads_named:
                raise ValueError(f"mtp_q_bits={self.heads.bits}: {_nothing_left(before, heads=True)}")


def format_of(group_size: int | None, bits: int | None, mode: str = "affine", prefix: str = "") -> Format:
    """Return a format of MLX, with the mode's defaults for None; ValueError for others.

    prefix: of the arguments' names in the message.
    """
    if mode not in MODES:
        raise ValueError(f"q_mode={mode!r}: allowed are {', '.join(MODES)}")
    sizes, widths = MODES[mode]
    for name, given, allowed in (("q_group_size", group_size, sizes), ("q_bits", bits, widths)):
        if given not in (None, *allowed):
            raise ValueError(f"{prefix}{name}={given}: {mode} allows {', '.join(map(str, sorted(allowed)))}")
    return Format(group_size or sizes[0], bits or widths[0], mode)


def format_of_heads(
    group_size: int | None, bits: int | None, *, quantize: bool = False
) -> tuple[Format | None, bool]:
    """Return (the heads' format, whether the user chose it); the format None leaves the heads unchanged.

    quantize: whether the target is quantized, which quantizes the heads to 8 bits by default. 16 bits are (None,
    False). ValueError for a format that MLX lacks, or 16 bits with a group size.
    """
    if bits == UNQUANTIZED:
        if group_size is not None:
            raise ValueError(f"mtp_q_group_size={group_size}: not with mtp_q_bits={UNQUANTIZED}, no quantization")
        return None, False
    named = (bits, group_size) != (None, None)
    return (format_of(group_size, bits or HEAD_BITS, prefix="mtp_") if named or quantize else None), named


def formats(model: nn.Module) -> dict[str, Format]:
    """Return the format of every quantized module by its path."""
    found: Any = [(path, m) for path, m in model.named_modules() if "scales" in m]
    return {path: Format(m.group_size, m.bits, getattr(m, "mode", "affine")) for path, m in found}


def listed(found: dict[str, Format]) -> dict[str, Any] | None:
    """Return config.json's "quantization": the target's usual format, and modules of other formats by path.

    The usual format is the most frequent of MLX's own formats in the target or, if it has none of these, of block
    formats. None if no module of the target is quantized, even if heads are.
    """
    target = Counter(form for path, form in found.items() if not path.startswith("mtp."))
    if not target:
        return None
    known = Counter({form: count for form, count in target.items() if form.mode not in BLOCK_FORMATS})
    usual = (known or target).most_common(1)[0][0]
    return asdict(usual) | {path: asdict(form) for path, form in found.items() if form != usual}


def _nothing_left(found: dict[str, Format], *, heads: bool) -> str:
    kinds = sorted({str(form) for path, form in found.items() if path.startswith("mtp.") == heads})
    state = f"already {', '.join(kinds)}" if kinds else "not in rows of whole groups (no multiple of the group size)"
    return f"nothing left to quantize in {'the heads' if heads else 'the target'}, whose matrices are {state}"


def _quantize_target(model: Any, form: Format, recipe: str | None) -> int:
    """Quantize the target as mlx-lm does, by a recipe or with the family's exceptions.

    Return the number of modules quantized now.
    """
    heads = model.pop("mtp")  # a recipe counts layers by their names
    predicate: Any = getattr(model, "quant_predicate", None)
    if recipe is not None:
        predicate = mixed_quant_predicate_builder(recipe, model, form.group_size)
    count = _quantize(model, form, predicate)
    model.mtp = heads
    return count


def _quantize(module: nn.Module, form: Format, predicate: Callable[[str, nn.Module], bool | dict] | None) -> int:
    """Quantize submodules that `predicate` selects and whose rows are whole groups; return their number.

    predicate: None selects all. Submodules without an implementation of quantization are left out.
    """

    def chosen(path: str, m: Any) -> bool | dict:
        if not hasattr(m, "to_quantized"):
            return False
        choice = True if predicate is None else predicate(path, m)
        size = choice["group_size"] if isinstance(choice, dict) else form.group_size
        return choice if m.weight.shape[-1] % size == 0 else False

    before = len(formats(module))
    nn.quantize(module, form.group_size, form.bits, mode=form.mode, class_predicate=chosen)
    return len(formats(module)) - before


def _dequantize(model: nn.Module, dtype: mx.Dtype, paths: list[str]) -> None:
    """Replace the quantized modules at these paths by unquantized ones.

    Weights of affine modules get the type of their scales, others `dtype`. ValueError for an unsupported class, or a
    module with a global scale.
    """
    ordinary, modules = [], dict(model.named_modules())
    for path in paths:
        m: Any = modules[path]
        kind: Any = PLAIN.get(type(m))
        if kind is None or m.get("global_scale") is not None:
            scaled = "" if kind is None else " with a global scale"
            raise ValueError(f"dequantize=True: {path} is a {type(m).__name__}{scaled}, which cannot be dequantized")
        weight = dequantized_weight(m, dtype)
        plain = kind(*[1] * weight.ndim)
        plain.weight = weight
        plain.pop("bias", None)
        if "bias" in m:
            plain.bias = m.bias
        ordinary.append((path, plain))
    model.update_modules(tree_unflatten(ordinary))


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Cast floating-point parameters, except output scales and what the family's `cast_predicate` excludes."""
    chosen = getattr(model, "cast_predicate", None) or (lambda path: True)
    parameters = {path: w for path, w in named(model).items() if not path.endswith(f".{SCALE}")}
    floats = [(path, w) for path, w in parameters.items() if mx.issubdtype(w.dtype, mx.floating)]
    model.load_weights([(path, w.astype(dtype)) for path, w in floats if chosen(path)], strict=False)
