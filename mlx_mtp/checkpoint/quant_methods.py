"""Name the quantization of a checkpoint that is not read, and what to take instead."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import FLOATS, FP8_SCALES, Header

KEYS = ("quantization_config", "compression_config")
READ = ("fp8", "modelopt", "mxfp4", "mxfp8", "bitnet")  # of which not every variant is, but others name what is wrong
NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM",
    "quark": "Quark",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "auto-round": "AutoRound",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
}
# What only one method's tensors are called, for checkpoints whose config.json does not name it.
TENSORS = {
    r"\.g_idx$": "gptq",
    r"\.qweight$": "AWQ or GPTQ",
    r"\.weight_packed$": "compressed-tensors",
    r"\.(absmax|quant_map|SCB)$|\.quant_state\.": "bitsandbytes",
    r"\.W_q$": "hqq",
    r"\.codebooks$": "aqlm",
    r"\.q_weight$": "exl2",
    r"\.trellis$": "exl3",
}
PACKED = ("I8", "U8", "I16", "U16", "I32", "U32")


def method_of(config: dict[str, Any]) -> str | None:
    """Return the quantization method that a config.json names and that is not read; None where it names none."""
    text = config | config.get("text_config", {})
    stored = next((text[key] for key in KEYS if isinstance(text.get(key), dict)), {})
    method = stored.get("quant_method")
    if method is None and any(stored.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"
    return method if isinstance(method, str) and method not in READ else None


def refuse_packed(path: Path, config: dict[str, Any], header: Header) -> None:
    """Raise ValueError for weights packed by a method that is not read; it names the method and what to take instead.

    A checkpoint that names one and holds floating-point numbers is one that was dequantized.
    """
    if reason := packed_by(path, config, header):
        raise ValueError(reason)


def packed_by(path: Path, config: dict[str, Any], header: Header) -> str | None:
    """Say what the weights are packed by, and what to take instead; None where they are not, or as MLX does."""
    packed = next((name for name, tensor in header.items() if _is_packed(name, tensor.dtype, header)), "")
    method = (method_of(config) or _by_name([packed, *header])) if packed else None
    if not method:
        return None
    written = NAMES.get(method, method)
    said = written if written == method else f"{written} ({method})"
    found = f"tensor {packed} has type {header[packed].dtype}"
    return (
        f"{path}: quantized by {said}, which is not supported; {found}. Take a conversion to MLX of this model, or "
        "its 16-bit release and `mlx-mtp convert -q`"
    )


def _is_packed(name: str, dtype: str, header: Header) -> bool:
    """Return whether a tensor holds integers that are neither MLX's nor 8-bit floats with a scale."""
    module = name.rpartition(".")[0]
    if dtype not in PACKED or (f"{module}.scales" in header and name.endswith((".weight", ".scales"))):
        return False
    scales = (header[name + suffix].dtype for suffix in FP8_SCALES if name + suffix in header)
    return dtype != "U8" or next(scales, "") not in FLOATS


def _by_name(names: Iterable[str]) -> str | None:
    """Find the method whose tensors have such names."""
    names = list(names)
    return next((method for pattern, method in TENSORS.items() if any(re.search(pattern, n) for n in names)), None)
