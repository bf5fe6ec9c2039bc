"""Read the quantization method in config.json, and refuse checkpoints of unsupported methods with an alternative."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine.errors import one_line
from .files import FLOATS, FP8_SCALES, Header

KEYS = ("quantization_config", "compression_config")
PLAIN = ("fp8", "mxfp4", "mxfp8", "bitnet")  # methods that other checks refuse in unsupported variants
READ = (*PLAIN, "modelopt")
MODELOPT = "hf_quant_config.json"
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
    r"\.pre_quant_scale$": "modelopt",
    r"\.(absmax|quant_map|SCB)$|\.quant_state\.": "bitsandbytes",
    r"\.W_q$": "hqq",
    r"\.codebooks$": "aqlm",
    r"\.q_weight$": "exl2",
    r"\.trellis$": "exl3",
}
PACKED = ("I8", "U8", "I16", "U16", "I32", "U32")
ADVICE = "Take a conversion to MLX of this model, or its 16-bit release and `mlx-mtp convert -q`"


@dataclass(frozen=True)
class QuantSettings:
    """A checkpoint's quantization settings: the method, and the other entries.

    file: where they were read. method: None if no file names it.
    """

    file: Path
    method: str | None
    values: dict[str, Any]

    def scheme(self, module: str) -> dict[str, Any]:
        """Return the group of compressed-tensors' `config_groups` whose targets match a module, {} without one.

        Names are compared before patterns ("re:..."), and patterns before class names, of which only "Linear" can
        match; {} for a module in `ignore`. ValueError for groups or patterns of another form.
        """
        with one_line(f"{self.file}: the quantization's groups or patterns cannot be read"):
            groups = [*(self.values.get("config_groups") or {}).values()]
            if any(_matches(name, module) for name in self.values.get("ignore") or ()):
                return {}
            for fits in (lambda target: target == module, lambda target: _matches(target, module)):
                for group in groups:
                    if any(map(fits, group.get("targets") or ())):
                        return group
            return next((group for group in groups if "Linear" in group.get("targets", ())), {})

    def name(self, module: str = "") -> str | None:
        """Return the method as messages show it, with modelopt's algorithm for this module; None without a method."""
        if self.method != "modelopt":
            return _spelled(self.method) if self.method else None
        layers = self.values.get("quantized_layers")
        own = [v for n, v in layers.items() if f"{module}.".startswith(f"{n}.")] if isinstance(layers, dict) else []
        algorithm = (own[0] if own and isinstance(own[0], dict) else self.values).get("quant_algo")
        return f"modelopt ({algorithm})" if algorithm else "modelopt"


def _matches(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def settings_of(path: Path, config: dict[str, Any]) -> QuantSettings:
    """Return the quantization settings in a config.json, else in modelopt's own file in the same directory.

    ValueError if that file is damaged.
    """
    file, stored = path / "config.json", _entry(config)
    if not stored and (path / MODELOPT).is_file():
        file = path / MODELOPT
        with one_line(f"{file}: not valid JSON, or not modelopt's", (ValueError, OSError, TypeError, AttributeError)):
            stored = {"quant_method": "modelopt"} | (json.loads(file.read_text()).get("quantization") or {})
    return QuantSettings(file, _stated(stored), stored)


def _entry(config: dict[str, Any]) -> dict[str, Any]:
    """Return the first of KEYS that is an object, in text_config or, if absent there, in config.json; else {}."""
    text = config | config.get("text_config", {})
    return next((text[key] for key in KEYS if isinstance(text.get(key), dict)), {})


def _stated(entry: dict[str, Any]) -> str | None:
    """Return the method in quantization settings; with load_in_4bit or load_in_8bit alone it is bitsandbytes."""
    method = entry.get("quant_method")
    if method is None and any(entry.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"
    return method if isinstance(method, str) else None


def method_of(config: dict[str, Any]) -> str | None:
    """Return the quantization method that a config.json states; None if it states none, or one in READ."""
    method = _stated(_entry(config))
    return method if method not in READ else None


def _spelled(method: str) -> str:
    written = NAMES.get(method, method)
    return written if written == method else f"{written} ({method})"


def refusal(path: Path, name: str | None, found: str, header: Header) -> str:
    """Return a message that a method's weights are not supported, with alternatives.

    name: the method; None is the method whose tensor names the header contains. found: the reason.
    """
    name = name or _spelled(_by_tensors(header) or "an unknown method")
    return f"{path}: quantized by {name}, which is not supported; {found}. {ADVICE}"


def _by_tensors(header: Header) -> str | None:
    """Return the method whose tensor names the header contains; None without one."""
    return next((kind for pattern, kind in TENSORS.items() if any(re.search(pattern, name) for name in header)), None)


def packed_by(path: Path, config: dict[str, Any], header: Header) -> str | None:
    """Return a message with the unsupported method that packed the weights; None if there is none, or it is unknown.

    A checkpoint with floating-point weights was dequantized, whatever method config.json names.
    """
    packed = next((name for name, tensor in header.items() if _is_packed(name, tensor.dtype, header)), "")
    if not packed:
        return None
    settings = settings_of(path, config)
    name = None if settings.method in PLAIN else settings.name(packed.rpartition(".")[0])
    if name is None and _by_tensors(header) is None:
        return None
    return refusal(path, name, f"tensor {packed} has type {header[packed].dtype}", header)


def _is_packed(name: str, dtype: str, header: Header) -> bool:
    """Return whether a tensor contains integers, but neither MLX's packed ones nor 8-bit floats with a scale."""
    module = name.rpartition(".")[0]
    if dtype not in PACKED or (f"{module}.scales" in header and name.endswith((".weight", ".scales"))):
        return False
    scales = (header[name + suffix].dtype for suffix in FP8_SCALES if name + suffix in header)
    return dtype != "U8" or next(scales, "") not in FLOATS
