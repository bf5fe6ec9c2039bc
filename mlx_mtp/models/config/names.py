"""List names in config.json: spellings of one value, keys that do not change logits, and keys that do.

The tables cover all families. The keys that one family reads are derived from its dataclass.
"""

import re
from typing import Any

# One value a line. A name that the family reads takes the value of a name that it does not read.
SPELLINGS = (
    ("hidden_size", "n_embd", "d_model", "model_dim"),
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"),
    ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_attention_groups", "num_query_groups", "n_head_kv"),
    ("head_dim", "attention_head_dim", "kv_channels", "head_size", "hidden_size_per_head"),
    ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    ("vocab_size", "num_vocab"),
    ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "model_max_length"),
    (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_eps",
        "norm_epsilon",
        "rms_norm_epsilon",
        "layer_norm_rms_epsilon",
    ),
    ("tie_word_embeddings", "tie_embedding", "tie_embeddings", "share_input_output_layers"),
    ("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"),
    ("attention_bias", "qkv_bias", "use_qkv_bias", "attn_bias", "add_qkv_bias"),
    ("use_qk_norm", "qk_norm", "qk_layernorm"),
    ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_top_k",
        "moe_topk",
        "top_k_experts",
        "num_selected_experts",
        "experts_per_token",
    ),
    ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    ("moe_intermediate_size", "expert_ffn_hidden_size"),
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize", "norm_expert_weight"),
    (
        "routed_scaling_factor",
        "moe_routed_scaling_factor",
        "moe_router_scaling_factor",
        "router_scaling_factor",
    ),
    ("scoring_func", "moe_router_activation_func", "moe_router_score_func"),
    ("first_k_dense_replace", "num_dense_layers"),
    ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
    ("torch_dtype", "dtype"),
)

COMMON = ("num_hidden_layers", "vocab_size", "max_position_embeddings")  # reports read these names
WINDOW, TIES = (
    next(group for group in SPELLINGS if name in group) for name in ("sliding_window", "tie_word_embeddings")
)

# Keys that do not change the logits of a single sequence: training, files, other modalities, the exporting program.
HARMLESS = """
_attn_implementation _attn_implementation_internal _commit_hash _name_or_path architectures attention_chunk_size
attention_softmax_in_fp32 attn_implementation auto_map boi_token_index bos_token_id chunk_size_feed_forward
compression_config conv_dim conv_dim_out cross_attention_hidden_size custom_pipelines dtype early_exit
eos_token_id ep_size finetuning_task gradient_checkpointing head_dim id2label initial_context_length
input_jitter_noise intermediate_size is_decoder is_encoder_decoder is_llama_config keys_to_ignore_at_inference
label2id language_model_only mamba_ssm_cache_dtype mamba_ssm_dtype max_length max_position_embeddings
max_window_layers max_window_size mlx_version model_type moe_shared_expert_overlap mtp_layers_block_type
name_or_path num_labels num_logits_to_keep num_nextn_predict_layers output_attentions output_hidden_states
output_router_logits pretraining_tp problem_type pruned_heads qk_head_dim quantization quantization_config
quantize_activations reorder_and_upcast_attn rescale_prenorm_residual residual_in_fp32 return_dict
router_jitter_noise scale_attention_softmax_in_fp32 sep_token_id seq_aux task_specific_params tokenizer_class
torch_dtype torchscript transformers_version unsloth_fixed unsloth_version use_associative_scan use_bfloat16
use_cache use_flash_attn use_mamba_kernels use_mambapy use_pos_enc
"""
HARMLESS_PATTERN = re.compile(
    r".*_token_(ids?|index)|.*(dropout|_pdrop|dropout_prob|layerdrop)|.*initializer.*|.*_init(_scheme)?|.*loss.*"
    r"|(vision|audio|video|image|speech|projector|mm|multimodal|summary|classifier|mtp|num_mtp|eagle)_.*"
    r"|.*(init_floor|variance_scale)|_.*|time_step_(min|max|floor|scale|rank)|use_(flash|sdpa|kernel).*"
    r"|.*(_dtype|fp32.*)|.*_mtp_.*|transformers\..*|block_(mlp|out|norm|use)_.*"
)

# Keys that change logits, with their neutral values. An unread key with any other value is refused.
NULLABLE = ("q_lora_rank",)  # keys whose null is no default: queries without a low-rank projection
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "activation_function": ("silu", "swish"),
    "mlp_hidden_act": (),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_qkv_bias": (False,),
    "attn_bias": (False,),
    "add_qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "lm_head_bias": (False,),
    "tie_word_embeddings": (False,),
    "tie_embedding": (False,),
    "tie_embeddings": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "moe_router_logit_softcapping": (0,),
    "clip_qkv": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "attention_value_scale": (1,),
    "swiglu_limit": (),
    "alibi": (False,),
    "use_alibi": (False,),
    "position_embedding_type": ("rope",),
    "rope_interleave": (),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "rope_traditional": (),
    "attn_temperature_tuning": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "use_sliding_window": (False,),
    "layer_types": (),
    "mlp_layer_types": (),
    "num_experts": (0,),
    "n_routed_experts": (0,),
    "num_local_experts": (0,),
    "num_experts_per_tok": (),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "norm_topk_prob": (),
    "routed_scaling_factor": (1,),
    "scoring_func": ("sigmoid", "softmax"),  # each family implements one of the two
    "topk_method": (),
    "n_group": (1,),
    "topk_group": (1,),
    "first_k_dense_replace": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "num_kv_shared_layers": (0,),
    "attention_k_eq_v": (False,),
    "enable_moe_block": (False,),
    "moe_latent_size": (),
}
# Keys that a port's loader decides from the tensors in the checkpoint.
BY_TENSORS = """
add_qkv_bias attention_bias attn_bias lm_head_bias mlp_bias qk_layernorm qk_norm qkv_bias tie_embedding
tie_embeddings tie_word_embeddings use_bias use_qk_norm use_qkv_bias
"""
GELU = "gelu"  # its forms differ by about 1e-3: a warning, not a refusal
