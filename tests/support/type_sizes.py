"""Small values of the fields of mlx-lm's configurations, and what single model types need instead."""

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB, WINDOW, EXPERTS = 128, 96, 4, 2, 32, 128, 8, 4
LAYERS = 2  # one dense, one with experts; one with a window, one without; one recurrent, one not
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _every(names: str, value) -> dict:
    return dict.fromkeys(names.split(), value)


# Fields by name; a field that is not listed keeps mlx-lm's default, and must have one.
SMALL = {
    **_every("hidden_size n_embd d_model model_dim hidden_dim dim_model_base block_dim", HIDDEN),
    **_every("intermediate_size n_inner ff_intermediate_size ffn_hidden_size intermediate_size_mlp", INNER),
    **_every("block_ff_dim dense_intermediate_size", INNER),
    **_every("moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size", 32),
    **_every("shared_expert_intermediate_size share_expert_dim shared_intermediate_size", 32),
    **_every("vocab_size num_vocab vocab_size_per_layer_input", VOCAB),
    **_every("num_hidden_layers num_layers n_layer n_layers num_transformer_layers", LAYERS),
    **_every("num_attention_heads num_heads n_head n_heads swa_num_attention_heads", HEADS),
    **_every("num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads num_attention_groups", KV_HEADS),
    **_every("head_dim global_head_dim kv_channels hidden_size_per_head swa_head_dim", HEAD),
    **_every("v_head_dim swa_v_head_dim", HEAD),
    **_every("qk_rope_head_dim index_head_dim", 2 * HEAD),
    **_every("qk_nope_head_dim", HEAD),
    **_every("kv_lora_rank o_lora_rank", HEAD),
    **_every("q_lora_rank", 24),
    **_every("index_topk", 8),
    **_every("index_n_heads", 4),
    **_every("rotary_dim", 8),
    **_every("max_position_embeddings n_positions n_ctx model_max_length block_size", 512),
    **_every("original_max_position_embeddings", 256),
    **_every("sliding_window sliding_window_size window_size attention_window_size loop_window_size", WINDOW),
    **_every("sliding_window_pattern full_attention_interval layer_group_size", 2),
    **_every("num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num", EXPERTS),
    **_every("num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts", 2),
    **_every("num_shared_experts num_shared_expert n_shared_experts moe_num_shared_experts", 1),
    **_every("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
    **_every("moe_layer_freq decoder_sparse_step n_group topk_group group_norm_size num_expert_group", 1),
    **_every("routed_scaling_factor", 1.5),
    **_every("rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps post_norm_eps", 1e-5),
    **_every("mixer_rms_eps hc_eps norm_epsilon", 1e-5),
    **_every("rope_theta swa_rope_theta rotary_emb_base rope_local_base_freq rope_freq_constant", 10000.0),
    **_every("partial_rotary_factor rotary_pct", 0.5),
    **_every("moe_capacity", []),
    **_every("norm_topk_prob use_qk_norm qk_norm mla_scale_q_lora mla_scale_kv_lora use_conv_bias conv_bias", True),
    **_every("attention_bias mlp_bias use_bias use_qkv_bias mamba_proj_bias mamba_conv_bias", False),
    **_every("tie_word_embeddings post_norm use_cla use_mixed_mlp_moe altup_correct_scale", False),
    **_every("scoring_func score_function", "sigmoid"),
    **_every("topk_method", "noaux_tc"),
    **_every(
        "logits_scaling attention_multiplier embedding_multiplier residual_multiplier scale_emb scale_depth", 1.0
    ),
    **_every("logit_scale final_logit_softcapping attn_logit_softcapping logits_soft_cap", 20.0),
    **_every("query_pre_attn_scalar", HEAD),
    # Recurrent layers: their heads, states and convolutions.
    **_every("mamba_n_heads mamba_num_heads linear_num_value_heads", 4),
    **_every("mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim", HEAD),
    **_every("mamba_d_state state_size ssm_state_size", 8),
    **_every("mamba_d_conv conv_kernel conv_L_cache conv_window linear_conv_kernel_dim conv1d_width", 3),
    **_every("short_conv_kernel_size", 3),
    **_every("mamba_expand linear_num_key_heads", 2),
    **_every("n_groups mamba_n_groups", 1),
    **_every("a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim time_step_rank", 8),
    **_every("linear_allow_neg_eigval", True),
    "mlp_only_layers": [0],
    "layer_types": [SLIDING, FULL],
    "mamba_chunk_size": 16,
    "rope_scaling": None,
}

YARN = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
KIMI = {
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": HEAD,
        "short_conv_kernel_size": 3,
    }
}
BY_LAYER = {"rope_parameters": {SLIDING: ROPE, FULL: ROPE}}
# Two more layers, which share the keys of the two before.
SHARING = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
}
CONVOLUTIONS = {"layer_types": ["conv", FULL]}

