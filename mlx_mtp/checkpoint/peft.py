"""Put a PEFT adapter of kind LoRA on a loaded model, as mlx-lm's layers: y + scale * (x @ lora_a) @ lora_b.

What PEFT has beyond that is refused by its name. Which modules a configuration means, their ranks and their scales
follow PEFT's `LoraConfig`.
"""

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.\w+)?\.weight")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OTHER_TOWERS = re.compile(r"(^|\.)\w*(visual|vision|audio|projector|connector)\w*\.")
WRAPPERS = {"", "model", "language_model", "text_model", "transformer", "backbone"}  # in front of "layers."
# What a config may ask for beyond plain LoRA, and the name it goes by.
UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of parameters",
    "lora_bias": "a bias of lora_B",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
}
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the model's own weights
# What else a file may hold, and what it then is.
OTHER_KEYS = {
    "lora_magnitude_vector": "DoRA, use_dora",
    "lora_embedding_": "adapters of embeddings",
    "lora_B.bias": "a bias of lora_B, lora_bias",
    ".bias": "a bias",
}


@dataclass
class Pair:
    """One module's adapter: the tensors' names in the file, `A` [r, in] and `B` [out, r]."""

    names: dict[str, str]
    tensors: dict[str, mx.array]


def put_on(model: Any, file: str, config: dict[str, Any], weights: str, tensors: dict[str, mx.array]) -> None:
    """Put the adapters in `weights` on the model as the config in `file` says; ValueError where they do not fit."""
    _check_config(config, file)
    modules = dict(model.named_modules())
    placed: dict[str, dict[int | None, tuple[Pair, float]]] = {}
    skipped: list[str] = []
    for name, pair in _pairs(tensors, weights).items():
        if not _is_target(name, config, file) or (OTHER_TOWERS.search(name) and name not in modules):
            skipped.append(name)
            continue
        path = _find(model, modules, name, weights)
        if path.startswith("mtp."):
            skipped.append(name)
            continue
        rank, scale = _rank_and_scale(name, config, file)
        _check_shapes(pair, modules[path], path, rank, weights)
        expert = EXPERT.search(name)
        placed.setdefault(path, {})[int(expert[1]) if expert else None] = pair, scale
    if not placed:
        some = f", such as {skipped[0]}" if skipped else ""
        raise ValueError(f"{weights}: none of its tensors fits a module that {file} and the model have{some}")
    if skipped:
        text = f"{weights}: not used, of {len(skipped)} modules that are not targets in the text model: {skipped[0]}"
        warnings.warn(text, stacklevel=5)
    adapted = [(path, _adapted(modules[path], path, pairs, weights)) for path, pairs in placed.items()]
    model.update_modules(tree_unflatten(adapted))


def _check_config(config: dict[str, Any], file: str) -> None:
    """Raise for what is no plain LoRA."""
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2].upper()
    asked = [f"{what}, {name}" for name, what in UNSUPPORTED.items() if config.get(name)]
    asked += [f"peft_type={kind}"] if kind != "LORA" else []
    asked += [f"bias={config['bias']!r}"] if config.get("bias", "none") not in (None, "none", False) else []
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(CHANGE_BASE):
        asked.append(f"init_lora_weights={begin!r} that changes the base weights")
    if asked:
        raise ValueError(
            f"{file}: a PEFT adapter with {'; '.join(asked)}; that is not supported: merge it into the model with "
            "PEFT's merge_and_unload, and load that"
        )


def _pairs(tensors: dict[str, mx.array], weights: str) -> dict[str, Pair]:
    """Group the tensors of each adapted module by its name in the released model."""
    found: dict[str, Pair] = {}
    for key, w in tensors.items():
        match = KEY.fullmatch(key)
        what = next((what for part, what in OTHER_KEYS.items() if part in key), "a whole weight, modules_to_save")
        if match is None:
            raise ValueError(f"{weights}: tensor {key} is no LoRA matrix but {what}, which is not supported")
        pair = found.setdefault(match[1], Pair({}, {}))
        pair.names[match[2]], pair.tensors[match[2]] = key, w
    for name, pair in found.items():
        for kind in ("A", "B"):
            if kind not in pair.names:
                raise ValueError(f"{weights}: the lora_{kind} of {name} is missing; its other matrix is there")
    return found


def _is_target(name: str, config: dict[str, Any], file: str) -> bool:
    """Return whether the config means the module; without `target_modules` it means all that have tensors."""
    targets = config.get("target_modules")
    if _matches(name, config.get("exclude_modules") or [], file):
        return False
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str) or name in targets:
        return _matches(name, targets, file)
    return _matches(name, targets, file) and _is_layer(name, config)


