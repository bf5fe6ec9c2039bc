"""Plan what each parameter of a GGUF file becomes in MLX, and measure what is lost by it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from ...models.gguf.family import Change
from .blocks import EXACT, GROUP, Groups, groups_of
from .header import Entry
from .requantize import Loss, dequantized, loss, requantized
from .source import Source, shape_of

Choice = Literal["exact", "small"]
CHOICES = ("exact", "small")
FLOATS = {"F64": mx.float32, "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
LARGEST_BITS = 8
SMALL = {"IQ4_NL": 5, "IQ4_XS": 5, "Q6_K": 6}  # bits of what is requantized; of all others 4
SMALL_BITS = 4
KEPT_FLOAT32 = (".A_log", ".dt_bias")
SAMPLED_ROWS, SAMPLED_TENSORS = 32, 4


@dataclass(frozen=True)
class Options:
    """How to transcode. plan: what to do with types that are no groups of MLX's. float32: scales and values in it.

    dtype: of what is not quantized; None is the family's.
    """

    plan: Choice = "exact"
    float32: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.plan not in CHOICES:
            raise ValueError(f"gguf_plan={self.plan!r}: allowed are {', '.join(CHOICES)}")
        if self.dtype not in (None, "float16", "bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}: allowed are float16, bfloat16, float32")
        if self.float32 and self.dtype not in (None, "float32"):
            raise ValueError(f"dtype={self.dtype!r}: not together with gguf_exact, whose values are float32")


class Form(NamedTuple):
    """What a parameter is stored as: codes of so many bits (0: none) in a mode, and the type of scales or values."""

    bits: int
    mode: str
    dtype: mx.Dtype

    def __str__(self) -> str:
        kind = str(self.dtype).rpartition(".")[2]
        if not self.bits:
            return kind
        return f"{self.mode} g{GROUP}" if self.mode != "affine" else f"{self.bits}-bit g{GROUP}, {kind} scales"


@dataclass(frozen=True)
class Parameter:
    """A parameter: its tensors, the change to their rows, its shape, and its form."""

    path: str
    name: str
    entries: tuple[Entry, ...]
    change: Change
    shape: tuple[int, ...]
    form: Form

    @property
    def rows(self) -> int:
        """Number of rows before a change of shape."""
        if self.change.rows is not None:
            return len(self.change.rows)
        return sum(math.prod(entry.shape[:-1]) for entry in self.entries)

    def outputs(self) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        """List the tensors that are stored, with their shapes and types."""
        if not self.form.bits:
            return {self.name: (self.shape, self.form.dtype)}
        module, *_, columns = self.name.removesuffix(".weight"), self.shape[-1]
        inner = self.shape[:-1]
        scales = ((*inner, columns // GROUP), self.form.dtype if self.form.mode == "affine" else mx.uint8)
        found = {self.name: ((*inner, columns * self.form.bits // 32), mx.uint32), f"{module}.scales": scales}
        return found | ({f"{module}.biases": scales} if self.form.mode == "affine" else {})


class Row(NamedTuple):
    """What became of all tensors of one type that took the same form; loss is None where there is none."""

    kind: str
    form: Form
    tensors: int
    before: int
    after: int
    loss: Loss | None


def bits_of(kind: str, plan: Choice) -> int:
    """Choose the bits that a type's codes need, or may have."""
    coded = kind.startswith("IQ4")
    if kind in EXACT and not (coded and plan == "small"):
        return EXACT[kind].bits
    return LARGEST_BITS if plan == "exact" else SMALL.get(kind, SMALL_BITS)


def activations(source: Source, options: Options) -> mx.Dtype:
    """Choose the type of what is not quantized: float16 where the family's activations fit and no matrix is wider."""
    if options.float32:
        return mx.float32
    if options.dtype:
        return getattr(mx, options.dtype)
    kinds = {entry.kind for entry in source.entries.values() if len(entry.shape) > 1 and min(entry.shape) > 1}
    if not kinds - FLOATS.keys():
        alone = FLOATS[kinds.pop()] if len(kinds) == 1 else mx.float32
        return mx.float32 if alone == mx.float16 and not source.family.float16 else alone
    return mx.float16 if source.family.float16 and "BF16" not in kinds else mx.float32


def make_plan(source: Source, options: Options) -> list[Parameter]:
    """Choose the form of every parameter."""
    dtype = activations(source, options)
    modules = dict(source.model.named_modules())
    keeps = getattr(source.model, "cast_predicate", None)
    found = []
    for path, what in source.made.items():
        entries, shape = tuple(source.entries[name] for name in what.tensors), shape_of(source, what)
        change = what.change
        if len(entries[0].shape) == 1 and change.rows is not None:  # a vector is stored as one row
            change = change._replace(rows=None, columns=change.rows)
        module, _, kind = path.rpartition(".")
        form = None
        if kind == "weight" and hasattr(modules.get(module), "to_quantized"):
            wide = options.float32 or (dtype != mx.float16 and entries[0].name == "token_embd.weight")
            form = _groups(entries, change, options, mx.float32 if wide else mx.float16)
        if form is None:
            kept = path.endswith(KEPT_FLOAT32) or (keeps is not None and not keeps(path))
            form = Form(0, "", mx.float32 if kept else dtype)
        found.append(Parameter(path, source.stored_name(path), entries, change, shape, form))
    return found