# What a type needs besides or instead of the table above.
EXCEPTIONS = {
    "afm7": {"num_layers": 3, "num_kv_reuse_layers": 1},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [0]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy", "n_group": 2},
    "deepseek_v41": {
        "qk_rope_head_dim": 16,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 2, 2, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "o_groups": 2,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "falcon_h1": {"mamba_d_ssm": HIDDEN},
    "gear": {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, "conv_mixer"]},
    "gemma3n": {
        **SHARING,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4": {"enable_moe_block": False},
    "gemma4_text": {
        **SHARING,
        "enable_moe_block": True,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {SLIDING: ROPE, FULL: {**ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.5}},
    },
    "glm_moe_dsa": {"rope_parameters": ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan": {
        "cla_share_factor": 2,
        "use_cla": True,
        "rope_scaling": {"type": "dynamic", "alpha": 4.0, "factor": 1.0},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {
        **KIMI,
        "attn_res_block_size": 2,
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
    },
    "kimi_linear": KIMI,
    "laguna": {"mlp_layer_types": ["dense", "sparse"]},
    "lfm2": {
        **CONVOLUTIONS,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {**CONVOLUTIONS, "use_expert_bias": True},
    # Every fourth layer attends to all chunks.
    "llama4": {
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
    },
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 8},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"},
    "mamba2": {"time_step_limit": [0.0, 100.0]},
    "mellum": BY_LAYER,
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * HEAD,
            "long_factor": [2.0] * HEAD,
        }
    },
    "minimax_m3_vl": {
        "mlp_layer_types": ["dense", "sparse"],
        "moe_layer_freq": None,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": YARN},
    "mistral3": {"layer_types": [FULL] * 2},
    "mistral4": {"rope_parameters": YARN},
    "muse_spark": {
        "num_shared_experts": 0,
        "output_multiplier": 0.2,
        "layer_rope_theta": [1e4, 0],
        "moe_hidden_size": 32,
        "rope_parameters": ROPE,
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-E",
        "moe_shared_expert_intermediate_size": 32,
    },
    "nemotron-nas": {
        "num_hidden_layers": 4,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", FULL]},
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * 2,
        "num_kv_heads": [2] * 2,
        "ffn_multipliers": [1.0, 1.5],
    },
    # The model excludes tokens up to this size of the vocabulary.
    "phi3small": {
        "vocab_size": 100352,
        "hidden_size": 16,
        "ff_intermediate_size": 32,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
    },
    "plamo": {"n_shared_head": 2},
    # Groups of its packed weights have 128 inputs.
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 0},
            {"path": "model.layers.1.self_attn.q_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
    },
    "qwen3_5": {"num_experts": 0, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "qwen3_5_moe": {"num_experts": EXPERTS},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "smollm3": {"layer_types": [FULL] * 2, "no_rope_layer_interval": 2},
    "spark2_5": BY_LAYER,
    "step3p5": {"moe_layers_enum": "1"},
}

# Wrappers whose text_config is the configuration of another type.
INSIDE = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl_moe": "qwen3_moe",
    "prism_hadamard_qwen35": "qwen3_5",
}
