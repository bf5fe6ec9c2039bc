"""List names in config.json: spellings of one value, keys that do not change logits, and keys that do.

The tables cover all families. The keys that one family reads are derived from its dataclass.
"""

import re
from typing import Any

# One value a line. A name that the family reads takes the value of a name that it does not read.
GROUPS = (
    "hidden_size n_embd d_model model_dim",
    "num_hidden_layers num_layers n_layers n_layer num_transformer_layers",
    "num_attention_heads n_head n_heads num_heads num_query_heads",
    "num_key_value_heads n_kv_heads num_kv_heads num_attention_groups num_query_groups n_head_kv",
    "head_dim attention_head_dim kv_channels head_size hidden_size_per_head",
    "intermediate_size ffn_hidden_size n_inner ffn_dim",
    "vocab_size num_vocab",
    "max_position_embeddings n_positions max_seq_len max_sequence_length model_max_length",
    "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon "
    "rms_norm_epsilon layer_norm_rms_epsilon",
    "tie_word_embeddings tie_embedding tie_embeddings share_input_output_layers",
    "sliding_window sliding_window_size window_size attention_window_size",
    "hidden_act hidden_activation activation_function mlp_hidden_act",
    "attention_bias qkv_bias use_qkv_bias attn_bias add_qkv_bias",
    "use_qk_norm qk_norm qk_layernorm",
    "num_experts n_routed_experts num_local_experts moe_num_experts",
    "num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk top_k_experts "
    "num_selected_experts experts_per_token",
    "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts",
    "moe_intermediate_size expert_ffn_hidden_size",
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size share_expert_dim",
    "n_group num_expert_group",
    "norm_topk_prob moe_renormalize norm_expert_weight",
    "routed_scaling_factor moe_routed_scaling_factor moe_router_scaling_factor router_scaling_factor",
    "scoring_func moe_router_activation_func moe_router_score_func",
    "first_k_dense_replace num_dense_layers",
    "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers",
    "torch_dtype dtype",
)
SPELLINGS = tuple(tuple(group.split()) for group in GROUPS)
COMMON = ("num_hidden_layers", "vocab_size", "max_position_embeddings")  # reports read these names
WINDOW, TIES = (group for name in ("sliding_window", "tie_word_embeddings") for group in SPELLINGS if name in group)

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

# Keys that a port's loader decides from the tensors in the checkpoint.
BY_TENSORS = """
add_qkv_bias attention_bias attn_bias lm_head_bias mlp_bias qk_layernorm qk_norm qkv_bias tie_embedding
tie_embeddings tie_word_embeddings use_bias use_qk_norm use_qkv_bias
"""
# Keys that change logits, with their neutral values. An unread key with any other value is refused.
NULLABLE = ("q_lora_rank",)  # keys whose null is no default: queries without a low-rank projection
ALL_CHANGE = """
mlp_hidden_act clip_qkv query_pre_attn_scalar attention_multiplier swiglu_limit rope_interleave rope_traditional
no_rope_layer_interval layer_types mlp_layer_types num_experts_per_tok norm_topk_prob topk_method
moe_latent_size
"""
ZERO_IS_NEUTRAL = """
attn_logit_softcapping final_logit_softcapping router_logit_softcapping moe_router_logit_softcapping num_experts
n_routed_experts num_local_experts n_shared_experts num_shared_experts first_k_dense_replace
num_kv_shared_layers
"""
ONE_IS_NEUTRAL = """
embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb attention_value_scale
routed_scaling_factor n_group topk_group decoder_sparse_step
"""
FALSE_IS_NEUTRAL = """
alibi use_alibi rope_interleaved use_mrope attn_temperature_tuning use_bidirectional_attention
use_sliding_window attention_k_eq_v enable_moe_block
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ALL_CHANGE.split(), ()),
    **dict.fromkeys(ZERO_IS_NEUTRAL.split(), (0,)),
    **dict.fromkeys(ONE_IS_NEUTRAL.split(), (1,)),
    **dict.fromkeys((BY_TENSORS + FALSE_IS_NEUTRAL).split(), (False,)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ("silu", "swish")),
    **dict.fromkeys(("no_rope_layers", "mlp_only_layers"), ([],)),
    "position_embedding_type": ("rope",),
    "is_causal": (True,),
    "scoring_func": ("sigmoid", "softmax"),  # each family implements one of the two
}
GELU = "gelu"  # its forms differ by about 1e-3: a warning, not a refusal
