"""Tiny configs of families without a port, which only mlx-lm supports."""

SIZES = {
    "hidden_size": 32,
    "vocab_size": 13,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
MAMBA2 = {
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 1e9],
    "time_step_rank": "auto",
}
CONFIGS = {
    "starcoder2": {**SIZES, "model_type": "starcoder2", "norm_epsilon": 1e-5},
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mamba2": {**SIZES, **MAMBA2, "model_type": "mamba2"},
}

ADAPTER = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 40.0, "dropout": 0.0}}
