"""Metadata that the GGUF files of several families have in common."""

from typing import Any

from .meta import Meta
from .rope import scaling


def basics(meta: Meta, model_type: str) -> dict[str, Any]:
    """Return the config.json entries that every family has, with this model_type, from the metadata.

    Of numbers that differ between blocks (attention heads, KV heads, MLP size) it returns the largest. ValueError if
    a required key or token_embd.weight is missing.
    """
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
    """Return config.json's entries `rope_theta` and, if the metadata have a scaling, `rope_scaling`.

    more: entries added to a YaRN scaling. ValueError for an unsupported scaling.
    """
    found = scaling(meta, **more)
    return {"rope_theta": meta.number("rope.freq_base", 10000.0), **({"rope_scaling": found} if found else {})}


def routed(meta: Meta, count: str, **names: str) -> dict[str, Any]:
    """Return config.json's entries for experts: their number (key `count`), those per token, and their size.

    names: further keys of config.json, each with the metadata key of its value. ValueError if a value is missing.
    """
    return {
        count: meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        **{name: meta.size(key) for name, key in names.items()},
    }


def grouped(meta: Meta, *, normed: bool = False) -> dict[str, Any]:
    """Return config.json's entries for DeepSeek's routing: sigmoid scores, experts chosen in groups.

    normed: llama.cpp's default for the family, used if the metadata do not state whether the weights of a token's
    experts are normalised. ValueError if the metadata name another function of the scores.
    """
    if (function := meta.integer("expert_gating_func", 2)) != 2:
        raise ValueError(f"{meta.file}: expert_gating_func is {function}; supported is 2, sigmoid")
    return {
        "n_group": meta.size("expert_group_count", None) or 1,
        "topk_group": meta.size("expert_group_used_count", None) or 1,
        "norm_topk_prob": meta.flag("expert_weights_norm", normed),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def sparse_layers(meta: Meta) -> list[int]:
    """Return the indices of the target's layers whose tensors include experts."""
    names = ("ffn_gate_exps", "ffn_gate_up_exps", "ffn_up_exps")
    return [i for i in range(meta.layers) if any(f"blk.{i}.{name}.weight" in meta.shapes for name in names)]


def first_dense(meta: Meta) -> int:
    """Return the number of layers before the first with experts; ValueError if a later layer has none.

    Without any experts it is the number of the target's layers.
    """
    sparse = sparse_layers(meta)
    first = sparse[0] if sparse else meta.layers
    if sparse != list(range(first, meta.layers)):
        raise ValueError(f"{meta.file}: layers without experts after the first with experts are not supported")
    return first
