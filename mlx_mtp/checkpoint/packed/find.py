"""Find the packed weights among a checkpoint's tensors."""

from collections.abc import Mapping
from pathlib import Path

from ..files import Header
from ..quant_methods import PLAIN, QuantSettings
from ..weight_files import StoredTensors
from .floats import fp4, fp8, is_fp4
from .integers import pack_quantized, qweight
from .modules import Packed, PackedModule

CODES = ("weight_packed", "qweight")
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales", "pre_quant_scale")
OTHERS = (*SCALES, "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "g_idx")
METHODS = (None, *PLAIN, "modelopt", "compressed-tensors", "awq", "gptq")


def find_packed(
    path: Path, header: Header, settings: dict[Path, QuantSettings], stored: StoredTensors | None
) -> dict[str, Packed]:
    """Return the packed weights by module; ValueError for incomplete ones, and for unsupported variants of a method.

    Weights of other methods are not found. settings: of the checkpoint, by folder of a weight file. stored: the
    weight files; if the shard index lists an incomplete weight's other tensors, the error is about their file.
    """
    modules: dict[str, Header] = {}
    for name, tensor in header.items():
        module, _, suffix = name.rpartition(".")
        if suffix in ("weight", *CODES, *OTHERS):
            modules.setdefault(module, {})[suffix] = tensor
    found = {}
    for module, parts in modules.items():
        if parts.keys() <= {"weight", "scales"}:
            continue
        try:
            packed = _read(PackedModule(path, module, parts, settings[next(iter(parts.values())).file.parent]))
        except ValueError as e:
            names = (f"{module}.{suffix}" for suffix in (*CODES, "weight", *OTHERS))
            absent = (stored.missing(name) for name in names if stored and name in stored.absent)
            raise ValueError(next(absent, str(e))) from None
        if packed is not None:
            found[module] = packed
    return found


def _read(found: PackedModule) -> Packed | None:
    """Return a module's packed weight; None for another quantization method, or where `fp8` returns None."""
    parts = found.parts
    if found.settings.method not in METHODS:
        return None
    if "pre_quant_scale" in parts:
        raise found.refuse(f"{found.stored('pre_quant_scale')}, a scale of the inputs")
    if "qweight" in parts or "qzeros" in parts:
        return qweight(found)
    if "weight_packed" in parts:
        return fp4(found, "weight_packed") if parts["weight_packed"].dtype == "U8" else pack_quantized(found)
    if "weight_global_scale" in parts:
        found.need("weight_packed")
    return fp4(found, "weight") if is_fp4(found) else fp8(found)


def replaced(header: Header, packed: Mapping[str, Packed]) -> Header:
    """Return a header with the packed weights as they will be in MLX's formats; their entries name stored tensors."""
    kept = {}
    for name, tensor in header.items():
        module, _, suffix = name.rpartition(".")
        if module not in packed or suffix not in packed[module].parts:
            kept[name] = tensor
    for module, weight in packed.items():
        if any(f"{module}.{suffix}" in header for suffix in weight.parts):
            kept |= weight.header(module)
    return kept


def without_scales(header: Header, packed: Mapping[str, Packed]) -> Header:
    """Return a header without those tensors of packed modules that are neither packed numbers nor linear biases."""
    kept = ("weight", "bias", *CODES)
    return {n: t for n, t in header.items() if n.rpartition(".")[0] not in packed or n.rpartition(".")[2] in kept}
