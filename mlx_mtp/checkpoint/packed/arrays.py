"""Convert packed weights to the arrays of MLX's quantized layers, lazily: the integers and groups' scales stay."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils

from ...layers.scaled import SCALE
from ..files import read_tensors
from .modules import WORD, Packed

EXPONENT = 23  # bits after float32's exponent
ONE = 127  # the code of 1 as a group's scale


@dataclass(frozen=True)
class Arrays:
    """One weight in MLX's format: words [(E,) rows, columns * bits / 32], and scales and biases of its groups.

    factor: float32 [1] for the whole weight, [E] for each matrix or [(E,) rows] for each row, which multiplies it;
    None is 1. place: file and tensor, for messages.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array | None
    factor: mx.array | None
    group_size: int
    bits: int
    mode: str
    place: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-1], self.words.shape[-1] * WORD // self.bits)

    def parameters(self) -> dict[str, mx.array]:
        """Return the parameters of MLX's quantized linear layer by name, and the factor, if any, as output scale."""
        found = {"weight": self.words, "scales": self.scales, "biases": self.biases, SCALE: self.factor}
        return {name: array for name, array in found.items() if array is not None}

    @property
    def by_row(self) -> bool:
        """Whether `factor` has one number per row; False if it is None."""
        return self.factor is not None and self.factor.shape == self.words.shape[:-1]

    def factor_of_rows(self) -> mx.array:
        """Return the factor of each row, float32 [(E,) rows, 1]."""
        factor = mx.ones(1) if self.factor is None else self.factor
        factor = factor.reshape(*factor.shape, *[1] * (self.words.ndim - factor.ndim))
        return mx.broadcast_to(factor, (*self.words.shape[:-1], 1))

    def dequantized(self, dtype: mx.Dtype) -> mx.array:
        """Return the weight's numbers in `dtype`, computed in float32."""
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        form = self.group_size, self.bits, self.mode
        weight = mx.dequantize(self.words, scales, biases, *form, dtype=mx.float32)
        return (weight * self.factor_of_rows()).astype(dtype)


def read_arrays(packed: Mapping[str, Packed]) -> dict[str, Arrays]:
    """Return packed weights as lazy `Arrays`, by module; nothing is read now."""
    stored = read_tensors({name: tensor for m, weight in packed.items() for name, tensor in weight.raw(m).items()})
    convert = {"nvfp4": _fp4, "mxfp4": _fp4, "mxfp8": _mxfp8, "fp8": _fp8, "int": _pack_quantized}
    convert |= {"awq": _awq, "gptq": _gptq}
    found = {}
    for module, weight in packed.items():
        made = convert[weight.kind](weight, {suffix: stored[f"{module}.{suffix}"] for suffix in weight.parts})
        found[module] = replace(made, place=f"{weight.tensor.file}: tensor {weight.stored(module, weight.codes)}")
    return found


def _fp4(weight: Packed, parts: dict[str, mx.array]) -> Arrays:
    factor = None
    if weight.factor is not None:
        factor = parts[weight.factor].astype(mx.float32).reshape(-1)
        factor = 1 / factor if weight.factor == "weight_global_scale" else factor
        factor = mx.where(mx.isinf(factor), mx.nan, factor)  # which is refused as damage
    words = parts[weight.codes].view(mx.uint32)
    return Arrays(words, parts[weight.scales], None, factor, weight.group_size, 4, weight.kind)


def _fp8(weight: Packed, parts: dict[str, mx.array]) -> Arrays:
    """Return MXFP8 whose groups have the scale 1; the stored scale is the factor, NaN if it is infinite."""
    *rows, columns = weight.shape
    ones = mx.full((*rows, columns // weight.group_size), ONE, mx.uint8)
    factor = parts[weight.scales].astype(mx.float32).reshape(weight.factor_shape)
    factor = mx.where(mx.isinf(factor), mx.nan, factor)  # which is refused as damage
    return Arrays(parts["weight"].view(mx.uint32), ones, None, factor, weight.group_size, 8, "mxfp8")


def _mxfp8(weight: Packed, parts: dict[str, mx.array]) -> Arrays:
    scale, (high, wide) = parts[weight.scales], weight.block
    if scale.dtype == mx.float32:
        scale = (scale.view(mx.uint32) >> EXPONENT).astype(mx.uint8)
    rows, columns = weight.shape[-2:]
    if high > 1:
        scale = mx.repeat(scale, high, axis=-2)[..., :rows, :]
    if wide > weight.group_size:
        scale = mx.repeat(scale, wide // weight.group_size, axis=-1)[..., : columns // weight.group_size]
    return Arrays(parts["weight"].view(mx.uint32), scale, None, None, weight.group_size, 8, weight.kind)


def _pack_quantized(weight: Packed, parts: dict[str, mx.array]) -> Arrays:
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _unpacked(zeros.T, weight.bits)[:, : scales.shape[0]].T
    return _affine(weight, parts["weight_packed"].view(mx.uint32), scales, zeros)


def _gptq(weight: Packed, parts: dict[str, mx.array]) -> Arrays:
    words = mx.contiguous(parts["qweight"].T).view(mx.uint32)
    zeros = _unpacked(parts["qzeros"], weight.bits).T + weight.offset
    return _affine(weight, words, parts["scales"].T, zeros)


def _awq(weight: Packed, parts: dict[str, mx.array]) -> Arrays:
    """Return the Arrays that mlx-lm's own transformation makes, which rounds biases to the type of the scales."""
    stored = {f"m.{suffix}": parts[suffix].view(mx.uint32) for suffix in ("qweight", "qzeros") if suffix in parts}
    config = {"bits": weight.bits, "group_size": weight.block[1]}
    made, _ = mlx_lm_utils._transform_awq_weights(stored | {"m.scales": parts["scales"]}, config)
    return _grouped(weight, *(made[f"m.{name}"] for name in ("weight", "scales", "biases")))


def _unpacked(words: mx.array, bits: int) -> mx.array:
    """Return the unsigned integers in words [n, m], the lowest bits first: int32 [n, m * 32 / bits]."""
    ones = (words.view(mx.uint32)[..., None] >> mx.arange(WORD, dtype=mx.uint32)) & 1
    ones = ones.reshape(len(words), words.shape[1] * WORD // bits, bits).astype(mx.int32)
    return (ones << mx.arange(bits)).sum(-1)


def _affine(weight: Packed, words: mx.array, scales: mx.array, zeros: mx.array | None) -> Arrays:
    """Return the Arrays of integers q with the value (q - zero) * scale; without zeros the zero is half the range.

    The bias -zero * scale is rounded to the scales' type, which is exact if the zero is a power of two.
    """
    middle = mx.array(1 << (weight.bits - 1)) if zeros is None else zeros
    biases = (-middle.astype(mx.float32) * scales.astype(mx.float32)).astype(scales.dtype)
    return _grouped(weight, words, scales, biases)


def _grouped(weight: Packed, words: mx.array, scales: mx.array, biases: mx.array) -> Arrays:
    """Return the Arrays, with repeated scales and biases of groups that are larger than MLX's."""
    if (times := weight.block[1] // weight.group_size) > 1:
        scales, biases = (mx.repeat(a, times, axis=-1) for a in (scales, biases))
    return Arrays(words, scales, biases, None, weight.group_size, weight.bits, "affine")
