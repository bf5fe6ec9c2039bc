"""Write and load the sidecar of `mlx-mtp tune-heads`, with facts on the target that the heads were trained for."""

import hashlib
import json
import re
import struct
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..demo import SHIPPED_HEADS
from ..layers.lm_head import KINDS, sliced
from ..layers.port import TUNED
from ..machine import atomic
from .convert_writer import file_size, header
from .files import CONVERTED
from .parameters import named, stored_name

TARGET = "mlx_mtp_target"  # the key of the target's fingerprint in the file's metadata
SIZES = "mlx_mtp_sizes"  # the key of the target's family and sizes


def fingerprint(model: Any) -> str:
    """Return a hash of a target's family, sizes and last norm, which its quantized conversions share.

    The norm is compared in bfloat16. A fine-tuned model has another one in nearly all cases; adapters do not count.
    """
    norm = np.array(model.model.norm.weight.astype(mx.bfloat16).astype(mx.float32))
    return hashlib.sha256(_sizes(model).encode() + norm.tobytes()).hexdigest()


def _sizes(model: Any) -> str:
    family = type(model).__module__.rpartition(".")[2]
    return f"{family} {len(model.layers)} {model.model.norm.weight.size} {model.vocab_size}"


def shipped_heads(config: Mapping[str, Any]) -> Path | None:
    """Return the file of heads in this package whose target has the sizes in config.json; None if there is none."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    sizes = " ".join(str(config.get(name)) for name in names)
    return next((file for file in SHIPPED_HEADS if _metadata(file).get(SIZES) == sizes), None)


def fits(model: Any, file: Path) -> bool:
    """Return whether the heads in a file of `write_heads` were trained for this target, or a conversion of it."""
    return target_of(file) == fingerprint(model)


def write_heads(model: Any, file: Path, facts: Mapping[str, str]) -> int:
    """Write the heads of a model to a new or replaced *.safetensors file; return its size in bytes.

    facts: further entries of the file's metadata. The file is complete or, if the write fails, unchanged.
    """
    lent = r"mtp\.\d+\.head\." if model.spec.prefix == TUNED.prefix else r"(?!)"
    kept = {path: w for path, w in named(model).items() if path.startswith("mtp.") and not re.match(lent, path)}
    heads = {stored_name(model, path): w for path, w in kept.items()}
    atomic.check_free(file, file_size(heads))
    about = {TARGET: fingerprint(model), SIZES: _sizes(model)}
    with atomic.file(file) as work, work.open("wb") as f:
        f.write(header(heads, {**CONVERTED, **facts, **about}))
        for w in heads.values():
            f.write(memoryview(mx.contiguous(w).reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
    return file.stat().st_size


def attach_tuned(model: Any, mtp_path: str | Path | None) -> None:
    """Give tuned new heads the target's LM-head rows of the tokens that they draft; check the sidecar's target.

    Warns if the heads were trained for another target. ValueError for tokens that the target does not have.
    """
    made_for = target_of(Path(mtp_path)) if mtp_path is not None and model.mtp else None
    if made_for not in (None, fingerprint(model)):
        warnings.warn(f"{mtp_path}: its heads were trained for another model; few drafts will be right", stacklevel=5)
    for head in model.mtp if model.spec.prefix == TUNED.prefix else ():
        head.set_dtype(model.model.norm.weight.dtype)
        lend_rows(model, head, str(mtp_path or "heads"))


def lend_rows(model: Any, head: Any, source: str = "heads") -> None:
    """Give a tuned new head an LM head with the target's rows of the tokens in its `d2t`, if it has one.

    source: for the ValueError about tokens that the target lacks, or an LM head of an unsupported kind.
    """
    if "d2t" not in head:
        return
    tokens, whole = head.d2t + mx.arange(head.d2t.size), model.unembedding()
    if tokens.min().item() < 0 or tokens.max().item() >= model.vocab_size:
        raise ValueError(f"{source}: they draft tokens outside the target's {model.vocab_size}")
    if not isinstance(whole, KINDS):
        raise ValueError(f"{source}: an LM head of kind {type(whole).__name__} has no draft vocabulary")
    head.head = sliced(whole, tokens)


def target_of(file: Path) -> str | None:
    """Return the fingerprint in a sidecar's metadata; None for a directory, or a file without one."""
    return _metadata(file).get(TARGET)


def _metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a *.safetensors file; {} if it cannot be read or has none."""
    with suppress(OSError, ValueError, KeyError, TypeError, struct.error), file.expanduser().open("rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        return json.loads(f.read(min(size, 1 << 26)))["__metadata__"] or {}  # MLX writes null without metadata
    return {}
