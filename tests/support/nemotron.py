"""Nemotron-3's tiny config and tensor names: a layer is a norm and one mixer of four kinds."""

from shapes import H, Shapes, V, gqa

CONFIG = {
    "model_type": "nemotron_h",
    "hidden_size": H,
    "vocab_size": V,
    "intermediate_size": 48,
    "hybrid_override_pattern": "MEM*-ME",
    "num_hidden_layers": 7,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 32,  # MLX's kernel for one row requires this divisor
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.001, float("inf")],
    "use_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# Super's experts read a projection of the row, Ultra lists its layers; heads have another number of experts.
LATENT = {
    **{name: value for name, value in CONFIG.items() if not name.endswith("hybrid_override_pattern")},
    "layers_block_type": ["attention", "mamba", "moe", "mlp", "mamba", "attention", "moe"],
    "mtp_layers_block_type": ["attention", "moe"],
    "mtp_n_routed_experts": 6,
    "moe_latent_size": 20,
}
KINDS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def pattern(config: dict) -> str:
    return config.get("hybrid_override_pattern") or "".join(KINDS[kind] for kind in config["layers_block_type"])


def ungated(prefix: str, inner: int, outer: int = H) -> Shapes:
    return {f"{prefix}.up_proj.weight": (inner, outer), f"{prefix}.down_proj.weight": (outer, inner)}


def mamba(prefix: str, config: dict) -> Shapes:
    heads, groups, N = (config[n] for n in ("mamba_num_heads", "n_groups", "ssm_state_size"))
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * groups * N
    return {
        f"{prefix}.in_proj.weight": (inner + channels + heads, H),
        f"{prefix}.conv1d.weight": (channels, 1, config["conv_kernel"]),
        f"{prefix}.conv1d.bias": (channels,),
        **{f"{prefix}.{name}": (heads,) for name in ("A_log", "D", "dt_bias")},
        f"{prefix}.norm.weight": (inner,),
        f"{prefix}.out_proj.weight": (H, inner),
    }


def experts(prefix: str, config: dict, E: int) -> Shapes:
    latent = config.get("moe_latent_size")
    shapes: Shapes = {f"{prefix}.gate.weight": (E, H), f"{prefix}.gate.e_score_correction_bias": (E,)}
    for e in range(E):
        shapes |= ungated(f"{prefix}.experts.{e}", config["moe_intermediate_size"], latent or H)
    if latent:
        shapes |= {f"{prefix}.fc1_latent_proj.weight": (latent, H), f"{prefix}.fc2_latent_proj.weight": (H, latent)}
    return shapes | ungated(f"{prefix}.shared_experts", config["moe_shared_expert_intermediate_size"])


def layer(prefix: str, kind: str, config: dict, E: int) -> Shapes:
    mixer = f"{prefix}.mixer"
    if kind == "M":
        shapes = mamba(mixer, config)
    elif kind == "*":
        heads = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        shapes = gqa(mixer, *heads, bias=False)
    else:
        shapes = ungated(mixer, config["intermediate_size"]) if kind == "-" else experts(mixer, config, E)
    return shapes | {f"{prefix}.norm.weight": (H,)}


def trunk(config: dict) -> Shapes:
    shapes: Shapes = {"backbone.embeddings.weight": (V, H), "backbone.norm_f.weight": (H,), "lm_head.weight": (V, H)}
    for i, kind in enumerate(pattern(config)):
        shapes |= layer(f"backbone.layers.{i}", kind, config, config["n_routed_experts"])
    return shapes


def heads(config: dict) -> Shapes:
    E = config.get("mtp_n_routed_experts") or config["n_routed_experts"]
    shapes = layer("mtp.layers.0", "*", config, E) | layer("mtp.layers.1", "E", config, E)
    shapes |= {f"mtp.layers.{n}.weight": (H,) for n in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    return shapes | {"mtp.layers.0.eh_proj.weight": (H, 2 * H)}
