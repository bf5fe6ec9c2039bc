"""Make a GGUF file's metadata from a config.json, as llama.cpp's converters do."""

from typing import Any

from gguf_files import text_of
from nemotron import pattern


def basics(config: dict, heads: int = 0) -> dict[str, Any]:
    """Return the metadata that every family has."""
    text = text_of(config)
    found: dict[str, Any] = {
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "block_count": text["num_hidden_layers"] + heads,
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text.get("num_key_value_heads", text["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": float(text.get("rms_norm_eps") or text.get("layernorm_epsilon") or 1e-5),
    }
    rope = text.get("rope_parameters") or text
    rope = rope.get("full_attention", rope)
    if isinstance(rope.get("rope_theta"), float):
        found["rope.freq_base"] = rope["rope_theta"]
    if head_dim := text.get("head_dim"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    scaling = rope if "factor" in rope else text.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("yarn", "linear"):
        names = {"type": "rope_type", "original_context_length": "original_max_position_embeddings"}
        names |= {"factor": "factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        found |= {f"rope.scaling.{key}": scaling[name] for key, name in names.items() if name in scaling}
    return found | ({"nextn_predict_layers": heads} if heads else {})


def experts(config: dict) -> dict[str, Any]:
    text = text_of(config)
    names = {
        "expert_count": ("n_routed_experts", "num_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_top_k"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("n_shared_experts",),
        "expert_shared_feed_forward_length": (
            *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"),
        ),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "expert_weights_scale": ("routed_scaling_factor", "moe_router_scaling_factor"),
        "expert_weights_norm": ("norm_topk_prob", "norm_expert_weight"),
        "leading_dense_block_count": ("first_k_dense_replace",),
    }
    found = {key: next((text[n] for n in own if text.get(n) is not None), None) for key, own in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def without_norm(config: dict) -> dict[str, Any]:
    """Return experts' metadata of converters that do not state whether an expert's weights are normalised."""
    found = experts(config)
    del found["expert_weights_norm"]
    return found


def sigmoid(config: dict) -> dict[str, Any]:
    return experts(config) | {"expert_gating_func": 2}


def linear(config: dict) -> dict[str, Any]:
    text = text_of(config)
    rope = text.get("rope_parameters") or text
    found = {
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_value_head_dim"] * text["linear_num_value_heads"],
        "full_attention_interval": text["full_attention_interval"],
        "rope.dimension_count": int(text["head_dim"] * rope["partial_rotary_factor"]),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in text["layer_types"]],
    }
    return found if config["model_type"] == "qwen3_next" else found | {"rope.dimension_sections": [11, 11, 10, 0]}


def mla(config: dict) -> dict[str, Any]:
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    found = sigmoid(config)
    if not config["norm_topk_prob"]:
        del found["expert_weights_norm"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if scaling.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    if config["q_lora_rank"]:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    return found | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["kv_lora_rank"] + rope,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
    }


def dsa(config: dict) -> dict[str, Any]:
    names = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk"}
    found = mla(config) | {f"attention.indexer.{key}": config[name] for key, name in names.items()}
    if kinds := config.get("indexer_types"):
        found["attention.indexer.types"] = [kind == "full" for kind in kinds]
    return found


def glm(config: dict) -> dict[str, Any]:
    return sigmoid(config) | {"rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"])}


def mimo(config: dict) -> dict[str, Any]:
    hybrid = [*config["hybrid_layer_pattern"], 1, 1, 1]
    kv = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    return without_norm(config) | {
        "expert_gating_func": 2,
        "attention.head_count_kv": [kv[kind] for kind in hybrid],
        "attention.sliding_window": config["sliding_window_size"],
        "attention.sliding_window_pattern": hybrid,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": config["swa_rope_theta"],
    }


def step(config: dict) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    other, total = config["attention_other_setting"], len(config["layer_types"])
    heads = config["num_attention_heads"], other["num_attention_heads"]
    groups = config["num_attention_groups"], other["num_attention_groups"]
    limits = {"exp": config["swiglu_limits"], "shexp": config["swiglu_limits_shared"]}
    return experts(config) | {
        "attention.head_count": [heads[s] for s in sliding],
        "attention.head_count_kv": [groups[s] for s in sliding],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": sliding,
        "rope.freq_base": float(config["rope_theta"][0]),
        "rope.freq_base_swa": float(config["rope_theta"][1]),
        "leading_dense_block_count": int(config["moe_layers_enum"].partition(",")[0]),
        "moe_every_n_layers": 1,
        **{
            f"swiglu_clamp_{n}": [float(v) for v in list_] + [0.0] * (total - len(list_))
            for n, list_ in limits.items()
        },
    }


def nemotron(config: dict) -> dict[str, Any]:
    kinds = pattern(config)
    found = experts(config) | {
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "*") for kind in kinds],
        "feed_forward_length": [config["moe_intermediate_size"] * (kind == "E") for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }
    return found | ({"moe_latent_size": config["moe_latent_size"]} if "moe_latent_size" in config else {})


MORE = {
    "llama": lambda config: {"rope.dimension_count": config.get("head_dim") or 8},
    "qwen2": lambda config: {},
    "qwen3": lambda config: {},
    "qwen3moe": without_norm,
    "gemma3": lambda config: {"attention.sliding_window": config["sliding_window"]},
    "qwen35": linear,
    "qwen35moe": lambda config: {**without_norm(config), **linear(config)},
    "qwen3next": lambda config: {**without_norm(config), **linear(config)},
    "glm4moe": glm,
    "deepseek2": mla,
    "glm-dsa": dsa,
    "mimo2": mimo,
    "step35": step,
    "nemotron_h_moe": nemotron,
}


def metadata(arch: str, config: dict, heads: int) -> dict[str, Any]:
    """Return a file's metadata; heads: their number, by which values per block are longer."""
    found = {**basics(config, heads), **MORE[arch](config)}
    last = {"attention.recurrent_layers": False, "attention.head_count_kv": None, "feed_forward_length": None}
    for key, value in last.items():
        own = found.get(key)
        if isinstance(own, list):
            found[key] = own + [max(own) if value is None else value] * (found["block_count"] - len(own))
    return found
