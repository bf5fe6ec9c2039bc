"""Write tiny checkpoints of every family that can be split, whose sizes divide by two, three and four ranks."""

from pathlib import Path

import drafters
import families
import tiny
from qwen import QWEN_TEXT

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}
LINEAR = {"linear_num_value_heads": 24, "linear_num_key_heads": 12, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
TEXT = {**QWEN_TEXT, **HEADS, **LINEAR}
OTHER = {**tiny.CONFIG["attention_other_setting"], "num_attention_heads": 24, "num_attention_groups": 12}
STEP = {
    **tiny.CONFIG,
    **tiny.SHORTER,
    "num_attention_heads": 12,
    "num_attention_groups": 12,
    "attention_other_setting": OTHER,
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
HEADLESS = {
    "llama": {**GQA, "model_type": "llama"},
    "qwen2": {**GQA, "model_type": "qwen2", "head_dim": 32 // 4, "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3": {**GQA, "model_type": "qwen3"},
}
MOE = {**GQA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


def write(folder: Path) -> dict[str, str]:
    """Directories by family."""
    found = {name: families.build(name, folder / name, **changes)[0] for name, changes in CHANGES.items()}
    found |= {name: families.headless(folder / name, config)[0] for name, config in {**HEADLESS, "qwen3_moe": MOE}.items()}
    for name, kind in (("step3p5", {}), ("step3p7", {"model_type": "step3p7"})):
        found[name] = tiny.save(folder / name, {**STEP, **kind}, tiny.random_weights(STEP))
    return {name: str(path) for name, path in found.items()}
