"""Describe a module's packed weight, and check its tensors' types and shapes against each other."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..files import FLOATS, Header, Tensor
from ..quant_methods import QuantSettings, refusal

WORD = 32  # bits of the integers that contain packed ones
MATRICES = (2, 3)  # dimensions of a matrix, and of a stack
FLOAT_KINDS = ("nvfp4", "mxfp4", "mxfp8", "fp8")


@dataclass(frozen=True)
class Packed:
    """One module's packed weight [(E,) rows, columns].

    kind: "nvfp4", "mxfp4", "mxfp8", "fp8" (without scales of groups), "int" (compressed-tensors' pack-quantized),
        "awq" or "gptq".
    parts: its tensors by suffix. codes, scales: suffixes of the tensors with the numbers and the groups' scales.
    bits: of a number. group_size: of MLX's format. block: (rows, columns) that share a scale; for "mxfp8", "int",
        "awq" and "gptq" only.
    offset: the number to add to stored zero points. act_order: whether config.json states that columns are in another
        order than their groups.
    """

    kind: str
    parts: Header
    codes: str
    scales: str
    shape: tuple[int, ...]
    bits: int
    group_size: int
    block: tuple[int, int] = (1, 1)
    offset: int = 0
    act_order: bool = False

    @property
    def tensor(self) -> Tensor:
        return self.parts[self.codes]

    @property
    def factor(self) -> str | None:
        """The suffix of the tensor that scales the whole weight, its matrices or its rows; None without one."""
        if self.kind == "fp8":
            return self.scales
        return next((name for name in ("weight_scale_2", "weight_global_scale") if name in self.parts), None)

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """The shape of the scale in `factor`: [1] for the whole weight, [E] by matrix, [(E,) rows] by row."""
        assert self.factor is not None
        size = math.prod(self.parts[self.factor].shape)
        return self.shape[:-1] if size == math.prod(self.shape[:-1]) else (size,)

    def header(self, module: str) -> Header:
        """Return the header entries of the weight in MLX's format, which name the stored tensors."""
        *lead, rows, columns = self.shape
        words, groups = (*lead, rows, columns * self.bits // WORD), (*lead, rows, columns // self.group_size)
        kind = "U8" if self.kind in FLOAT_KINDS else self.parts[self.scales].dtype
        entries: dict[str, tuple[str, tuple[int, ...], str]]
        scales = self.codes if self.kind == "fp8" else self.scales  # ones, which no tensor contains
        entries = {"weight": (self.codes, words, "U32"), "scales": (scales, groups, kind)}
        zeros = next((name for name in ("qzeros", "weight_zero_point") if name in self.parts), None)
        if zeros is not None:
            entries["biases"] = zeros, groups, kind
        if self.factor is not None:
            entries["output_scale"] = self.factor, self.factor_shape, "F32"
        return {
            f"{module}.{n}": replace(self.parts[suffix], shape=shape, dtype=kind, stored=self.stored(module, suffix))
            for n, (suffix, shape, kind) in entries.items()
        }

    def stored(self, module: str, suffix: str) -> str:
        """Return the name of a tensor in its file."""
        return self.parts[suffix].stored or f"{module}.{suffix}"

    def raw(self, module: str) -> Header:
        """Return the stored tensors by their names in the checkpoint."""
        return {f"{module}.{s}": replace(tensor, stored=self.stored(module, s)) for s, tensor in self.parts.items()}


@dataclass(frozen=True)
class PackedModule:
    """A module whose tensors look packed, for the checks.

    path: the checkpoint's directory, for messages. parts: the module's tensors by suffix. settings: of the checkpoint
    that contains the module.
    """

    path: Path
    module: str
    parts: Header
    settings: QuantSettings

    def refuse(self, found: str) -> ValueError:
        """Return the error that the method's variant is not supported; found: the reason."""
        names = {f"{self.module}.{suffix}": tensor for suffix, tensor in self.parts.items()}
        return ValueError(refusal(self.path, self.settings.name(self.module), found, names))

    def stored(self, suffix: str) -> str:
        """Describe the module's tensor with this suffix for a message: its name, type and shape."""
        tensor = self.parts[suffix]
        return f"tensor {self.module}.{suffix} has type {tensor.dtype} and shape {tensor.shape}"

    def need(self, *suffixes: str) -> None:
        """Raise ValueError for the first of these tensors that is missing."""
        for suffix in suffixes:
            if suffix not in self.parts:
                file = next(iter(self.parts.values())).file
                raise ValueError(f"{file}: tensor {self.module}.{suffix} is missing; the rest of its weight is there")

    def expect(self, suffix: str, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
        """Raise ValueError unless the tensor exists, with this shape and one of these types."""
        self.need(suffix)
        if self.parts[suffix].shape != shape or self.parts[suffix].dtype not in types:
            raise self.refuse(f"{self.stored(suffix)}; expected {' or '.join(types)} and {shape}")

    def matrix(self, suffix: str) -> tuple[int, ...]:
        """Return the shape of a matrix or a stack of matrices; ValueError for another or an empty tensor."""
        shape = self.parts[suffix].shape
        if len(shape) not in MATRICES or 0 in shape:
            raise self.refuse(f"{self.stored(suffix)}; expected a matrix, or a stack of matrices")
        return shape

    def expect_one(self, suffix: str, lead: tuple[int, ...]) -> None:
        """Raise ValueError unless a tensor is one floating-point number, or one for each matrix of a stack.

        lead: the dimensions of the stack; () for one matrix.
        """
        self.need(suffix)
        if self.parts[suffix].dtype not in FLOATS or math.prod(self.parts[suffix].shape) not in (1, math.prod(lead)):
            raise self.refuse(f"{self.stored(suffix)}; expected one floating-point number per matrix")
