"""Tiny configs and tensor names of Qwen3.5 and Qwen3-Next."""

from shapes import H, Shapes, V, ends, gqa, layer_norms, mlp

QWEN_TEXT = {
    "hidden_size": H,
    "vocab_size": V,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}
QWEN = {"model_type": "qwen3_5", "text_config": {**QWEN_TEXT, "model_type": "qwen3_5_text"}}
QWEN_MOE = {
    "model_type": "qwen3_5_moe",
    "text_config": {**QWEN_TEXT, **QWEN_EXPERTS, "model_type": "qwen3_5_moe_text"},
}


def qwen_ffn(prefix: str, config: dict) -> Shapes:
    E, inner = config.get("num_experts", 0), config.get("moe_intermediate_size", 0)
    if not E:
        return mlp(prefix, config["intermediate_size"])
    shapes: Shapes = {f"{prefix}.gate.weight": (E, H), f"{prefix}.shared_expert_gate.weight": (1, H)}
    shapes |= {f"{prefix}.experts.gate_up_proj": (E, 2 * inner, H), f"{prefix}.experts.down_proj": (E, H, inner)}
    return shapes | mlp(f"{prefix}.shared_expert", config["shared_expert_intermediate_size"])


def qwen_attention(prefix: str, config: dict) -> Shapes:
    heads, D = config["num_attention_heads"], config["head_dim"]
    shapes = gqa(prefix, heads, config["num_key_value_heads"], D, bias=False, qk_norm=True)
    return shapes | {f"{prefix}.q_proj.weight": (2 * heads * D, H)}  # queries and gates


def qwen_recurrent(prefix: str, config: dict) -> Shapes:
    heads, D = config["linear_num_value_heads"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + heads * D
    return {
        f"{prefix}.in_proj_qkv.weight": (channels, H),
        f"{prefix}.in_proj_z.weight": (heads * D, H),
        f"{prefix}.in_proj_b.weight": (heads, H),
        f"{prefix}.in_proj_a.weight": (heads, H),
        f"{prefix}.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (D,),
        f"{prefix}.out_proj.weight": (H, heads * D),
    }


def qwen_trunk(config: dict) -> Shapes:
    text = config["text_config"]
    shapes: Shapes = {}
    for i in range(text["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{i}"
        full = (i + 1) % text["full_attention_interval"] == 0
        mixer = qwen_attention(f"{prefix}.self_attn", text) if full else qwen_recurrent(f"{prefix}.linear_attn", text)
        shapes |= mixer | qwen_ffn(f"{prefix}.mlp", text) | layer_norms(prefix)
    return shapes | {name.replace("model.", "model.language_model."): shape for name, shape in ends().items()}


def qwen_heads(config: dict) -> Shapes:
    prefix, text = "mtp.layers.0", config["text_config"]
    shapes = qwen_attention(f"{prefix}.self_attn", text) | qwen_ffn(f"{prefix}.mlp", text) | layer_norms(prefix)
    shapes |= {f"mtp.{n}.weight": (H,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return shapes | {"mtp.fc.weight": (H, 2 * H)}


def next_ffn(prefix: str, config: dict) -> Shapes:
    shapes: Shapes = {f"{prefix}.gate.weight": (4, H), f"{prefix}.shared_expert_gate.weight": (1, H)}
    for e in range(4):
        shapes |= mlp(f"{prefix}.experts.{e}", config["moe_intermediate_size"])
    return shapes | mlp(f"{prefix}.shared_expert", config["shared_expert_intermediate_size"])


def next_trunk(config: dict) -> Shapes:
    shapes = ends()
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        mixer = qwen_attention(f"{prefix}.self_attn", config)
        if (i + 1) % config["full_attention_interval"]:
            mixer = qwen_recurrent(f"{prefix}.linear_attn", config)
            rows = {n: mixer.pop(f"{prefix}.linear_attn.in_proj_{n}.weight")[0] for n in ("qkv", "z", "b", "a")}
            mixer[f"{prefix}.linear_attn.in_proj_qkvz.weight"] = (rows["qkv"] + rows["z"], H)
            mixer[f"{prefix}.linear_attn.in_proj_ba.weight"] = (rows["b"] + rows["a"], H)
        shapes |= mixer | next_ffn(f"{prefix}.mlp", config) | layer_norms(prefix)
    return shapes


def next_heads(config: dict) -> Shapes:
    prefix = "mtp.layers.0"
    shapes = qwen_attention(f"{prefix}.self_attn", config) | next_ffn(f"{prefix}.mlp", config) | layer_norms(prefix)
    shapes |= {f"mtp.{n}.weight": (H,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return shapes | {"mtp.fc.weight": (H, 2 * H)}


NEXT = {
    **QWEN_TEXT,
    **QWEN_EXPERTS,
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
}
