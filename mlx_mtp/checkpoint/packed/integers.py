"""Recognize packed integers: AWQ's, GPTQ's and compressed-tensors' "pack-quantized"."""

from typing import Any

from ..files import FLOATS
from .modules import WORD, Packed, PackedModule

INTEGERS, FREE_BITS = ("I32", "U32"), (4, 8)
GROUPS = (128, 64, 32)  # group sizes of MLX's affine format, the largest first
GPTQ_BITS = (2, 3, 4, 8)
ALL = -1  # GPTQ's group size if a row is one group


def qweight(found: PackedModule) -> Packed:
    """Return the `Packed` of AWQ's or GPTQ's integers.

    Without a method in config.json, equal last dimensions of "qweight" and "scales" mean GPTQ.
    """
    found.need("qweight", "scales")
    codes, scales = found.matrix("qweight"), found.matrix("scales")
    method = found.settings.method or ("gptq" if codes[-1] == scales[-1] else "awq")
    return (gptq if method == "gptq" else awq)(found)


def awq(found: PackedModule) -> Packed:
    """Return the `Packed` of AWQ's integers of 4 bits [columns, rows / 8], in the layout "gemm"."""
    values = found.settings.values
    version, bits = values.get("version", "gemm"), values.get("bits", values.get("w_bit", 4))
    if str(version).lower() != "gemm" or bits != 4:
        raise found.refuse(f"its version is {version!r} with {bits!r} bits; supported is 'gemm' with 4")
    columns, width = _two(found, "qweight")
    rows, groups = 8 * width, _groups(found, columns, found.matrix("scales")[0])
    found.expect("scales", (groups, rows), FLOATS)
    found.expect("qweight", (columns, width), INTEGERS)
    if "qzeros" in found.parts:
        found.expect("qzeros", (groups, width), INTEGERS)
    return _packed("awq", found, ("qweight", "scales"), (rows, columns), 4, groups)


def gptq(found: PackedModule) -> Packed:
    """Return the `Packed` of GPTQ's integers [columns * bits / 32, rows]; `recognize` checks the groups' order."""
    values = found.settings.values
    height, rows = _two(found, "qweight")
    bits, form = values.get("bits", 4), values.get("checkpoint_format", "gptq")
    if bits not in GPTQ_BITS or form not in ("gptq", "gptq_v2", None):
        raise found.refuse(f"{bits!r} bits in the format {form!r}; supported are 2, 3, 4, 8 in 'gptq' and 'gptq_v2'")
    if height * WORD % bits:
        raise found.refuse(f"{found.stored('qweight')}; expected whole numbers of {bits} bits in a column")
    columns = height * WORD // bits
    groups = _groups(found, columns, found.matrix("scales")[0])
    found.expect("scales", (groups, rows), FLOATS)
    found.expect("qweight", (height, rows), INTEGERS)
    found.expect("qzeros", (groups, rows * bits // WORD), INTEGERS)
    if "g_idx" in found.parts:
        found.expect("g_idx", (columns,), INTEGERS)
    offset = 0 if form == "gptq_v2" else 1
    more = {"offset": offset, "act_order": bool(values.get("desc_act"))}
    return _packed("gptq", found, ("qweight", "scales"), (rows, columns), bits, groups, **more)


def pack_quantized(found: PackedModule) -> Packed:
    """Return the `Packed` of compressed-tensors' integers [rows, columns * bits / 32].

    The bits are those of the module's entry in config_groups, by default 4.
    """
    scheme = found.settings.scheme(found.module).get("weights") or {}
    bits, strategy = scheme.get("num_bits", 4), scheme.get("strategy")
    if bits not in FREE_BITS or strategy not in (None, "group", "channel", "tensor"):
        raise found.refuse(f"{bits!r} bits with the strategy {strategy!r}; supported are 4 and 8 in groups of a row")
    found.need("weight_packed", "weight_scale")
    rows, width = _two(found, "weight_packed")
    columns, scale = width * WORD // bits, found.matrix("weight_scale")
    groups = _groups(found, columns, scale[-1])
    found.expect("weight_packed", (rows, width), INTEGERS)
    found.expect("weight_scale", (rows, groups), FLOATS)
    if "weight_zero_point" in found.parts:
        found.expect("weight_zero_point", (-(-rows * bits // WORD), groups), INTEGERS)
    if "weight_g_idx" in found.parts:
        found.expect("weight_g_idx", (columns,), INTEGERS)
    return _packed("int", found, ("weight_packed", "weight_scale"), (rows, columns), bits, groups)


def _two(found: PackedModule, suffix: str) -> tuple[int, int]:
    shape = found.matrix(suffix)
    if len(shape) != 2:
        raise found.refuse(f"{found.stored(suffix)}; expected a matrix")
    return shape[0], shape[1]


def _groups(found: PackedModule, columns: int, groups: int) -> int:
    """Return `groups`, the number of groups in a row of `columns` numbers.

    ValueError unless the size of a group is a multiple of 32, and equal to that in config.json, if it states one.
    """
    size = found.settings.values.get("group_size", found.settings.values.get("q_group_size"))
    stated = columns if size == ALL else size
    weights = found.settings.scheme(found.module).get("weights") or {}
    stated = weights.get("group_size") or stated
    if columns % groups or (columns // groups) % GROUPS[-1] or stated not in (None, columns // groups, ALL):
        sizes = f"{groups} groups for rows of {columns} numbers"
        size = "a multiple of 32" if stated in (None, columns / groups, ALL) else f"{stated}, as config.json states"
        raise found.refuse(f"tensor {found.module} has {sizes}; expected groups of {size}")
    return groups


def _packed(
    kind: str,
    found: PackedModule,
    names: tuple[str, str],
    shape: tuple[int, int],
    bits: int,
    groups: int,
    **more: Any,
) -> Packed:
    """Return a packed weight with the largest of MLX's group sizes that divides its groups."""
    size = shape[1] // groups
    ours = next(n for n in GROUPS if size % n == 0)
    return Packed(kind, found.parts, *names, shape, bits, ours, (1, size), **more)
