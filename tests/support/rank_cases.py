"""Write tiny checkpoints of every family that can be split, with sizes divisible by two, three and four."""

from pathlib import Path

import drafters
import families
import mlx.core as mx
import tiny
from quantized_models import STEP as QUANTIZED
from quantized_models import quantized

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}
LINEAR = {
    "linear_num_value_heads": 24,
    "linear_num_key_heads": 12,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
OTHER = {**tiny.CONFIG["attention_other_setting"], "num_attention_heads": 24, "num_attention_groups": 12}
STEP = {
    **tiny.CONFIG,
    **tiny.SHORTER,
    "num_attention_heads": 12,
    "num_attention_groups": 12,
    "attention_other_setting": OTHER,
    "max_position_embeddings": 4096,
}
GQA = {**drafters.GQA, **HEADS, "num_hidden_layers": 3, "head_dim": 8}
CHANGES = {
    "glm4_moe": HEADS,
    "glm4_moe_lite": HEADS,
    "deepseek_v3": HEADS,
    "deepseek_v32": HEADS,
    "glm_moe_dsa_shared": HEADS,
    "qwen3_5": {"text_config": {**families.FAMILIES["qwen3_5"].config["text_config"], **HEADS, **LINEAR}},
    "qwen3_5_moe": {"text_config": {**families.FAMILIES["qwen3_5_moe"].config["text_config"], **HEADS, **LINEAR}},
}
MOE = {**GQA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
HEADLESS = {
    "llama": {**GQA, "model_type": "llama"},
    "qwen2": {**GQA, "model_type": "qwen2", "num_key_value_heads": 1},
    "qwen3": {**GQA, "model_type": "qwen3"},
    "qwen3_moe": MOE,
}
STEPS = {"step3p5": {}, "step3p7": {"model_type": "step3p7"}}
FAMILIES = (*CHANGES, *HEADLESS, *STEPS)

FOUR_BITS = {  # whole groups of 32 columns on each of two or four ranks
    **{**STEP, **QUANTIZED, "vocab_size": 16, "head_dim": 32, "num_attention_heads": 8, "num_attention_groups": 4},
    **{"intermediate_size": 128, "moe_intermediate_size": 128, "share_expert_dim": 128},
    "attention_other_setting": {**OTHER, "num_attention_heads": 8, "num_attention_groups": 4, "head_dim": 32},
    "quantization": {"group_size": 32, "bits": 4},
}


def write(folder: Path, name: str) -> str:
    """Write a checkpoint of a family; return its directory."""
    if name in CHANGES:
        return str(families.build(name, folder / name, **CHANGES[name])[0])
    if name in HEADLESS:
        return str(families.headless(folder / name, HEADLESS[name])[0])
    return str(tiny.save(folder / name, {**STEP, **STEPS[name]}, tiny.random_weights(STEP)))


def write_quantized(folder: Path, dtype: mx.Dtype) -> str:
    """Write a checkpoint with 4-bit matrices and other weights in `dtype`; return its directory."""
    return str(tiny.save(folder, FOUR_BITS, quantized(tiny.random_weights(FOUR_BITS), dtype)))
