"""Add a PEFT adapter of kind LoRA to a loaded model, as mlx-lm's layers: y + scale * (x @ lora_a) @ lora_b.

Modules, ranks and scales are chosen as in PEFT's `LoraConfig`; its other features are refused by name.
"""

import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from ..layers.adapters import shape_of
from .sort_tensors import EXPERT

KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.\w+)?\.weight")
OTHER_TOWERS = re.compile(r"(^|\.)\w*(visual|vision|audio|projector|connector)\w*\.")
WRAPPERS = {"", "model", "language_model", "text_model", "transformer", "backbone"}  # before "layers."
# Unsupported entries of a config, and their names in messages.
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
# Unsupported tensors, by a part of the name, and their names in messages.
OTHER_KEYS = {
    "lora_magnitude_vector": "DoRA, use_dora",
    "lora_embedding_": "adapters of embeddings",
    "lora_B.bias": "a bias of lora_B, lora_bias",
    ".bias": "a bias",
}


@dataclass
class AdapterPair:
    """One module's adapter: tensors `A` [r, in] and `B` [out, r], and their names in the file."""

    names: dict[str, str]
    tensors: dict[str, mx.array]


def put_on(model: Any, file: str, config: dict[str, Any], weights: str, tensors: dict[str, mx.array]) -> None:
    """Put mlx-lm's LoRA layers around the modules that a PEFT adapter changes.

    Warn of tensors that are not used, because the config does not select their module, or it is in an MTP head or in
    another tower (vision, audio) that the model lacks. file, weights: names of the files of `config` and `tensors`,
    for messages. ValueError if tensors do not fit the model or the config, no tensor is left, or the kind of adapter
    is unsupported.
    """
    _check_config(config, file)
    modules = dict(model.named_modules())
    placed: dict[str, dict[int | None, tuple[AdapterPair, float]]] = {}
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
        warnings.warn(text, stacklevel=6)
    adapted = [(path, _adapted(modules[path], path, pairs, weights)) for path, pairs in placed.items()]
    model.update_modules(tree_unflatten(adapted))


def _check_config(config: dict[str, Any], file: str) -> None:
    """Raise ValueError, with a list, for a config with features that are not supported."""
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2].upper()
    refused = [f"{feature}, {name}" for name, feature in UNSUPPORTED.items() if config.get(name)]
    refused += [f"peft_type={kind}"] if kind != "LORA" else []
    refused += [f"bias={config['bias']!r}"] if config.get("bias", "none") not in (None, "none", False) else []
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(CHANGE_BASE):
        refused.append(f"init_lora_weights={initial!r} that changes the base weights")
    if refused:
        advice = "merge it into the model with PEFT's merge_and_unload, and load that"
        raise ValueError(f"{file}: a PEFT adapter with {'; '.join(refused)}; that is not supported: {advice}")


def _pairs(tensors: dict[str, mx.array], weights: str) -> dict[str, AdapterPair]:
    """Return the pair of tensors of each adapted module, by its name in the released model.

    ValueError for a tensor that is no LoRA matrix, or a pair with one matrix only.
    """
    found: dict[str, AdapterPair] = {}
    for key, w in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            kind = next((k for part, k in OTHER_KEYS.items() if part in key), "a whole weight, modules_to_save")
            raise ValueError(f"{weights}: tensor {key} is no LoRA matrix but {kind}, which is not supported")
        pair = found.setdefault(match[1], AdapterPair({}, {}))
        pair.names[match[2]], pair.tensors[match[2]] = key, w
    for name, pair in found.items():
        for kind in ("A", "B"):
            if kind not in pair.names:
                raise ValueError(f"{weights}: the lora_{kind} of {name} is missing; both matrices are needed")
    return found


def _is_target(name: str, config: dict[str, Any], file: str) -> bool:
    """Return whether the config selects a module, as PEFT does, by name, exclusions and layers.

    Without `target_modules`, and with "all-linear", every module that is not excluded is selected. ValueError for an
    invalid regex.
    """
    targets = config.get("target_modules")
    if _matches(name, config.get("exclude_modules") or [], file):
        return False
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str) or name in targets:
        return _matches(name, targets, file)
    return _matches(name, targets, file) and _is_layer(name, config, file)


