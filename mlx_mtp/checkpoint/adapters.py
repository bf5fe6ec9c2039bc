"""Read LoRA adapters, in mlx-lm's format or PEFT's, for a loaded model."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..layers.adapters import Adapter
from ..layers.dora import DoRA
from ..machine.errors import one_line, with_type
from ..machine.paths import expanded
from .adapter_parts import changes, combined, slots
from .file_sizes import check_size
from .files import read_header
from .parameters import named, trained
from .peft import put_on

CONFIG = "adapter_config.json"
MLX_LM, PEFT = "adapters.safetensors", "adapter_model.safetensors"
AdapterPath = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
LEAVES = ("lora_a", "lora_b", "m")  # parameters of an adapted module; `m` is DoRA's magnitude


def load_adapters(model: Any, adapter_path: AdapterPath) -> Any:
    """Add LoRA adapters, in mlx-lm's or PEFT's format, to `model.runtime.adapters`, and return the model.

    adapter_path: a directory, whose adapters are then selected; several, whose sum is; or directories by name, of
    which none is selected. The model is set to evaluation. Warns of adapters that change nothing. Raises a one-line
    ValueError if adapters are missing, damaged, unsupported, given twice, cannot be added up or do not fit the model.
    """
    adapters = model.runtime.adapters
    if isinstance(adapter_path, Mapping):
        check_apart(adapter_path.values())
        adapters.known |= {name: _read_adapter(model, name, path) for name, path in adapter_path.items()}
        model.runtime.note(adapters=tuple((name, ()) for name in adapters.names))
    else:
        paths = [adapter_path] if isinstance(adapter_path, (str, Path)) else [*adapter_path]
        check_apart(paths)
        found = [_read_adapter(model, name_of(path), path) for path in paths]
        if not found:
            return model
        digests = "".join(sorted(adapter.fingerprint for adapter in found))
        digest = found[0].fingerprint if len(found) == 1 else hashlib.sha256(digests.encode()).hexdigest()
        whole = Adapter("+".join(adapter.name for adapter in found), digest, combined(found))
        adapters.known[whole.name] = whole
        adapters.select(whole.name)
        model.runtime.note(adapter=whole.name)
    model.eval()
    return model


def name_of(path: str | Path) -> str:
    """Return the name of an adapter: the last part of its directory's path."""
    return Path(os.path.abspath(expanded(path))).name


def by_name(paths: Sequence[str | Path]) -> dict[str, str | Path]:
    """Return directories of adapters by name; ValueError if one is given twice, or two have the same name."""
    check_apart(paths)
    found: dict[str, str | Path] = {}
    for path in paths:
        if (name := name_of(path)) in found:
            other = f"{found[name]} has the name {name!r}, too"
            raise ValueError(f"adapter_path={path}: {other}; rename one of the directories")
        found[name] = path
    return found


def check_apart(paths: Iterable[str | Path]) -> None:
    """Raise ValueError if a directory is given twice."""
    known: set[str] = set()
    for path in paths:
        if (real := os.path.realpath(expanded(path))) in known:
            raise ValueError(f"adapter_path={path}: given twice")
        known.add(real)


def _read_adapter(model: Any, name: str, adapter_path: str | Path) -> Adapter:
    """Return the adapter in a directory; the model is the same afterwards. Warn of an adapter that changes nothing.

    ValueError as `load_adapters`.
    """
    path = expanded(adapter_path)
    if not (path / CONFIG).is_file():
        raise ValueError(f"adapter_path={adapter_path}: no {CONFIG} in it")
    with model.runtime.adapters.using(None):
        before = [*slots(model)]
        try:
            with one_line(f"{adapter_path}: no usable adapters", (ValueError,)):
                tensors = _apply(model, path)
        finally:
            adapter = Adapter(name, "", changes(before))
            adapter.remove()
    second = [w for name, w in tensors.items() if name.endswith(("lora_b", "lora_B.weight"))]
    if second and not any(w.any().item() for w in second):
        warnings.warn(f"{path}: the adapters change nothing: every lora_b is zero", stacklevel=4)
    for part in adapter.parts:
        if isinstance(part.after, nn.Module):
            part.after.eval()
            mx.eval([a for a in part.after.values() if isinstance(a, mx.array)])
    return replace(adapter, fingerprint=_fingerprint(path, tensors))


