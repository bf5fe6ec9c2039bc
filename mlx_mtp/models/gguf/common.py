"""Share between families the names of their blocks' tensors, and what all read of metadata."""

from typing import Any

from .meta import Meta
from .rope import scaling

SELF_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
POST_ATTENTION_NORM = {"post_attention_norm": "post_attention_layernorm"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_up_exps": ("mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"),
}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "exp_probs_b": "mlp.gate.e_score_correction"}


def shared_experts(module: str) -> dict[str, str]:
    """Name the tensors of a shared expert, which is this module of a layer."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


def basics(meta: Meta, model_type: str) -> dict[str, Any]:
    """Read what every family's config.json has."""
    heads = max(meta.each("attention.head_count"))
    if heads < 1:
        raise ValueError(f"{meta.file}: metadata attention.head_count is {heads}; expected at least 1")
    vocab = meta.shapes.get("token_embd.weight")
    if vocab is None:
        raise ValueError(f"{meta.file}: tensor token_embd.weight is missing")
    return {
        "model_type": model_type,
        "hidden_size": meta.size("embedding_length"),
        "num_hidden_layers": meta.layers,
        "intermediate_size": int(max(meta.each("feed_forward_length", 0))),
        "num_attention_heads": int(heads),
        "num_key_value_heads": int(max(meta.each("attention.head_count_kv", heads))),
        "head_dim": meta.size("attention.key_length", None) or meta.size("embedding_length") // int(heads),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.size("context_length"),
        "vocab_size": vocab[0],
        "tie_word_embeddings": "output.weight" not in meta.shapes,
    }


def rotary(meta: Meta, **more: Any) -> dict[str, Any]:
    """Read the rotary embedding's base and scaling."""
    found = scaling(meta, **more)
    return {"rope_theta": meta.number("rope.freq_base", 10000.0), **({"rope_scaling": found} if found else {})}


def routed(meta: Meta, count: str, **names: str) -> dict[str, Any]:
    """Return the number of experts (as `count`), the number that a token uses, and their size."""
    return {
        count: meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        **{name: meta.size(key) for name, key in names.items()},
    }


def grouped(meta: Meta) -> dict[str, Any]:
    """Read how DeepSeek and its followers choose experts: by sigmoid scores, in groups."""
    if (function := meta.integer("expert_gating_func", 2)) != 2:
        raise ValueError(f"{meta.file}: expert_gating_func is {function}; supported is 2, sigmoid")
    return {
        "n_group": meta.size("expert_group_count", None) or 1,
        "topk_group": meta.size("expert_group_used_count", None) or 1,
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def sparse_layers(meta: Meta) -> list[int]:
    """List the target's layers that have experts."""
    names = ("ffn_gate_exps", "ffn_gate_up_exps", "ffn_up_exps")
    return [i for i in range(meta.layers) if any(f"blk.{i}.{name}.weight" in meta.shapes for name in names)]


def first_dense(meta: Meta) -> int:
    """Count the layers before the first with experts; ValueError where a later one has none."""
    sparse = sparse_layers(meta)
    first = sparse[0] if sparse else meta.layers
    if sparse != list(range(first, meta.layers)):
        raise ValueError(f"{meta.file}: a layer without experts follows one with them, which is not supported")
    return first
