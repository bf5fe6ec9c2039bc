"""The sidecar of `mlx-mtp tune-heads`: its facts on the target that the heads were trained for, and its loading."""

import hashlib
import json
import struct
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..layers.lm_head import KINDS, sliced
from ..layers.port import TUNED
from ..machine import atomic
from .convert_writer import file_size, header
from .files import CONVERTED
from .parameters import named, stored_name

TARGET = "mlx_mtp_target"  # the key of the target's fingerprint in the file's metadata


def fingerprint(model: Any) -> str:
    """Return a hash of a target's family, sizes and last norm, which its quantized conversions share.

    The norm is compared in bfloat16. A fine-tuned model has another one in nearly all cases; adapters do not count.
    """
    norm = np.array(model.model.norm.weight.astype(mx.bfloat16).astype(mx.float32))
    facts = [type(model).__module__, len(model.layers), norm.size, model.vocab_size]
    return hashlib.sha256(json.dumps(facts).encode() + norm.tobytes()).hexdigest()


def write_heads(model: Any, file: Path, facts: Mapping[str, str]) -> int:
    """Write the heads of a model to a new or replaced *.safetensors file; return its size in bytes.

    facts: further entries of the file's metadata. The file is complete or, if the write fails, unchanged.
    """
    heads = {stored_name(model, path): w for path, w in named(model).items() if path.startswith("mtp.")}
    if model.spec.prefix == TUNED.prefix:
        heads = {name: w for name, w in heads.items() if ".head." not in name}
    atomic.check_free(file, file_size(heads))
    with atomic.file(file) as work, work.open("wb") as f:
        f.write(header(heads, {**CONVERTED, **facts, TARGET: fingerprint(model)}))
        for w in heads.values():
            f.write(memoryview(mx.contiguous(w).reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
    return file.stat().st_size


def attach_tuned(model: Any, mtp_path: str | Path | None) -> None:
    """Give tuned new heads the target's LM-head rows of the tokens that they draft; check the sidecar's target.

    Warns if the heads were trained for another target. ValueError for tokens that the target does not have.
    """
    if mtp_path is not None and model.mtp and (made_for := target_of(Path(mtp_path))):
        if made_for != fingerprint(model):
            warnings.warn(f"{mtp_path}: its heads were trained for another model; few drafts will be right", stacklevel=5)
    for head in model.mtp if model.spec.prefix == TUNED.prefix else ():
        if "d2t" not in head:
            continue
        tokens, whole = head.d2t + mx.arange(head.d2t.size), model.unembedding()
        if tokens.min().item() < 0 or tokens.max().item() >= model.vocab_size:
            raise ValueError(f"{mtp_path or 'heads'}: they draft tokens outside the target's {model.vocab_size}")
        if not isinstance(whole, KINDS):
            raise ValueError(f"{mtp_path or 'heads'}: an LM head of kind {type(whole).__name__} has no draft vocabulary")
        head.head = sliced(whole, tokens)


def target_of(file: Path) -> str | None:
    """Return the fingerprint in a sidecar's metadata; None for a directory, or a file without one."""
    with suppress(OSError, ValueError, KeyError, struct.error):
        with file.expanduser().open("rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            return json.loads(f.read(min(size, 1 << 26)))["__metadata__"][TARGET]
    return None
