"""Write the demo in the layout of the released Step-3.5 checkpoints, and read it back for evaluation."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.step3p5 import ModelArgs

from .network import DemoModel, build

# Ours (mlx-lm's modules, and `mtp.k`) -> the hub's, in this order.
TRUNK_NAMES = (
    (".mlp.switch_mlp.", ".moe."),
    (".mlp.gate.gate.", ".moe.gate."),
    (".mlp.gate.router_bias", ".moe.router_bias"),
    (".mlp.share_expert.", ".share_expert."),
)
DEPTH_NAMES = (
    ("block.", ""),
    ("output.", "transformer.shared_head.output."),
    ("norm.", "transformer.shared_head.norm."),
)


def hub_name(name: str, layers: int) -> str:
    """The released checkpoints' name of one of DemoModel's parameters; depth k is layer `layers + k`."""
    if name.startswith("mtp."):
        _, depth, rest = name.split(".", 2)
        for ours, hub in DEPTH_NAMES:
            if rest.startswith(ours):
                rest = hub + rest[len(ours) :]
                break
        return f"model.layers.{layers + int(depth)}.{rest}"
    for ours, hub in TRUNK_NAMES:
        name = name.replace(ours, hub)
    return name


def is_norm(name: str) -> bool:
    """Whether the hub stores this weight minus one (its norms multiply by 1 + weight)."""
    return name.endswith("norm.weight")


def hub_weights(model: DemoModel) -> dict[str, mx.array]:
    """All parameters under their hub names, norms zero-centred, bf16 but for the router biases."""
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        name = hub_name(name, model.args.num_hidden_layers)
        if is_norm(name):  # rounded before the shift, so that 1 + weight in bf16 gives the same norm
            value = value.astype(mx.bfloat16).astype(mx.float32) - 1
        weights[name] = value if name.endswith("router_bias") else value.astype(mx.bfloat16)
    return weights


def save(model: DemoModel, config: dict, directory: Path) -> None:
    """config.json, generation_config.json and model.safetensors; the tokenizer's files are not touched."""
    directory.mkdir(parents=True, exist_ok=True)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"do_sample": False}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    partial = directory / "partial.safetensors"
    mx.save_safetensors(str(partial), hub_weights(model), metadata={"format": "mlx"})
    partial.replace(directory / "model.safetensors")


def load(directory: Path) -> DemoModel:
    """The DemoModel of a saved directory, in fp32."""
    config = json.loads((directory / "config.json").read_text())
    args = ModelArgs.from_dict(config)
    model = build(args, 0, config["num_nextn_predict_layers"])
    stored = mx.load(str(directory / "model.safetensors"))
    weights = []
    for name, _ in tree_flatten(model.parameters()):
        hub = hub_name(name, args.num_hidden_layers)
        value = stored.pop(hub).astype(mx.float32)
        weights.append((name, value + 1 if is_norm(hub) else value))
    assert not stored, f"unknown tensors: {sorted(stored)}"
    model.load_weights(weights)
    return model
