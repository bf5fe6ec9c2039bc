"""Choose the format in MLX of each parameter of a GGUF file, and measure the error of its weights."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from ...kernels import BLOCK_FORMATS
from ...layers.blocks import block_kind
from ...models.gguf.family import TensorChange
from ..convert_precision import DTYPES, Format, listed
from ..parameters import stored_name
from .blocks import EXACT, GROUP, PACKED, Groups, groups_of
from .header import Entry
from .requantize import Loss, dequantized, loss, requantized
from .source import GGUFSource, shape_of

FormatChoice = Literal["packed", "affine", "exact", "small"]
CHOICES = ("packed", "affine", "exact", "small")
FLOATS = {"F64": mx.float32, "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
LARGEST_BITS = 8
SMALL = {"IQ4_NL": 5, "IQ4_XS": 5, "Q6_K": 6}  # bits of requantized types
SMALL_BITS = 4  # of all others
KEPT_FLOAT32 = (".A_log", ".dt_bias")
SAMPLED_ROWS, SAMPLED_TENSORS = 32, 4
CHUNK = 1 << 20  # values that are converted at a time


@dataclass(frozen=True)
class GGUFOptions:
    """Options of a transcoding; ValueError for unknown values, and a dtype that contradicts `float32`.

    plan: "affine" and "exact" are the same: quantized matrices get MLX's formats, where `_groups` allows it; types
    without an equivalent are requantized to 8 bits. "packed" differs in that IQ4_NL, IQ4_XS and Q6_K stay in block
    formats, for our kernels, where `_packed` allows it. "small" differs from "affine" in that types without an
    equivalent, IQ4_NL and IQ4_XS are requantized to fewer bits (SMALL, SMALL_BITS).
    float32: store scales and values in float32. dtype: type of unquantized parameters; None is the type that
    `activations` chooses.
    """

    plan: FormatChoice = "packed"
    float32: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.plan not in CHOICES:
            raise ValueError(f"gguf_plan={self.plan!r}: allowed are {', '.join(CHOICES)}")
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={self.dtype!r}: allowed are {', '.join(DTYPES)}")
        if self.float32 and self.dtype not in (None, "float32"):
            raise ValueError(f"dtype={self.dtype!r}: not together with gguf_exact, whose values are float32")


class TensorForm(NamedTuple):
    """A parameter's format: bits of a code, mode, and the type of scales or, if not quantized, of values.

    mode: MLX's, or a name in BLOCK_FORMATS. If not quantized, bits is 0 and mode "".
    """

    bits: int
    mode: str
    dtype: mx.Dtype

    def __str__(self) -> str:
        kind = str(self.dtype).rpartition(".")[2]
        if not self.bits:
            return kind
        if self.mode in BLOCK_FORMATS:
            return f"{self.mode}, packed"
        return f"{self.mode} g{GROUP}" if self.mode != "affine" else f"{self.bits}-bit g{GROUP}, {kind} scales"


@dataclass(frozen=True)
class GGUFParameter:
    """A parameter: path, name in the written file, the GGUF tensors and change that make it, shape and format."""

    path: str
    name: str
    entries: tuple[Entry, ...]
    change: TensorChange
    shape: tuple[int, ...]
    form: TensorForm

    @property
    def rows(self) -> int:
        """The number of rows that are written: those of the GGUF tensors, or those that `change.rows` selects."""
        if self.change.rows is not None:
            return len(self.change.rows)
        return sum(math.prod(entry.shape[:-1]) for entry in self.entries)

    def outputs(self) -> dict[str, mx.array]:
        """Return each written tensor, as lazy zeros, by name: the values, or codes, scales and (if affine) biases."""
        if not self.form.bits:
            return {self.name: mx.zeros(self.shape, self.form.dtype)}
        module, (*inner, columns) = self.name.removesuffix(".weight"), self.shape
        blocks = BLOCK_FORMATS.get(self.form.mode)
        count = columns // GROUP if blocks is None else columns // blocks.span * blocks.words
        scales = mx.zeros((*inner, count), self.form.dtype)
        words = mx.zeros((*inner, columns * self.form.bits // 32), mx.uint32)
        found = {self.name: words, f"{module}.scales": scales}
        return found | ({f"{module}.biases": scales} if self.form.mode == "affine" else {})


class FormatRow(NamedTuple):
    """The matrices of one GGUF type `kind` and one format in MLX.

    tensors: number of GGUF tensors. before, after: their bytes in the GGUF file, and as written. loss: the error;
    None if none was found or it was not measured.
    """

    kind: str
    form: TensorForm
    tensors: int
    before: int
    after: int
    loss: Loss | None


def bits_of(kind: str, plan: FormatChoice) -> int:
    """Return the bits of a code in MLX's own formats for tensors of a GGUF type.

    For types without an equivalent, and with "small" for IQ4 types, `plan` decides.
    """
    coded = kind.startswith("IQ4")
    if kind in EXACT and not (coded and plan == "small"):
        return EXACT[kind].bits
    return SMALL.get(kind, SMALL_BITS) if plan == "small" else LARGEST_BITS


def activations(source: GGUFSource, options: GGUFOptions) -> mx.Dtype:
    """Return the type of unquantized parameters: the option's, else one that follows from the file's matrices.

    If a matrix is quantized, the type is float16, or float32 if another matrix is BF16. If no matrix is quantized,
    the type is the matrices' own (float32 for F64), or float32 if they have several types. A family whose activations
    may not fit into float16 gets float32 instead of float16.
    """
    if options.float32:
        return mx.float32
    if options.dtype:
        return getattr(mx, options.dtype)
    kinds = {entry.kind for entry in source.entries.values() if len(entry.shape) > 1 and min(entry.shape) > 1}
    if not kinds - FLOATS.keys():
        alone = FLOATS[kinds.pop()] if len(kinds) == 1 else mx.float32
        return mx.float32 if alone == mx.float16 and not source.family.float16 else alone
    return mx.float16 if source.family.float16 and "BF16" not in kinds else mx.float32


def make_plan(source: GGUFSource, options: GGUFOptions) -> list[GGUFParameter]:
    """Return every parameter of the source's model with its format; no weight is read."""
    dtype = activations(source, options)
    modules = dict(source.model.named_modules())
    keeps = getattr(source.model, "cast_predicate", None)
    found = []
    for path, made in source.made.items():
        entries, shape = tuple(source.entries[name] for name in made.tensors), shape_of(source, made)
        change = made.change
        if len(entries[0].shape) == 1 and change.rows is not None:  # a vector is stored as one row
            change = change._replace(rows=None, columns=change.rows)
        module, _, kind = path.rpartition(".")
        form = None
        if kind == "weight" and hasattr(modules.get(module), "to_quantized"):
            wide = options.float32 or (dtype != mx.float16 and entries[0].name == "token_embd.weight")
            form = _packed(entries, change, options) if block_kind(modules[module]) else None
            form = form or _groups(entries, change, options, mx.float32 if wide else mx.float16)
        if form is None:
            kept = path.endswith(KEPT_FLOAT32) or (keeps is not None and not keeps(path))
            form = TensorForm(0, "", mx.float32 if kept else dtype)
        found.append(GGUFParameter(path, stored_name(source.model, path), entries, change, shape, form))
    return found


