"""Add LoRA adapters, in mlx-lm's format or PEFT's, to a loaded model."""

import json
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..machine.errors import one_line, with_type
from .files import read_header
from .parameters import named, trained
from .peft import put_on

CONFIG = "adapter_config.json"
MLX_LM, PEFT = "adapters.safetensors", "adapter_model.safetensors"
LEAVES = ("lora_a", "lora_b", "m")  # parameters of an adapted module; `m` is DoRA's magnitude


def load_adapters(model: Any, adapter_path: str) -> Any:
    """Add the LoRA adapters in a directory, in mlx-lm's or PEFT's format, to the model, and return the model.

    The model is modified and set to evaluation. Warns if every lora_b is zero, so that nothing changes. Raises a
    one-line ValueError if the adapters are missing, damaged, unsupported, or do not fit the model.
    """
    path = Path(adapter_path).expanduser()
    if not (path / CONFIG).is_file():
        raise ValueError(f"adapter_path={adapter_path}: no {CONFIG} in it")
    with one_line(f"{adapter_path}: no usable adapters", (ValueError,)):
        tensors = _apply(model, path)
    second = [w for name, w in tensors.items() if name.endswith(("lora_b", "lora_B.weight"))]
    if second and not any(w.any().item() for w in second):
        warnings.warn(f"{path}: the adapters change nothing: every lora_b is zero", stacklevel=3)
    model.eval()
    return model


def _apply(model: Any, path: Path) -> dict[str, mx.array]:
    """Add a directory's adapters to the model, and return their tensors.

    Most errors name the file without the directory, which the caller adds.
    """
    with one_line(f"{CONFIG}: not valid JSON", (ValueError, RecursionError, OSError)):
        config = json.loads((path / CONFIG).read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG}: expected an object")
    of_mlx_lm = (path / MLX_LM).exists() and ("peft_type" not in config or "lora_parameters" in config)
    if not of_mlx_lm and ("peft_type" in config or (path / PEFT).exists()):
        tensors = _read(path / PEFT, "adapters of PEFT")
        put_on(model, CONFIG, config, PEFT, tensors)
    else:
        tensors = _read(path / MLX_LM, "adapters of mlx-lm")
        _put_on(model, config, tensors)
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
