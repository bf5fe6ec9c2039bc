"""Write weights in the layouts of released packed checkpoints, with their numbers computed by numpy alone.

Names and types follow nvidia's and RedHatAI's NVFP4 repositories, DeepSeek-V3.1, and Qwen's AWQ and GPTQ ones.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
TYPES = {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order of 8 columns in a word


def e4m3_values() -> np.ndarray:
    """The 256 values of float8 e4m3fn."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3 = e4m3_values()


class Stored(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str
    values: np.ndarray


class Weight(NamedTuple):
    """A packed weight: its tensors by suffix, and its numbers in float32, [rows, columns]."""

    parts: dict[str, Stored]
    numbers: np.ndarray


def save(path: Path, config: dict[str, Any], tensors: dict[str, Stored], name: str = "model.safetensors") -> Path:
    """Write a checkpoint directory with one file of tensors of any type."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for tensor, (dtype, values) in tensors.items():
        blob = np.ascontiguousarray(values).tobytes()
        header[tensor] = {"dtype": dtype, "shape": values.shape, "data_offsets": [end, end + len(blob)]}
        assert len(blob) == values.size * TYPES[dtype]
        blobs.append(blob)
        end += len(blob)
    text = json.dumps(header).encode()
    (path / name).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return path


def plain(w: np.ndarray) -> Stored:
    return Stored("F32", np.asarray(w, np.float32))


def nearest(table: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.abs(w[..., None] - table).argmin(-1).astype(np.uint8)


def pairs(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def nvfp4(w: np.ndarray, *, reciprocal: bool) -> Weight:
    """modelopt's layout, or compressed-tensors' with the reciprocal scale."""
    groups = w.reshape(*w.shape[:-1], -1, 16)
    whole = np.float32(np.abs(w).max() / 2688)
    if reciprocal:
        stored = np.float32(1) / whole
        whole = np.float32(1) / stored
    scales = nearest(E4M3[:127], np.abs(groups).max(-1) / 6 / whole)
    codes = nearest(E2M1, groups / np.maximum(E4M3[scales] * whole, 1e-30)[..., None])
    numbers = (E2M1[codes] * E4M3[scales][..., None]).reshape(w.shape) * whole
    words, activations = Stored("U8", pairs(codes.reshape(w.shape))), Stored("F32", np.float32([3.0]))
    if reciprocal:
        parts = {"weight_packed": words, "weight_global_scale": Stored("F32", stored.reshape(1))}
        parts["input_global_scale"] = activations
    else:
        scale = Stored("F32", np.asarray(whole))
        parts = {"weight": words, "weight_scale_2": scale, "input_scale": activations}
    return Weight(parts | {"weight_scale": Stored("F8_E4M3", scales)}, numbers.astype(np.float32))


def mxfp4(w: np.ndarray) -> Weight:
    groups = w.reshape(*w.shape[:-1], -1, 32)
    scales = np.ceil(np.log2(np.abs(groups).max(-1) / 6)).astype(np.int32)
    codes = nearest(E2M1, groups / np.exp2(scales)[..., None])
    numbers = (E2M1[codes] * np.exp2(scales)[..., None]).reshape(w.shape).astype(np.float32)
    parts = {"weight_packed": Stored("U8", pairs(codes.reshape(w.shape)))}
    return Weight(parts | {"weight_scale": Stored("U8", (scales + 127).astype(np.uint8))}, numbers)


def mxfp8(w: np.ndarray, block: tuple[int, int], dtype: str) -> Weight:
    """8-bit floats with a power of two per block, as exponents (F8_E8M0, U8) or as float32."""
    rows, columns = w.shape
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    exponents = np.empty((high, wide), np.int32)
    for i in range(high):
        for j in range(wide):
            part = w[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            exponents[i, j] = np.ceil(np.log2(np.abs(part).max() / 448))
    powers = np.exp2(exponents.astype(np.float32))
    each = np.repeat(np.repeat(powers, block[0], 0)[:rows], block[1], 1)[:, :columns]
    finite = np.where(np.isnan(E4M3), np.inf, E4M3)
    codes = nearest(finite, w / each)
    scale = Stored("F32", powers) if dtype == "F32" else Stored(dtype, (exponents + 127).astype(np.uint8))
    return Weight({"weight": Stored("F8_E4M3", codes), "weight_scale_inv": scale}, E4M3[codes] * each)


def fp8(w: np.ndarray, *, by_row: bool = True) -> Weight:
    """8-bit floats with one scale per row, or one: compressed-tensors', and modelopt's FP8."""
    scales = (np.abs(w).max(1, keepdims=True) if by_row else np.abs(w).max()) / np.float32(448)
    codes = nearest(np.where(np.isnan(E4M3), np.inf, E4M3), w / scales)
    stored = Stored("F32", np.asarray(scales, np.float32))
    return Weight({"weight": Stored("F8_E4M3", codes), "weight_scale": stored}, E4M3[codes] * scales)


def integers(w: np.ndarray, bits: int, group: int, *, zeros: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return integers [rows, columns], float16 scales and zeros [rows, groups] of (q - zero) * scale."""
    groups, top = w.reshape(len(w), -1, group), (1 << bits) - 1
    low, high = (groups.min(-1), groups.max(-1)) if zeros else (-np.abs(groups).max(-1), np.abs(groups).max(-1))
    scales = np.maximum((high - low) / top, 1e-4).astype(np.float16)
    middle = np.clip(np.round(-low / scales), 1, top) if zeros else np.full(scales.shape, 1 << (bits - 1))
    q = np.clip(np.round(groups / scales[..., None].astype(np.float32)) + middle[..., None], 0, top)
    return q.reshape(w.shape).astype(np.uint32), scales, middle.astype(np.uint32)


def affine(q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The numbers of MLX's format: q * scale + bias, with the bias rounded to float16 as mlx-lm's for AWQ."""
    biases = (-zeros.astype(np.float32) * scales).astype(np.float16).astype(np.float32)
    each = [np.repeat(a.astype(np.float32), q.shape[1] // scales.shape[1], 1) for a in (scales, biases)]
    return q.astype(np.float32) * each[0] + each[1]


def in_words(q: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers along the last axis, the first in the lowest bits, without gaps: int32."""
    ones = (q[..., None] >> np.arange(bits)) & 1
    ones = ones.reshape(*q.shape[:-1], -1, 32).astype(np.uint32)
    return (ones << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def awq(w: np.ndarray, group: int = 32) -> Weight:
    q, scales, zeros = integers(w, 4, group, zeros=True)

    def packed(a: np.ndarray) -> Stored:
        """[rows, n] to words [n, rows / 8]."""
        return Stored("I32", in_words(a.T.reshape(a.shape[1], -1, 8)[..., AWQ_ORDER].reshape(a.T.shape), 4))

    parts = {"qweight": packed(q), "qzeros": packed(zeros), "scales": Stored("F16", scales.T)}
    return Weight(parts, affine(q, scales, zeros))


def gptq(w: np.ndarray, bits: int = 4, group: int = 32, *, zeros: bool = False, v2: bool = False) -> Weight:
    q, scales, middle = integers(w, bits, group, zeros=zeros)
    stored = middle if v2 else middle - 1
    parts = {
        "qweight": Stored("I32", in_words(q, bits).T),
        "qzeros": Stored("I32", in_words(stored.T, bits)),
        "scales": Stored("F16", scales.T),
        "g_idx": Stored("I32", np.arange(w.shape[1], dtype=np.int32) // group),
    }
    return Weight(parts, affine(q, scales, middle))


def pack_quantized(w: np.ndarray, bits: int = 4, group: int = 32, *, zeros: bool = False) -> Weight:
    q, scales, middle = integers(w, bits, group, zeros=zeros)
    parts = {
        "weight_packed": Stored("I32", in_words(q, bits)),
        "weight_scale": Stored("F16", scales),
        "weight_shape": Stored("I64", np.array(w.shape)),
    }
    if zeros:
        full = np.zeros((-(-len(w) * bits // 32) * 32 // bits, middle.shape[1]), np.uint32)
        full[: len(w)] = middle
        parts["weight_zero_point"] = Stored("I32", in_words(full.T, bits).T)
    return Weight(parts, affine(q, scales, middle))


Pack = Callable[[np.ndarray], Weight]


def repack(weights: dict[str, np.ndarray], choose: Callable[[str], Pack | None]) -> tuple[dict, dict]:
    """Return (a checkpoint's tensors with chosen matrices packed, the same with the packed numbers in float32)."""
    stored, numbers = {}, {}
    for name, w in weights.items():
        pack = choose(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if pack is None:
            stored[name] = numbers[name] = plain(w)
            continue
        parts, values = pack(w)
        stored |= {name.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
        numbers[name] = plain(values)
    return stored, numbers
