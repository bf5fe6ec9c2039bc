"""Write and load the heads' file of `mlx-mtp tune-heads`, with facts on the target that they were trained for."""

import hashlib
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..demo import SHIPPED_HEADS
from ..layers.lm_head import KINDS, sliced
from ..layers.with_heads import TUNED
from ..machine import atomic
from ..machine.paths import expanded
from . import convert_writer as writer
from .files import CONVERTED
from .parameters import named, stored_name
from .report import drafting_bytes, lm_heads

TARGET = "mlx_mtp_target"  # the key of the target's fingerprint in the file's metadata
SIZES = "mlx_mtp_sizes"  # the key of the target's family and sizes


def fingerprint(model: Any) -> str:
    """Return a hexadecimal hash of a target's family, sizes and last norm; its quantized conversions have the same.

    The norm is rounded to bfloat16 before. A fine-tuned model has another hash in nearly all cases; adapters do not
    change it.
    """
    norm = np.array(model.final_norm.weight.astype(mx.bfloat16).astype(mx.float32))
    return hashlib.sha256(_sizes(model).encode() + norm.tobytes()).hexdigest()


def _sizes(model: Any) -> str:
    family = type(model).__module__.rpartition(".")[2]
    return f"{family} {len(model.layers)} {model.width} {model.vocab_size}"


def shipped_heads(config: Mapping[str, Any]) -> Path | None:
    """Return the file of heads in this package for a target of a model type and sizes; None if there is none.

    config: config.json. A fine-tuned model has the same sizes, so `fits` is needed, too.
    """
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    sizes = " ".join(str(config.get(name)) for name in names)
    return next((file for file in SHIPPED_HEADS if _metadata(file).get(SIZES) == sizes), None)


def fits(model: Any, file: Path) -> bool:
    """Return whether the fingerprint in a file of `write_heads` is that of the target `model`; False without one."""
    return target_of(file) == fingerprint(model)


def write_heads(model: Any, file: Path, facts: Mapping[str, str]) -> int:
    """Write the heads of a model to a *.safetensors file, which is created or replaced; return its size in bytes.

    The target's LM-head rows of a new head (`lend_rows`) are left out. facts: further entries of the file's metadata.
    If the write fails (OSError, or ValueError if the disk is too full or another run is writing), an earlier file is
    unchanged.
    """
    lent = r"mtp\.\d+\.head\." if model.spec.prefix == TUNED.prefix else r"(?!)"
    kept = {path: w for path, w in named(model).items() if path.startswith("mtp.") and not re.match(lent, path)}
    heads = {stored_name(model, path): w for path, w in kept.items()}
    atomic.check_free(file, writer.file_size(heads))
    about = {TARGET: fingerprint(model), SIZES: _sizes(model)}
    with atomic.file(file) as work:
        writer.write({work: heads}, lambda _, w: mx.eval(w), metadata={**CONVERTED, **facts, **about})
    return file.stat().st_size


def attach_tuned(model: Any, mtp_path: str | Path | None) -> None:
    """Complete loaded heads: give those of `tune-heads --new` the target's floating-point type and `lend_rows`.

    The report is updated. Warns if the file `mtp_path` states another target than `model`. mtp_path: where the heads
    were loaded from, None for the checkpoint itself. ValueError as in `lend_rows`.
    """
    made_for = target_of(Path(mtp_path)) if mtp_path is not None and model.mtp else None
    if made_for not in (None, fingerprint(model)):
        warnings.warn(f"{mtp_path}: its heads were trained for another model; few drafts will be right", stacklevel=5)
    for head in model.mtp if model.spec.prefix == TUNED.prefix else ():
        head.set_dtype(model.no_hidden().dtype)
        lend_rows(model, head, str(mtp_path or "heads"))
        model.runtime.note(head_bytes=drafting_bytes(model), lm_head=lm_heads(model.mtp))


def lend_rows(model: Any, head: Any, source: str = "heads") -> None:
    """Give a head an LM head of the target's rows for the tokens in its `d2t`; without `d2t` it is unchanged.

    source: the start of messages. ValueError for tokens that the target lacks, or if the target's LM head is of an
    unsupported kind.
    """
    if "d2t" not in head:
        return
    tokens, whole = head.d2t + mx.arange(head.d2t.size), model.unembedding()
    if tokens.min().item() < 0 or tokens.max().item() >= model.vocab_size:
        raise ValueError(f"{source}: drafts tokens outside the target's 0 to {model.vocab_size - 1}")
    if not isinstance(whole, KINDS):
        raise ValueError(f"{source}: the target's LM head, a {type(whole).__name__}, supports no draft vocabulary")
    head.head = sliced(whole, tokens)


def target_of(file: Path) -> str | None:
    """Return the target's fingerprint in the metadata of a heads' file; None for a directory, or without one."""
    return _metadata(file).get(TARGET)


def _metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a *.safetensors file by name; {} if the file cannot be read or has none."""
    with suppress(OSError, SafetensorError), safe_open(expanded(file), "numpy") as f:
        return f.metadata() or {}
    return {}