def _matches(name: str, given: Any, file: str) -> bool:
    """Match a whole name with a regex, or its end with one of a list."""
    if not isinstance(given, str):
        return any(f".{name}".endswith(f".{ending}") for ending in given)
    try:
        return re.fullmatch(given, name) is not None
    except re.error as e:
        raise ValueError(f"{file}: {given!r} is no regular expression: {e}") from None


def _is_layer(name: str, config: dict[str, Any]) -> bool:
    """Return whether the module is in one of `layers_to_transform`, if those are given."""
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or [r"[^.]*"]
    if layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) else patterns
    match = next((m for pattern in patterns if (m := re.match(rf".*\.{pattern}\.(\d+)\.", name))), None)
    return match is not None and int(match[1]) in ([layers] if isinstance(layers, int) else layers)


def _find(model: Any, modules: dict[str, Any], name: str, weights: str) -> str:
    """Find the path of the module that has this name in the released model; ValueError where there is none."""
    names = [name, EXPERT.sub(".switch_mlp.", name)]
    if hasattr(model, "renamed"):
        paths = [path.removesuffix(".weight") for path in model.renamed(f"{name}.weight")]
        if len(paths) > 1:
            raise ValueError(f"{weights}: adapters of {name} are not supported: it becomes {', '.join(paths)} here")
        names = paths or names
    found = next((n for n in names if n in modules or n.startswith("mtp.")), None)
    if found is None:
        before, layers, tail = names[-1].rpartition("layers.")
        same = [
            path for path in modules if path.endswith(f"layers.{tail}") and not path.startswith(("mtp.", "drafter."))
        ]
        if not layers or len(same) != 1 or not {*before.split(".")} <= WRAPPERS:
            raise ValueError(f"{weights}: the model has no module {name}, which the adapters are for")
        found = same[0]
    if not found.startswith("mtp.") and not isinstance(modules[found], (*LINEAR, *SWITCH)):
        kind = type(modules[found]).__name__
        raise ValueError(f"{weights}: adapters of {name} are not supported: it is {kind}, not a linear layer")
    return found


LINEAR, SWITCH = (nn.Linear, nn.QuantizedLinear), (SwitchLinear, QuantizedSwitchLinear)


def _rank_and_scale(name: str, config: dict[str, Any], file: str) -> tuple[int, float]:
    """Return a module's rank, and what its product is multiplied by."""
    rank = _of_pattern(name, config.get("rank_pattern"), config.get("r", 8))
    alpha = _of_pattern(name, config.get("alpha_pattern"), config.get("lora_alpha", 8))
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"{file}: r is {rank!r} and lora_alpha {alpha!r} for {name}, expected positive numbers")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(name: str, patterns: Any, usual: Any) -> Any:
    """Return the value of the first pattern that the end of a name matches, else the usual one."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, usual)


def _check_shapes(pair: Pair, module: Any, path: str, rank: int, weights: str) -> None:
    """Raise where matrices are not of the module's size and the config's rank."""
    width, size = _sizes(module)
    for kind, expected in (("A", [rank, width]), ("B", [size, rank])):
        if (shape := [*pair.tensors[kind].shape]) != expected:
            given = f"rank {rank} and the module {path} give {expected}"
            raise ValueError(f"{weights}: tensor {pair.names[kind]} has shape {shape}; {given}")


def _sizes(module: Any) -> tuple[int, int]:
    """Return the numbers of features that a linear module reads and makes."""
    size, width = module.weight.shape[-2:]
    return (width * 32 // module.bits if "scales" in module else width), size


def _adapted(module: Any, path: str, pairs: dict[int | None, tuple[Pair, float]], weights: str) -> nn.Module:
    """Make mlx-lm's layer around a module; of stacked experts, those without adapters get zeros."""
    (first, scale), *others = pairs.values()
    rank = first.tensors["A"].shape[0]
    if not isinstance(module, SWITCH):
        layer = LoRALinear.from_base(module, r=rank, scale=scale)
        layer.lora_a, layer.lora_b = first.tensors["A"].T, first.tensors["B"].T
        return layer
    for pair, other in others:
        if pair.tensors["A"].shape[0] != rank or other != scale:
            raise ValueError(f"{weights}: adapters of the experts of {path} have several ranks or scales")
    layer = LoRASwitchLinear.from_base(module, r=rank, scale=scale)
    for kind, name in (("A", "lora_a"), ("B", "lora_b")):
        layer[name] = mx.stack([*_of_experts(pairs, module.weight.shape[0], kind, first.tensors[kind])])
    return layer


def _of_experts(pairs: dict[Any, tuple[Pair, float]], count: int, kind: str, like: mx.array) -> Iterator[mx.array]:
    """Yield the matrices of all experts, zeros where one has none."""
    for expert in range(count):
        yield pairs[expert][0].tensors[kind] if expert in pairs else mx.zeros_like(like)