def _packed(entries: tuple[Entry, ...], change: TensorChange, options: GGUFOptions) -> TensorForm | None:
    """Return the block format that stores a parameter's matrices, or None if `options.plan` is not "packed".

    None also for tensors of several types or of one outside PACKED, for changed values, and for another order of
    columns than the file's; columns of IQ4_NL may be reordered in whole groups of 32.
    """
    (kind, *others) = {entry.kind for entry in entries}
    if options.plan != "packed" or others or kind not in PACKED or change.values is not None:
        return None
    form = PACKED[kind]
    reordered = change.columns is not None and (form.mode != "iq4_nl" or not _whole_groups(change.columns))
    return None if reordered else TensorForm(form.bits, form.mode, mx.uint16)


def _whole_groups(columns: np.ndarray) -> bool:
    """Return whether an order of columns (their indices in the file) only moves whole groups of GROUP."""
    runs = columns.reshape(-1, GROUP)
    return not ((runs[:, :1] % GROUP).any() or (np.diff(runs, axis=1) != 1).any())


def _groups(
    entries: tuple[Entry, ...], change: TensorChange, options: GGUFOptions, scales: mx.Dtype
) -> TensorForm | None:
    """Return the quantized format for the matrices of a parameter, None to store floating-point numbers.

    The result is None if a tensor has floating-point numbers, if values or the inside of groups of 32 change, if rows
    are not whole groups, or if the tensors' types need different modes. scales: type of an affine format's scales.
    """
    kinds = {entry.kind for entry in entries}
    if kinds & FLOATS.keys() or change.values is not None or entries[0].shape[-1] % GROUP:
        return None
    if change.columns is not None and not _whole_groups(change.columns):
        return None
    modes = {EXACT[kind].mode if kind in EXACT else "affine" for kind in kinds}
    if len(modes) > 1:
        return None
    mode = modes.pop()
    return TensorForm(
        max(bits_of(kind, options.plan) for kind in kinds), mode, scales if mode == "affine" else mx.uint8
    )