def _matches(name: str, given: Any, file: str) -> bool:
    """Return whether a regex matches the whole name, or the name ends with one of a list's module names.

    ValueError for an invalid regex.
    """
    if not isinstance(given, str):
        return any(f".{name}".endswith(f".{ending}") for ending in given)
    return _match(given, given, name, file) is not None


def _match(given: Any, regex: str, name: str, file: str) -> re.Match[str] | None:
    """Return the match of the regex with the whole name, None if there is none.

    ValueError, which names `given` and the file, for an invalid regex.
    """
    try:
        return re.fullmatch(regex, name)
    except re.error as e:
        raise ValueError(f"{file}: {given!r} is no regular expression: {e}") from None


def _is_layer(name: str, config: dict[str, Any], file: str) -> bool:
    """Return whether a module is in a layer of `layers_to_transform`; True if that is missing, null or empty.

    ValueError for an invalid regex in `layers_pattern`.
    """
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or [r"[^.]*"]
    if layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = (_match(pattern, rf".*\.{pattern}\.(\d+)\..*", name, file) for pattern in patterns)
    match = next(filter(None, found), None)
    return match is not None and int(match[1]) in ([layers] if isinstance(layers, int) else layers)


def _find(model: Any, modules: dict[str, Any], name: str, weights: str) -> str:
    """Return the path in the model of the module with this name in the released model.

    ValueError if there is none, it is no linear layer, or its tensor becomes several. The path of a module of an MTP
    head is returned without these checks.
    """
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
    """Return a module's rank, and the factor of the product with its two matrices.

    ValueError for invalid numbers, and for invalid regexes in `rank_pattern` and `alpha_pattern`.
    """
    rank = _of_pattern(name, "rank_pattern", config, config.get("r", 8), file)
    alpha = _of_pattern(name, "alpha_pattern", config, config.get("lora_alpha", 8), file)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        expected = "expected an integer from 1 on, and a finite number"
        raise ValueError(f"{file}: r is {rank!r} and lora_alpha {alpha!r} for {name}, {expected}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(name: str, key: str, config: dict[str, Any], default: Any, file: str) -> Any:
    """Return the value of the first regex in the dict config[key] that matches a name, or its end after a dot.

    The default if none does, or if that dict is missing or null. ValueError for an invalid regex, and for no dict.
    """
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{file}: {key} is {patterns!r}, expected an object from regular expressions to numbers")
    found = (value for regex, value in patterns.items() if _match(regex, rf"(.*\.)?({regex})", name, file))
    return next(found, default)


def _check_shapes(pair: AdapterPair, module: Any, path: str, rank: int, weights: str) -> None:
    """Raise ValueError if an adapter's matrices do not have the module's sizes and the config's rank."""
    size, width = shape_of(module)
    for kind, expected in (("A", [rank, width]), ("B", [size, rank])):
        if (shape := [*pair.tensors[kind].shape]) != expected:
            given = f"rank {rank} and the module {path} give {expected}"
            raise ValueError(f"{weights}: tensor {pair.names[kind]} has shape {shape}; {given}")


def _adapted(module: Any, path: str, pairs: dict[int | None, tuple[AdapterPair, float]], weights: str) -> nn.Module:
    """Return mlx-lm's LoRA layer around a module; of stacked experts, those without an adapter get zeros.

    pairs: (adapter, scale) by expert; by None for a module without experts. ValueError if experts' ranks or scales
    differ.
    """
    (first, scale), *others = pairs.values()
    rank = first.tensors["A"].shape[0]
    if not isinstance(module, SWITCH):
        layer = LoRALinear.from_base(module, r=rank, scale=scale)
        layer.lora_a, layer.lora_b = first.tensors["A"].T, first.tensors["B"].T
        return layer
    for pair, other in others:
        if pair.tensors["A"].shape[0] != rank or other != scale:
            raise ValueError(f"{weights}: adapters of the experts of {path} need one rank and one scale; they differ")
    layer = LoRASwitchLinear.from_base(module, r=rank, scale=scale)
    for kind, name in (("A", "lora_a"), ("B", "lora_b")):
        zeros, experts = mx.zeros_like(first.tensors[kind]), range(module.weight.shape[0])
        layer[name] = mx.stack([pairs[i][0].tensors[kind] if i in pairs else zeros for i in experts])
    return layer
