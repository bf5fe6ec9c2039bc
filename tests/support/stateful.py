"""Tiny models of mlx-lm's whose layers keep states, lists of caches or shared keys, as made ports."""

import importlib

import families
import mlx.core as mx
from mlx.utils import tree_flatten
from portless import MAMBA2 as OF_MAMBA2

from mlx_mtp.checkpoint.probe import probe
from mlx_mtp.layers.made import Plain

SIZES = {
    "hidden_size": 32,
    "vocab_size": 50,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LONGCAT = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 16,
    "moe_topk": 2,
    "n_routed_experts": 2,
    "zero_expert_num": 2,
    "num_layers": 2,
    "q_lora_rank": 8,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
OF_TYPE = {
    "mamba": {"use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "state_size": 8, "time_step_rank": 4},
    "mamba2": OF_MAMBA2,
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "full_attn_idxs": [1],
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.5,
        "block_auto_adjust_ff_dim": True,
        "conv_bias": True,
        "conv_L_cache": 3,
    },
    "granitemoehybrid": {
        **MAMBA2,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_proj_bias": False,
        "mamba_conv_bias": False,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 32},
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "kimi_linear": {
        **LATENT,
        "linear_attn_config": {"num_heads": 2, "head_dim": 8, "kda_layers": [1, 3]},
        "model_max_length": 1000,
        "num_experts": 2,
        "moe_intermediate_size": 16,
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "num_key_value_heads": 1,
        "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "gemma3n": {
        "text_config": {
            **SIZES,
            "model_type": "gemma3n",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 50,
            "sliding_window": 8,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5] * 4,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
        }
    },
    "plamo2": {
        "hidden_size_per_head": 8,
        "mamba_num_heads": 4,
        "mamba_d_state": 8,
        "mamba_step": 2,
        "num_hidden_layers": 4,
    },
    "baichuan_m1": {"sliding_window": 8, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_moe_linear": {
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "norm_topk_prob": True,
        "num_shared_experts": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 0,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "num_hidden_layers": 4,
    },
}


def config_of(name):
    return {**SIZES, **OF_TYPE[name], "model_type": name}


def loaded(name, seed=0):
    """Return a tiny model of a type, with random weights, as a load makes it; AssertionError if it cannot draft."""
    family = importlib.import_module(f"mlx_lm.models.{name}")
    arguments = family.ModelArgs.from_dict(config_of(name))
    model = type("Model", (Plain, family.Model), {})(arguments)
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    model.load_weights(list(families.random_weights(shapes, seed).items()), strict=False)
    model.eval()
    model.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]
    why = probe(model)
    assert why is None, why
    return model
