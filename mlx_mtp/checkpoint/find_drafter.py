"""Find an external drafter in a directory, and check that it fits its target."""

import json
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..machine.errors import one_line
from ..models import drafter_kinds
from .files import Header, read_header
from .packed.contents import recognize
from .packed.find import replaced
from .packed.modules import Packed
from .separate_heads import is_split
from .sort_tensors import OF_ACTIVATIONS


def joins_heads(path: Path) -> bool:
    """Return whether a directory contains a drafter that drafts next to MTP heads; False also if it is damaged."""
    return is_drafter(path) and not is_split(path) and read_drafter(path)[2].JOINS_HEADS


def is_drafter(path: Path) -> bool:
    """Return whether a directory contains an external drafter, or MTP heads that mlx-vlm split off a checkpoint.

    False also if it is damaged or cannot be read.
    """
    with suppress(ValueError, OSError):
        return is_split(path) or bool(read_drafter(path))
    return False


def read_drafter(path: Path) -> tuple[dict, Header, ModuleType, dict[str, Packed]]:
    """Return (config.json, header, the kind's module, packed weights by module) of a drafter.

    The header lists packed weights with the shapes and types of MLX's formats. ValueError if there is no drafter, or
    a damaged one.
    """
    kinds, reason, file = drafter_kinds(), None, path / "config.json"
    accepted = f"a drafter is {', or '.join(kind.ACCEPTED for kind in kinds)}"
    if not file.exists():
        raise ValueError(f"{file}: not found; {accepted}")
    with one_line(f"{file}: not valid JSON", (ValueError, RecursionError, OSError)):
        config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected an object")
    files = sorted(path.glob("*.safetensors"))
    if not files and list(path.glob("*.bin")):
        raise ValueError(f"{path}: its weights are in PyTorch's .bin format; save them as model.safetensors first")
    if not files:
        raise ValueError(f"{path}: no *.safetensors in it; {accepted}")
    header = read_header(files)
    packed = recognize(path, config, header, None)
    header = replaced({n: t for n, t in header.items() if not (packed and n.endswith(OF_ACTIVATIONS))}, packed)
    for kind in kinds:
        if (refusal := kind.refuses(config, header.keys())) is None:
            return config, header, kind, packed
        reason = reason or refusal
    raise ValueError(f"{path}: {reason}; {accepted}")


def check_drafter_fits(model: Any, head: Any, path: Path) -> None:
    """Raise ValueError if the drafter's hidden size, embedding or drafted tokens do not fit the target.

    Another hidden size needs an embedding and an LM head of its own. An embedding may have more rows than the target
    has tokens.
    """
    size, head_size, vocab_size = model.width, head.norm.weight.size, model.vocab_size
    if head_size != size and not {"embed_tokens", "head"} <= head.keys():
        needed = "so the drafter needs an embedding and an LM head of its own"
        raise ValueError(f"{path}: hidden_size {head_size} is not the target's {size}, {needed}")
    if "embed_tokens" in head and (rows := head.embed_tokens.weight.shape[0]) < vocab_size:
        raise ValueError(f"{path}: made for {rows} tokens, the target has {vocab_size}")
    if "head" in head:
        tokens = head.token(mx.arange(head.head.weight.shape[0]))
        low, high = tokens.min().item(), tokens.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{path}: drafts tokens {low} to {high}, the target has 0 to {vocab_size - 1}")
