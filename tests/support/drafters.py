"""Write tiny random EAGLE-3 heads, with the tensor names of the hub's."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import tiny

# A target without heads, for the model_type that a test adds.
GQA = {
    "hidden_size": 32,
    "vocab_size": 13,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "vocab_size": 13,
    "draft_vocab_size": 7,
}


def shapes(config: dict, target_size: int, *, layer: str = "midlayer") -> dict[str, tuple[int, ...]]:
    H, D, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv, rows = config["num_attention_heads"] * D, config["num_key_value_heads"] * D, config["draft_vocab_size"]
    found = {"fc.weight": (H, 3 * target_size), "norm.weight": (H,), "lm_head.weight": (rows, H)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"{layer}.{name}.weight"] = (H,)
    for name, n in (("q", q), ("k", kv), ("v", kv)):
        found[f"{layer}.self_attn.{name}_proj.weight"] = (n, 2 * H)
    found[f"{layer}.self_attn.o_proj.weight"] = (H, q)
    for name, shape in (("gate", (inner, H)), ("up", (inner, H)), ("down", (H, inner))):
        found[f"{layer}.mlp.{name}_proj.weight"] = shape
    return found


def weights(config: dict, target_size: int, seed: int = 0, **kwargs) -> dict[str, mx.array]:
    """Random tensors; d2t spreads the drafter's tokens over the target's, t2d is its inverse."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(config, target_size, **kwargs).items():
        values = rng.standard_normal(shape)
        values = 1 + 0.1 * values if "norm" in name else 0.4 * values
        found[name] = mx.array(values.astype(np.float32))
    rows, V = config["draft_vocab_size"], config["vocab_size"]
    if rows < V:
        known = np.sort(rng.choice(V, rows, replace=False))
        found["d2t"] = mx.array(known - np.arange(rows))
        found["t2d"] = mx.array(np.isin(np.arange(V), known))
    return found


def save(path: Path, config: dict, target_size: int, seed: int = 0, **kwargs) -> Path:
    return tiny.save(path, config, weights(config, target_size, seed, **kwargs))


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
SLIDING = {"layer_types": ["full_attention", *["sliding_attention"] * 4], "sliding_window": 8, "head_dim": 16}
HEADLESS = {
    "mistral": {**GQA, "model_type": "mistral", "mlx_lm": "llama", "tie_word_embeddings": True},
    "llama_sliding": {**GQA, **SLIDING, "model_type": "llama"},
    "qwen2": {**GQA, "model_type": "qwen2"},
    "qwen3": {**GQA, "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {**GQA, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 16},
    "gemma3_text": {
        **GQA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
    },
}
