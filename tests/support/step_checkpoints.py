"""Write Step-3.5 checkpoints as mlx-lm converts them, and damage their tensors."""

import json

import mlx.core as mx
import tiny
from mlx_lm.utils import quantize_model, save_model

CONFIG = {**tiny.CONFIG, "vocab_size": 5, "max_position_embeddings": 4096}  # a limit that is computed faster


def head_names(weights):
    return {n for n in weights if n.startswith("model.layers.") and int(n.split(".")[2]) >= 4}


def converted(path, config, weights, *, bits=None, heads=True):
    """Write what mlx-lm writes: renamed and shifted trunk, and heads with their own names, shifted too."""
    model = tiny.plain_model(config, weights)
    if bits:
        model, config = quantize_model(model, dict(config), 32, bits)
    save_model(path, model)
    (path / "config.json").write_text(json.dumps(config))
    kept = {n: w + 1 if n.endswith("norm.weight") else w for n, w in weights.items() if n in head_names(weights)}
    if heads:
        mx.save_safetensors(str(path / "model-mtp.safetensors"), kept, {"format": "mlx"})
    return path


DAMAGE = {
    "a head tensor is missing": (
        lambda w: w.pop("model.layers.5.eh_proj.weight"),
        r"model\.safetensors: tensor model\.layers\.5\.eh_proj\.weight is missing; .*\(32, 64\)",
    ),
    "a trunk tensor is missing": (
        lambda w: w.pop("model.layers.2.moe.up_proj.weight"),
        r"model\.safetensors: tensor model\.layers\.2\.moe\.up_proj\.weight is missing; .*\(4, 24, 32\)",
    ),
    "a whole depth is missing": (
        lambda w: [w.pop(n) for n in list(w) if n.startswith("model.layers.5.")],
        "no tensors of MTP depth 1, but of depth 2",
    ),
    "a head tensor is misshapen": (
        lambda w: w.update({"model.layers.6.transformer.shared_head.output.weight": mx.ones((7, 32))}),
        r"tensor model\.layers\.6\.transformer\.shared_head\.output\.weight has shape \(7, 32\); .*\(5, 32\)",
    ),
    "a trunk tensor is misshapen": (
        lambda w: w.update({"model.layers.1.moe.gate.weight": mx.ones((3, 32))}),
        r"tensor model\.layers\.1\.moe\.gate\.weight has shape \(3, 32\); .*\(4, 32\)",
    ),
    "NaN in a head": (
        lambda w: w.update({"model.layers.4.self_attn.q_proj.weight": mx.full((96, 32), float("nan"))}),
        r"tensor model\.layers\.4\.self_attn\.q_proj\.weight holds NaN",
    ),
    "a head of zeros": (
        lambda w: w.update({"model.layers.4.transformer.shared_head.output.weight": mx.zeros((5, 32))}),
        r"tensor model\.layers\.4\.transformer\.shared_head\.output\.weight holds only zeros",
    ),
    "NaN in the target": (
        lambda w: w.update({"model.layers.1.self_attn.q_proj.weight": mx.full((96, 32), float("nan"))}),
        r"tensor model\.layers\.1\.self_attn\.q_proj\.weight holds NaN",
    ),
    "integers in the target": (
        lambda w: w.update({"model.layers.1.self_attn.q_proj.weight": mx.ones((96, 32), mx.int64)}),
        r"tensor model\.layers\.1\.self_attn\.q_proj\.weight has type I64; expected floating-point numbers$",
    ),
    "bytes without a scale in a head": (
        lambda w: w.update({"model.layers.4.self_attn.q_proj.weight": mx.ones((96, 32), mx.uint8)}),
        r"tensor model\.layers\.4\.self_attn\.q_proj\.weight has type U8; expected floating-point numbers$",
    ),
    "a scale that is packed": (
        lambda w: w.update(
            {"model.norm.weight": mx.ones(32, mx.uint8), "model.norm.weight_scale_inv": mx.ones(1, mx.uint8)}
        ),
        r"tensor model\.norm\.weight_scale_inv has type U8; expected floating-point numbers$",
    ),
    "scales of nothing": (
        lambda w: w.update({"model.layers.1.z.scales": mx.ones((96, 1))}),
        r"tensor model\.layers\.1\.z\.weight is missing; its scales are there$",
    ),
    "scales of what is not packed": (
        lambda w: w.update({"model.layers.1.self_attn.q_proj.scales": mx.ones((96, 1))}),
        r"tensor model\.layers\.1\.self_attn\.q_proj\.weight has type F32; expected U32, because it has scales$",
    ),
    "an unknown trunk tensor": (
        lambda w: w.update({"model.layers.0.surprise.weight": mx.ones(3)}),
        r"tensor model\.layers\.0\.surprise\.weight is not part of the model",
    ),
    "a layer that config.json denies": (
        lambda w: w.update({"model.layers.9.surprise.weight": mx.ones(3)}),
        r"tensor model\.layers\.9\.surprise\.weight is not part of the model; config\.json expects 4 layers",
    ),
}