def _fingerprint(path: Path, tensors: dict[str, mx.array]) -> str:
    """Return a digest of the content of an adapter: its config and its tensors."""
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    for name, w in sorted(tensors.items()):
        digest.update(f"{name} {w.shape} {w.dtype}".encode())
        digest.update(np.array(mx.view(mx.contiguous(w).reshape(-1), mx.uint8)).tobytes())
    return digest.hexdigest()


def _apply(model: Any, path: Path) -> dict[str, mx.array]:
    """Add a directory's adapters to the model, and return their tensors.

    Most errors name the file without the directory, which the caller adds.
    """
    check_size(path / CONFIG)
    with one_line(f"{CONFIG}: not valid JSON", (ValueError, RecursionError, OSError)):
        config = json.loads((path / CONFIG).read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG}: expected an object")
    of_mlx_lm = (path / MLX_LM).exists() and ("peft_type" not in config or "lora_parameters" in config)
    if not of_mlx_lm and ("peft_type" in config or (path / PEFT).exists()):
        tensors = _read(path / PEFT, "adapters of PEFT")
        put_on(model, CONFIG, config, PEFT, tensors)
    else:
        read = _read(path / MLX_LM, "adapters of mlx-lm")
        tensors = {name.removeprefix(getattr(model, "PREFIX", "")): w for name, w in read.items()}
        _put_on(model, config, tensors)
    if mx.default_device() == mx.cpu:  # where MLX multiplies experts in float32 only
        for module in model.modules():
            if isinstance(module, LoRASwitchLinear):
                module.lora_a, module.lora_b = (w.astype(mx.float32) for w in (module.lora_a, module.lora_b))
    return tensors


def _read(file: Path, kind: str) -> dict[str, mx.array]:
    """Return an adapter file's tensors; ValueError if it is missing or damaged, or a tensor is no finite floats.

    kind: the format's name for messages. The tensors are read.
    """
    if not file.exists():
        pickled = "; PyTorch's .bin files are not read" if any(file.parent.glob("*.bin")) else ""
        raise ValueError(f"{file.name}: not found; {CONFIG} describes {kind}, whose weights belong in it{pickled}")
    read_header([file])  # reports damage that MLX does not detect
    with one_line(f"{file.name}: truncated or damaged"):
        tensors: Any = mx.load(str(file))
        for name, w in tensors.items():
            if not mx.issubdtype(w.dtype, mx.floating):
                raise ValueError(f"tensor {name} holds no floating-point numbers")
    for name, w in tensors.items():
        if trained(w)[0].item() or mx.isinf(w).any().item():
            raise ValueError(f"{file.name}: tensor {name} holds NaN or infinity, expected trained adapters")
    return tensors


def _put_on(model: Any, config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    """Add adapters in mlx-lm's format: LoRA, DoRA or whole weights.

    ValueError if the config does not fit the model, there are no tensors, or a tensor does not fit the model.
    """
    kind = config.get("fine_tune_type", "lora")
    if kind != "full":
        try:
            linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"], use_dora=kind == "dora")
        except Exception as e:
            raise ValueError(f"{CONFIG}: {with_type(e)}") from e
        for path, m in model.named_modules():
            if isinstance(m, DoRAEmbedding) and "scales" in m.embedding:
                kind = f"DoRA of {path}, a quantized embedding"
                raise ValueError(f"{CONFIG}: {kind}, is not supported; load an unquantized model")
        dora = [(path, DoRA(m)) for path, m in model.named_modules() if isinstance(m, DoRALinear)]
        model.update_modules(tree_unflatten(dora))
    places = {n: w for n, w in named(model).items() if kind == "full" or n.rpartition(".")[2] in LEAVES}
    if not tensors:
        raise ValueError(f"{MLX_LM}: no tensors in it, so the adapters change nothing")
    for name, w in sorted(tensors.items()):
        if name not in places:
            fits = "none of its tensors fits" if not tensors.keys() & places.keys() else f"tensor {name} does not fit"
            raise ValueError(f"{MLX_LM}: {fits} the modules that {CONFIG} and the model have, such as {name}")
        if w.shape != places[name].shape:
            shapes = f"shape {[*w.shape]}; {CONFIG} and the model give {[*places[name].shape]}"
            raise ValueError(f"{MLX_LM}: tensor {name} has {shapes}")
    nn.Module.load_weights(model, [*tensors.items()], strict=False)
    for module in model.modules():
        if isinstance(module, DoRA):
            module.finish()
