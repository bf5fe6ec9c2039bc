"""What a checkpoint directory holds, from file headers alone: tensors, their files, where the heads are."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx_lm.utils import load_config
from safetensors import SafetensorError, safe_open

TRUNK_FILES = "model*.safetensors"
INDEX = "model.safetensors.index.json"
SIDECAR_FILES = ("mtp.safetensors", "mtp/*.safetensors", "model-mtp*.safetensors")
DOWNLOADED = ("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.tiktoken", TRUNK_FILES, *SIDECAR_FILES)
FP8_SCALES = ("_scale_inv", "_scale")  # what follows a weight's name: per block, and per row or tensor
FP8_BLOCK = 128
CONVERTED = {"format": "mlx", "norms": "converted"}  # metadata of files that `mlx-mtp convert` writes


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header; `format` is the file's metadata entry ("pt", "mlx") or None.

    converted: no norm in the file is zero-centred, says its metadata.
    """

    file: Path
    shape: tuple[int, ...]
    format: str | None
    converted: bool


Header = dict[str, Tensor]


def resolve(path_or_repo: str | Path, revision: str | None = None, *, files: Collection[str] = DOWNLOADED) -> Path:
    """The local directory of a checkpoint; where it is no path, its `files` are downloaded from the hub."""
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path}: not a directory; a checkpoint is a directory with config.json")
    try:
        return Path(snapshot_download(str(path_or_repo), revision=revision, allow_patterns=list(files)))
    except Exception as e:
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise ValueError(f"{path_or_repo}: no such directory, and not on the hub: {reason}") from e


def read_config(path: Path) -> dict[str, Any]:
    """config.json (with generation_config.json's stop tokens), as mlx-lm reads it."""
    try:
        config = load_config(path)
    except FileNotFoundError:
        raise ValueError(f"{path}/config.json: not found; not a checkpoint directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}/config.json: not valid JSON ({e})") from None
    except (TypeError, AttributeError):  # mlx-lm merges generation_config.json into what may be a list
        raise ValueError(f"{path}: config.json and generation_config.json must be JSON objects") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path}/config.json: expected an object with a model_type")
    if config.get("text_config", {}) is None:
        del config["text_config"]
    if not isinstance(config.get("text_config", {}), dict):
        raise ValueError(f"{path}/config.json: text_config is {config['text_config']!r}, expected an object")
    return config


def read_header(files: Iterable[Path]) -> Header:
    """The tensors of safetensors files; a truncated or damaged file is a ValueError that names it."""
    header: Header = {}
    for file in files:
        try:
            with safe_open(file, "numpy") as f:
                metadata = f.metadata() or {}
                said = metadata.get("format"), metadata.get("norms") == CONVERTED["norms"]
                for name in f.keys():  # noqa: SIM118 - safe_open is not iterable
                    header[name] = Tensor(file, tuple(f.get_slice(name).get_shape()), *said)
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{file}: truncated or damaged ({e})") from None
    return header


def trunk_header(path: Path, *, whole: bool = True) -> Header:
    """The tensors of `model*.safetensors`, checked against the shard index where there is one and `whole` is."""
    files = sorted(path.glob(TRUNK_FILES))
    if not whole:
        return read_header(files)
    if not files:
        raise ValueError(f"{path}: no {TRUNK_FILES} in it")
    header = read_header(files)
    for name, file in read_index(path).items():
        if not (path / file).exists():
            raise ValueError(f"{path / file}: missing; {INDEX} expects tensor {name} in it")
        if name not in header and (path / file) in files:
            raise ValueError(f"{path / file}: tensor {name} is missing; {INDEX} expects it there")
    return header


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor as the shard index has it; empty where there is none."""
    index = path / INDEX
    if not index.exists():
        return {}
    try:
        return json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise ValueError(f"{index}: damaged ({e})") from None


def sidecar_files(path: Path, mtp_path: str | Path | None) -> list[Path]:
    """Files beside the trunk's that hold heads: `mtp_path` (a file or a directory), else those found by name."""
    if mtp_path is None:
        return sorted({file for pattern in SIDECAR_FILES for file in path.glob(pattern)})
    given = Path(mtp_path).expanduser()
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    if not files or not files[0].exists():
        raise ValueError(f"mtp_path={given}: no such file, or a directory without .safetensors")
    return files


def read_tensors(header: Header) -> dict[str, mx.array]:
    """The header's tensors as lazy arrays."""
    loaded = {file: mx.load(str(file)) for file in {tensor.file for tensor in header.values()}}
    return {name: loaded[tensor.file][name] for name, tensor in header.items()}  # type: ignore[index]


def dequantized(weights: dict[str, mx.array], header: Header) -> dict[str, mx.array]:
    """8-bit floats times their scales, as bfloat16; what is not stored so stays as it is."""
    plain = dict(weights)
    for name, weight in weights.items():
        suffix = next((s for s in FP8_SCALES if name + s in weights), None)
        if suffix is None or weight.dtype != mx.uint8:
            continue
        scale = plain.pop(name + suffix)
        rows, columns = weight.shape[0], weight.shape[-1]
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        if scale.shape == blocks:
            scale = mx.repeat(mx.repeat(scale, FP8_BLOCK, 0)[:rows], FP8_BLOCK, 1)[:, :columns]
        elif scale.size not in (1, rows):
            raise ValueError(
                f"{header[name].file}: tensor {name}{suffix} has shape {scale.shape}; expected one scale, {rows} for "
                f"the rows, or {blocks} for blocks of {FP8_BLOCK}"
            )
        else:
            scale = scale.reshape(-1, 1)
        plain[name] = (mx.from_fp8(weight, dtype=mx.bfloat16) * scale).astype(mx.bfloat16)
    return plain


def untrained(array: mx.array) -> str | None:
    """What an array holds that no training leaves, "NaN" or "only zeros"; None where there is nothing wrong."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return None
    return "NaN" if mx.isnan(array).any().item() else None if array.any().item() else "only zeros"
