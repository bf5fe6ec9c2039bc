"""Attach a drafter of a directory of its own to its target, in the place of heads, once it is checked."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from ..models import drafter_kinds
from .files import Header, read_header, read_tensors, resolve
from .parameters import check_numbers, named


def attach_drafter(model: Any, path_or_hf_repo: str | Path, overrides: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Give `model` the drafter as its one head; returns (where it came from, tensors that are not used).

    Raises ValueError for a directory that holds no drafter, or one for another target.
    """
    path = resolve(path_or_hf_repo)
    config, header, kind = _read(path)
    ignored = tuple(sorted(name for name in header if name.endswith(kind.IGNORED)))
    header = {name: tensor for name, tensor in header.items() if name not in ignored}
    layers, size = model.args.num_hidden_layers, model.model.norm.weight.size
    try:
        spec = kind.make_spec(config, header.keys(), layers, overrides)
        head = kind.make_head(spec, config, header.keys(), size)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise ValueError(f"{path}/config.json: no drafter can be built from it ({type(e).__name__}: {e})") from e
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    _load(head, spec, header, path, f"its target has {len(spec.capture)} x {size} features")
    _check_fit(model, head, path)
    head.set_dtype(model.model.norm.weight.dtype)
    head.eval()
    model.spec, model.mtp = spec, [head]
    return f"{path}, reading the target after layers {', '.join(map(str, spec.capture))}", ignored


def is_drafter(path: Path) -> bool:
    """Tell whether a directory holds a drafter."""
    try:
        _read(path)
    except (ValueError, OSError):
        return False
    return True


def _read(path: Path) -> tuple[dict, Header, ModuleType]:
    """Return a drafter's config.json, its tensors and the module of its kind; ValueError where it is none."""
    kinds, reason = drafter_kinds(), None
    accepted = f"a drafter is {', or '.join(kind.ACCEPTED for kind in kinds)}"
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}/config.json: not found; {accepted}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}/config.json: not valid JSON ({e})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}/config.json: expected an object")
    files = sorted(path.glob("*.safetensors"))
    if not files and list(path.glob("*.bin")):
        raise ValueError(f"{path}: its weights are in PyTorch's .bin format; save them as model.safetensors first")
    if not files:
        raise ValueError(f"{path}: no *.safetensors in it; {accepted}")
    header = read_header(files)
    for kind in kinds:
        reason = kind.refuses(config, header.keys())
        if reason is None:
            return config, header, kind
    raise ValueError(f"{path}: {reason}; {accepted}")


def _load(head: nn.Module, spec: Any, header: Header, path: Path, target: str) -> None:
    """Fill the module with the tensors; each of both must have its partner, of the same shape."""
    names = {}
    for name, tensor in header.items():
        _, inside = spec.locate(name, 0) or (0, None)
        if inside is None:
            raise ValueError(f"{tensor.file}: tensor {name} belongs to no part of a drafter")
        if inside in names:
            raise ValueError(f"{tensor.file}: tensors {names[inside]} and {name} are the same one")
        names[inside] = name
    stored = read_tensors(header)
    weights = {inside: stored[name] for inside, name in names.items()}
    packed = {at.removesuffix(".scales") for at in weights if at.endswith(".scales")}
    nn.quantize(head, class_predicate=lambda at, m: at in packed and infer_quant_config(at, m, weights))
    expected = named(head)
    for inside, array in expected.items():
        if inside not in weights:
            raise ValueError(f"{path}: tensor {spec.stored(inside)} is missing; expected with shape {array.shape}")
        if weights[inside].shape != array.shape:
            raise ValueError(
                f"{header[names[inside]].file}: tensor {names[inside]} has shape {weights[inside].shape}; "
                f"config.json expects {array.shape} ({target})"
            )
    for inside in weights.keys() - expected.keys():
        raise ValueError(f"{path}: tensor {names[inside]} is not part of the drafter that config.json describes")
    head.load_weights(list(weights.items()))
    mx.eval(head.parameters())
    trained = {f"mtp.{at}": array for at, array in weights.items() if not at.endswith(".biases")}
    check_numbers(trained, lambda at: (header[names[at[4:]]].file, names[at[4:]]))


def _check_fit(model: Any, head: Any, path: Path) -> None:
    """Raise where tokens or embeddings of drafter and target do not match."""
    size, own, vocab_size = model.model.norm.weight.size, head.norm.weight.size, model.args.vocab_size
    if own != size and not {"embed_tokens", "head"} <= head.keys():
        needed = "an embedding and an LM head of its own"
        raise ValueError(f"{path}: hidden_size {own} needs {needed}; the target's is {size}")
    if "embed_tokens" in head and (rows := head.embed_tokens.weight.shape[0]) < vocab_size:
        raise ValueError(f"{path}: made for {rows} tokens, the target has {vocab_size}")
    if "head" in head:
        tokens = head.token(mx.arange(head.head.weight.shape[0]))
        low, high = tokens.min().item(), tokens.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{path}: drafts tokens {low} to {high}, the target has 0 to {vocab_size - 1}")
