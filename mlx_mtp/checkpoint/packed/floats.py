"""Recognize packed floating-point weights: NVFP4, MXFP4, and 8-bit floats."""

from ..files import FLOATS
from .modules import MATRICES, Packed, PackedModule

E8M0 = ("U8", "F8_E8M0")
POWERS = "expected powers of two for whole groups of 32 numbers in a row"


def is_fp4(found: PackedModule) -> bool:
    """Return whether the module's "weight" contains pairs of 4-bit floats, as modelopt writes them."""
    parts = found.parts
    weight, scale = parts.get("weight"), parts.get("weight_scale")
    if weight is None or weight.dtype != "U8" or len(weight.shape) not in MATRICES:
        return False
    if "weight_scale_2" in parts or scale is None:
        return "weight_scale_2" in parts
    half = weight.shape[-1]
    rows = scale.dtype in E8M0 and scale.shape in [(*weight.shape[:-1], half // n) for n in (8, 16)]
    return scale.dtype == "F8_E4M3" or rows


def fp4(found: PackedModule, codes: str) -> Packed:
    """Return the `Packed` of 4-bit floats, two in a byte: MXFP4 if groups of 32 have power-of-two scales, else NVFP4.

    NVFP4 has groups of 16. codes: suffix of the tensor with the floats, "weight" or "weight_packed". ValueError if a
    tensor of the format is missing, or has another type or shape.
    """
    parts = found.parts
    found.need(codes, "weight_scale")
    *lead, rows, half = found.matrix(codes)
    if parts[codes].dtype != "U8" or half % 8:
        raise found.refuse(f"{found.stored(codes)}; expected U8 and rows of whole groups of 16 numbers")
    shape, scale = (*lead, rows, 2 * half), parts["weight_scale"]
    if scale.dtype in E8M0 and scale.shape == (*lead, rows, half // 16) and half % 16 == 0:
        return Packed("mxfp4", parts, codes, "weight_scale", shape, 4, 32)
    found.expect("weight_scale", (*lead, rows, half // 8), ("F8_E4M3", "U8"))
    found.expect_one("weight_global_scale" if codes == "weight_packed" else "weight_scale_2", tuple(lead))
    return Packed("nvfp4", parts, codes, "weight_scale", shape, 4, 16)


def fp8(found: PackedModule) -> Packed | None:
    """Return the `Packed` of 8-bit floats: one scale, one per matrix or row, or powers of two per group or block.

    Groups are 32 numbers of a row. None for other weights or scales. Float32 scales of blocks may be other numbers
    than `scale_fmt` states; `recognize` checks them. ValueError if powers of two are stored as 8-bit exponents for
    blocks of an unsupported size.
    """
    parts, values = found.parts, found.settings.values
    suffix = next((name for name in ("weight_scale_inv", "weight_scale") if name in parts), None)
    if suffix is None or "weight" not in parts or parts["weight"].dtype not in ("F8_E4M3", "U8"):
        return None
    scale, stated = parts[suffix], values.get("weight_block_size")
    if len(parts["weight"].shape) not in MATRICES or 0 in parts["weight"].shape:
        return None
    if scale.dtype in FLOATS and _is_whole(parts["weight"].shape, scale.shape):
        return Packed("fp8", parts, "weight", suffix, parts["weight"].shape, 8, 32)
    if scale.dtype not in E8M0 and not (values.get("scale_fmt") == "ue8m0" and scale.dtype == "F32"):
        return None
    *lead, rows, columns = found.matrix("weight")
    for high, wide in (_pair(stated), (1, 32), (32, 32), (128, 128)):
        blocks = (*lead, -(-rows // high), -(-columns // wide))
        if scale.shape == blocks and columns % 32 == wide % 32 == 0:
            return Packed("mxfp8", parts, "weight", suffix, (*lead, rows, columns), 8, 32, (high, wide))
    if scale.dtype == "F32":
        return None
    raise found.refuse(f"{found.stored(suffix)}; {POWERS}")


def _is_whole(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Return whether a scale has one number, one per matrix or one per row, and rows are whole groups of 32."""
    *lead, rows, columns = weight
    shapes = [(), (1,), (1, 1), (*lead,), (*lead, 1), (*lead, 1, 1), (*lead, rows), (*lead, rows, 1)]
    return columns % 32 == 0 and scale in shapes


def _pair(sizes: object) -> tuple[int, int]:
    """Return config.json's block size, or MXFP8's, (1, 32), if that is not two positive integers."""
    if isinstance(sizes, list | tuple) and [type(size) for size in sizes] == [int, int] and min(sizes) > 0:
        return sizes[0], sizes[1]
    return 1, 32