def _groups(entries: tuple[Entry, ...], change: Change, options: Options, scales: mx.Dtype) -> Form | None:
    """Choose the groups that matrices become; None where they stay floating-point numbers."""
    kinds = {entry.kind for entry in entries}
    if kinds & FLOATS.keys() or change.values is not None or entries[0].shape[-1] % GROUP:
        return None
    if change.columns is not None:
        runs = change.columns.reshape(-1, GROUP)
        if (runs[:, :1] % GROUP).any() or (np.diff(runs, axis=1) != 1).any():
            return None
    modes = {EXACT[kind].mode if kind in EXACT else "affine" for kind in kinds}
    if len(modes) > 1:
        return None
    return Form(max(bits_of(kind, options.plan) for kind in kinds), modes.pop(), scales)


def groups(entry: Entry, rows: np.ndarray, bits: int) -> Groups:
    """Make groups of a tensor's rows, whose codes fit these bits."""
    if entry.kind in EXACT and EXACT[entry.kind].bits <= bits:
        return groups_of(entry.kind, rows)
    return requantized(entry.kind, rows, bits)


def summarize(parameters: list[Parameter], *, measure: bool) -> list[Row]:
    """Sum up by type and form, the most bytes first; measure losses on rows of a few tensors of each."""
    alike: dict[tuple[str, Form], list[Parameter]] = {}
    for parameter in parameters:
        if len(parameter.shape) > 1 or parameter.form.bits:
            alike.setdefault((parameter.entries[0].kind, parameter.form), []).append(parameter)
    rows = [_row(kind, form, found, measure) for (kind, form), found in alike.items()]
    return sorted(rows, key=lambda row: -row.before)


def _row(kind: str, form: Form, found: list[Parameter], measure: bool) -> Row:
    entries = [entry for parameter in found for entry in parameter.entries]
    before = sum(entry.nbytes for entry in entries)
    after = sum(_nbytes(*output) for parameter in found for output in parameter.outputs().values())
    return Row(kind, form, len(entries), before, after, _measured(kind, form, entries) if measure else None)


def _nbytes(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return math.prod(shape) * dtype.size


def _measured(kind: str, form: Form, entries: list[Entry]) -> Loss | None:
    """Measure what a form loses of sampled rows; None where nothing is."""
    if form.mode == "mxfp4":
        return None
    made, true = [], []
    for entry in entries[:: -(-len(entries) // SAMPLED_TENSORS)]:
        every = max(len(entry.blocks()) // SAMPLED_ROWS, 1)
        rows = entry.blocks()[::every][:SAMPLED_ROWS]
        values = dequantized(kind, rows)
        true.append(values.reshape(-1))
        made.append(_as_stored(entry, rows, values, form).reshape(-1))
    found = loss(np.concatenate(made), np.concatenate(true))
    return found if found.worst else None


def _as_stored(entry: Entry, rows: np.ndarray, values: np.ndarray, form: Form) -> np.ndarray:
    """Compute the values that rows have once they are stored."""
    if not form.bits:
        return np.array(mx.array(values).astype(form.dtype).astype(mx.float32))
    codes, scales, biases = groups(entry, rows, form.bits)
    assert biases is not None
    kind = np.float16 if form.dtype == mx.float16 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        return Groups(codes, *(a.astype(kind).astype(np.float32) for a in (scales, biases))).values()


def chunks(rows: int, columns: int, most: int = 1 << 20) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of at most so many values, or of one row."""
    step = max(most // columns, 1)
    yield from ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


def listed_quantization(parameters: list[Parameter]) -> dict[str, Any] | None:
    """Make config.json's "quantization": the most frequent format, and by path what differs; None without any."""
    formats = [(p, p.form.bits, p.form.mode) for p in parameters if p.form.bits and not p.path.startswith("mtp.")]
    if not formats:
        return None
    pairs = [(bits, mode) for _, bits, mode in formats]
    usual = max(sorted(set(pairs)), key=pairs.count)
    every = {p.path.removesuffix(".weight"): (bits, mode) for p, bits, mode in formats}
    listed = {path: _format(*form) for path, form in every.items() if form != usual}
    return _format(*usual) | listed


def _format(bits: int, mode: str) -> dict[str, Any]:
    return {"group_size": GROUP, "bits": bits, "mode": mode}
