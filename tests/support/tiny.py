"""Write tiny random Step-3.5 checkpoints, and decode them with a simple reference."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models import step3p5 as reference

CONFIG = {
    "model_type": "step3p5",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 5,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 1e4, 1e4, 1e4],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131072,
    },
    "yarn_only_types": ["full_attention"],
    "sliding_window": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 6],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "use_head_wise_attn_gate": True,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 24,
    "moe_layers_enum": "1,2,3",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "swiglu_limits": [0, 0, 0, 7],
    "swiglu_limits_shared": [0, 0, 0, 16],
    "num_nextn_predict_layers": 3,
}

# One layer of experts fewer: every kind of layer remains, and a token takes a quarter less time.
SHORTER = {
    "num_hidden_layers": 3,
    "moe_layers_enum": "1,2",
    "swiglu_limits": [0, 0, 7],
    "swiglu_limits_shared": [0, 0, 16],
}

# The first layer, and one with a window and experts.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "moe_layers_enum": "1",
    "swiglu_limits": [0, 7],
    "swiglu_limits_shared": [0, 16],
}


def random_weights(config: dict, *, heads: int = 3, seed: int = 0, scale: float = 0.25) -> dict[str, mx.array]:
    """Return random tensors with the hub's names and zero-centred norms."""
    rng = np.random.default_rng(seed)
    H, V, D = config["hidden_size"], config["vocab_size"], config["head_dim"]
    weights: dict[str, mx.array] = {}

    def add(name, *shape, norm=False):
        weights[name] = mx.array((rng.standard_normal(shape) * (0.1 if norm else scale)).astype(np.float32))

    add("model.embed_tokens.weight", V, H)
    add("model.norm.weight", H, norm=True)
    add("lm_head.weight", V, H)
    moe = {int(i) for i in config["moe_layers_enum"].split(",") if i}
    for i in range(config["num_hidden_layers"] + heads):
        p = f"model.layers.{i}."
        types = config["layer_types"]
        sliding = i >= len(types) or types[i] == "sliding_attention"
        nq, nkv = config["num_attention_heads"], config["num_attention_groups"]
        if sliding and (other := config["attention_other_setting"]):
            nq, nkv = other["num_attention_heads"], other["num_attention_groups"]
        for name, rows in (("q", nq * D), ("k", nkv * D), ("v", nkv * D), ("g", nq)):
            add(f"{p}self_attn.{name}_proj.weight", rows, H)
        add(f"{p}self_attn.o_proj.weight", H, nq * D)
        add(f"{p}self_attn.q_norm.weight", D, norm=True)
        add(f"{p}self_attn.k_norm.weight", D, norm=True)
        add(f"{p}input_layernorm.weight", H, norm=True)
        add(f"{p}post_attention_layernorm.weight", H, norm=True)
        if i in moe:
            E, M, S = config["moe_num_experts"], config["moe_intermediate_size"], config["share_expert_dim"]
            add(f"{p}moe.gate.weight", E, H)
            add(f"{p}moe.router_bias", E)
            add(f"{p}moe.gate_proj.weight", E, M, H)
            add(f"{p}moe.up_proj.weight", E, M, H)
            add(f"{p}moe.down_proj.weight", E, H, M)
            mlp, inner = "share_expert", S
        else:
            mlp, inner = "mlp", config["intermediate_size"]
        add(f"{p}{mlp}.gate_proj.weight", inner, H)
        add(f"{p}{mlp}.up_proj.weight", inner, H)
        add(f"{p}{mlp}.down_proj.weight", H, inner)
        if i >= config["num_hidden_layers"]:
            add(f"{p}enorm.weight", H, norm=True)
            add(f"{p}hnorm.weight", H, norm=True)
            add(f"{p}eh_proj.weight", H, 2 * H)
            add(f"{p}transformer.shared_head.norm.weight", H, norm=True)
            add(f"{p}transformer.shared_head.output.weight", V, H)
    return weights


def save(path: Path, config: dict, weights: dict[str, mx.array], *, file: str = "model.safetensors") -> Path:
    """Write a checkpoint directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / file), weights)
    return path


def plain_model(config: dict, weights: dict[str, mx.array]) -> reference.Model:
    """Return mlx-lm's own model of the trunk: the target, without any of our code."""
    model = reference.Model(reference.ModelArgs.from_dict(config))
    parameters = model.sanitize(dict(weights))
    if not any(".moe." in name for name in weights):  # mlx-lm detects raw checkpoints by their experts only
        parameters = {n: w + 1 if n.endswith("norm.weight") else w for n, w in parameters.items()}
    model.load_weights(list(parameters.items()))
    return model


def greedy(model: reference.Model, prompt: list[int], n: int, expected: Sequence[int] = ()) -> list[int]:
    """Return n greedy tokens by a cacheless forward over the whole sequence, recomputed for each token.

    expected: the tokens if they are known; one forward confirms that each is greedy after all those before it.
    """
    tokens = list(prompt)
    if len(expected) == n > 0:
        logits = model(mx.array([*tokens, *expected[:-1]])[None])[0, len(tokens) - 1 :]
        if (confirmed := mx.argmax(logits, axis=-1).tolist()) == list(expected):
            return confirmed
    for _ in range(n):
        tokens.append(int(mx.argmax(model(mx.array(tokens)[None])[0, -1])))
    return tokens[len(prompt) :]
