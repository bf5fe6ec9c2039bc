"""Build models with the released numbers and kinds of layers and heads, but tiny widths."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models import deepseek_v3, glm4_moe

from mlx_mtp.models import deepseek_v3 as deepseek_port
from mlx_mtp.models import glm4_moe as glm_port
from mlx_mtp.models import qwen3_5 as qwen_port
from mlx_mtp.models import qwen3_5_moe as qwen_moe_port
from mlx_mtp.models import step3p5 as step_port

WIDTH = 256  # a smaller width has too few scales in a one-row gate for a kernel to read them without a copy
SIZES = {"hidden_size": WIDTH, "vocab_size": 64, "intermediate_size": 128, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 4, "head_dim": 32}
EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
}


def step() -> Any:
    kinds = ["full_attention", *["sliding_attention"] * 3] * 12
    config = {
        **{**SIZES, **HEADS, "model_type": "step3p5", "num_hidden_layers": 45, "num_attention_groups": 2},
        **{"moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 64, "share_expert_dim": 64},
        **{"moe_layers_enum": ",".join(map(str, range(3, 45))), "layer_types": kinds, "sliding_window": 16},
        **{"swiglu_limits": [0] * 43 + [7, 7], "use_head_wise_attn_gate": True},
    }
    return step_port.Model(step_port.ModelArgs.from_dict(config), heads=3)


def glm() -> Any:
    config = {
        **{**SIZES, **HEADS, **EXPERTS, "model_type": "glm4_moe", "num_hidden_layers": 92, "num_key_value_heads": 2},
        **{"n_group": 1, "topk_group": 1, "max_position_embeddings": 512, "rope_theta": 1e6, "rope_scaling": None},
        **{"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
    }
    return glm_port.Model(glm4_moe.ModelArgs.from_dict(config), heads=1)


def _qwen(layers: int, **more: Any) -> dict:
    return {
        **{**SIZES, **HEADS, "num_hidden_layers": layers, "num_key_value_heads": 2, "full_attention_interval": 4},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32},
        **{"linear_value_head_dim": 32, "tie_word_embeddings": False, **more},
    }


def qwen() -> Any:
    config = {"model_type": "qwen3_5", "text_config": _qwen(64, model_type="qwen3_5_text")}
    return qwen_port.Model(qwen_port.ModelArgs.from_dict(config), heads=1)


def qwen_moe() -> Any:
    experts = {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"shared_expert_intermediate_size": 64, "norm_topk_prob": True, "model_type": "qwen3_5_moe_text"},
    }
    config = {"model_type": "qwen3_5_moe", "text_config": _qwen(40, **experts)}
    return qwen_moe_port.Model(qwen_moe_port.ModelArgs.from_dict(config), heads=1)


def deepseek() -> Any:
    config = {
        **{**SIZES, **EXPERTS, "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 4},
        **{"n_group": 4, "topk_group": 2, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
        **{"qk_nope_head_dim": 32, "v_head_dim": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        **{"num_key_value_heads": 4, "moe_layer_freq": 1, "rope_theta": 1e4, "rope_scaling": None},
        **{"attention_bias": False, "max_position_embeddings": 512},
    }
    return deepseek_port.Model(deepseek_v3.ModelArgs.from_dict(config), heads=1)


# Each model's kinds of layers, with the index of a layer of that kind that follows another layer.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "Step-3.5-Flash": (step, {"dense, sliding": 1, "experts, sliding": 5, "experts, full": 4}),
    "GLM-4.5": (glm, {"dense": 1, "experts": 4}),
    "Qwen3.6-27B": (qwen, {"gated delta": 1, "attention": 3}),
    "Qwen3.6-35B-A3B": (qwen_moe, {"gated delta, experts": 1, "attention, experts": 3}),
    "DeepSeek-V3": (deepseek, {"dense": 1, "experts": 4}),
}

# The cost model's name of a kind of layer; it has no others.
KINDS = {
    ("Step-3.5-Flash", "dense, sliding"): "step dense",
    ("Step-3.5-Flash", "experts, sliding"): "step experts",
    ("GLM-4.5", "dense"): "glm dense",
    ("GLM-4.5", "experts"): "glm experts",
    ("Qwen3.6-27B", "gated delta"): "qwen delta",
    ("Qwen3.6-27B", "attention"): "qwen attention",
    ("Qwen3.6-35B-A3B", "gated delta, experts"): "qwen delta experts",
    ("Qwen3.6-35B-A3B", "attention, experts"): "qwen attention experts",
    ("DeepSeek-V3", "dense"): "deepseek dense",
    ("DeepSeek-V3", "experts"): "deepseek experts",
}
