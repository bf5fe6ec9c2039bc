"""The demo's config.json: a small Step-3.5 with every feature of the large one."""

LAYERS, DEPTHS, PERIOD = 10, 3, 4


def demo_config(vocab_size: int = 2048) -> dict:
    """config.json as a dict; per-layer lists also cover the MTP depths, as in the released checkpoints."""
    total = LAYERS + DEPTHS
    full = [i % PERIOD == 0 and i < LAYERS for i in range(total)]
    last_moe = LAYERS - 1
    return {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": DEPTHS,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 32,
        },
        "head_dim": 32,
        "use_head_wise_attn_gate": True,
        "layer_types": ["full_attention" if f else "sliding_attention" for f in full],
        "sliding_window": 64,
        "rope_theta": [100000.0 if f else 10000.0 for f in full],
        "partial_rotary_factors": [0.5 if f else 1.0 for f in full],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 1024,
        },
        "yarn_only_types": ["full_attention"],
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "moe_layers_enum": f"{last_moe - PERIOD},{last_moe}",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 128,
        "share_expert_dim": 128,
        "moe_router_scaling_factor": 2.0,
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "norm_expert_weight": True,
        "swiglu_limits": [7.0 if i == last_moe else 0.0 for i in range(total)],
        "swiglu_limits_shared": [16.0 if i == last_moe else 0.0 for i in range(total)],
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
    }