def groups(entry: Entry, rows: np.ndarray, form: TensorForm) -> Groups:
    """Return a tensor's rows of GGUF blocks, uint8 [rows, bytes], as `Groups` in a quantized format.

    Codes have at most the format's bits. A type without an equivalent, or whose equivalent has more bits than the
    format, is requantized.
    """
    bits = form.bits
    if form.mode in BLOCK_FORMATS:
        return groups_of(entry.kind, rows, packed=True)
    if entry.kind in EXACT and EXACT[entry.kind].bits <= bits:
        return groups_of(entry.kind, rows)
    return requantized(entry.kind, rows, bits)


def summarize(parameters: list[GGUFParameter], *, measure: bool) -> list[FormatRow]:
    """Return a `FormatRow` for each GGUF type and `TensorForm` of matrices, sorted by bytes in the file, most first.

    A parameter of several tensors counts by its first one's type. measure: also measure the error of the format on
    sampled weights, which raises ValueError for a type that cannot be dequantized.
    """
    alike: dict[tuple[str, TensorForm], list[GGUFParameter]] = {}
    for parameter in parameters:
        if len(parameter.shape) > 1 or parameter.form.bits:
            alike.setdefault((parameter.entries[0].kind, parameter.form), []).append(parameter)
    rows = []
    for (kind, form), group in alike.items():
        entries = [entry for parameter in group for entry in parameter.entries]
        before = sum(entry.nbytes for entry in entries)
        after = sum(output.nbytes for parameter in group for output in parameter.outputs().values())
        rows.append(FormatRow(kind, form, len(entries), before, after, _measured(form, entries) if measure else None))
    return sorted(rows, key=lambda row: -row.before)


def _measured(form: TensorForm, entries: list[Entry]) -> Loss | None:
    """Return a format's error on at most SAMPLED_ROWS rows of at most SAMPLED_TENSORS tensors.

    None if these have no error, and for quantized formats that are not affine, which are exact. The error is NaN if a
    sampled weight is NaN or infinity, which `write` refuses. ValueError for a type that cannot be dequantized.
    """
    if form.bits and form.mode != "affine":
        return None
    made, true = [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for entry in entries[:: -(-len(entries) // SAMPLED_TENSORS)]:
            stride = max(len(entry.blocks()) // SAMPLED_ROWS, 1)
            rows = entry.blocks()[::stride][:SAMPLED_ROWS]
            values = dequantized(entry.kind, rows)
            true.append(values.reshape(-1))
            made.append(_as_stored(entry, rows, values, form).reshape(-1))
        found = loss(np.concatenate(made), np.concatenate(true))
    return found if found.worst else None


def _as_stored(entry: Entry, rows: np.ndarray, values: np.ndarray, form: TensorForm) -> np.ndarray:
    """Return what a format stores for some rows of a tensor, as values in float32.

    rows: GGUF blocks, from which an affine format is made. values: the same rows dequantized, which are rounded to an
    unquantized format.
    """
    if not form.bits:
        return np.array(mx.array(values).astype(form.dtype).astype(mx.float32))
    codes, scales, biases = groups(entry, rows, form)
    assert biases is not None
    kind = np.float16 if form.dtype == mx.float16 else np.float32
    return Groups(codes, *(a.astype(kind).astype(np.float32) for a in (scales, biases))).values()


def chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (begin, end) of rows, without the end, with at most CHUNK values or one row."""
    size = max(CHUNK // columns, 1)
    yield from ((begin, min(begin + size, rows)) for begin in range(0, rows, size))


def listed_quantization(parameters: list[GGUFParameter]) -> dict[str, Any] | None:
    """Return config.json's "quantization" for the target, as `listed`; None if no matrix of it is quantized.

    Of equally frequent formats, the one with fewest bits is the default in it.
    """
    target = [p for p in parameters if p.form.bits and not p.path.startswith("mtp.")]
    target.sort(key=lambda p: (p.form.bits, p.form.mode))
    sizes = {mode: blocks.group_size for mode, blocks in BLOCK_FORMATS.items()}
    forms = {p.path.removesuffix(".weight"): p.form for p in target}
    return listed({path: Format(sizes.get(f.mode, GROUP), f.bits, f.mode) for path, f in forms.items()})
