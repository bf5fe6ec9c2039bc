"""Refuse checkpoints of unsupported quantization methods, by config.json and the names of their tensors."""

import re
from pathlib import Path
from typing import Any

from .files import FLOATS, FP8_SCALES, Header

KEYS = ("quantization_config", "compression_config")
READ = ("fp8", "modelopt", "mxfp4", "mxfp8", "bitnet")  # other checks refuse their unsupported variants
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
}
# Tensor names of one method only, for checkpoints whose config.json does not name it.
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
    """Return the quantization method in a config.json if it is one that is not supported, else None."""
    text = config | config.get("text_config", {})
    stored = next((text[key] for key in KEYS if isinstance(text.get(key), dict)), {})
    method = stored.get("quant_method")
    if method is None and any(stored.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"
    return method if isinstance(method, str) and method not in READ else None


def packed_by(path: Path, config: dict[str, Any], header: Header) -> str | None:
    """Return a message with the unsupported method that packed the weights; None if there is none, or it is unknown.

    A checkpoint with floating-point weights was dequantized, whatever method config.json names.
    """
    packed = next((name for name, tensor in header.items() if _is_packed(name, tensor.dtype, header)), "")
    if not packed:
        return None
    names = [packed, *header]
    of_names = (kind for pattern, kind in TENSORS.items() if any(re.search(pattern, name) for name in names))
    method = method_of(config) or next(of_names, None)
    if not method:
        return None
    written = NAMES.get(method, method)
    spelled = written if written == method else f"{written} ({method})"
    found = f"tensor {packed} has type {header[packed].dtype}"
    advice = "Take a conversion to MLX of this model, or its 16-bit release and `mlx-mtp convert -q`"
    return f"{path}: quantized by {spelled}, which is not supported; {found}. {advice}"


def _is_packed(name: str, dtype: str, header: Header) -> bool:
    """Return whether a tensor contains integers, but neither MLX's packed ones nor 8-bit floats with a scale."""
    module = name.rpartition(".")[0]
    if dtype not in PACKED or (f"{module}.scales" in header and name.endswith((".weight", ".scales"))):
        return False
    scales = (header[name + suffix].dtype for suffix in FP8_SCALES if name + suffix in header)
    return dtype != "U8" or next(scales, "") not in FLOATS
