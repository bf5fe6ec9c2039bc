"""Describe Llama's, Qwen2's, Qwen3's and Gemma 3's GGUF files, which have no MTP heads."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .blocks import EXPERTS, FFN_NORM, MLP, POST_NORM, SELF_ATTENTION
from .common import basics, rotary, routed
from .family import NO_CHANGE, Family, TensorChange, unchanged
from .meta import Meta
from .orders import unpermuted
from .rope import from_factors

LARGEST_GEMMA = 62  # layers of the one whose queries are not scaled by their head's size


def llama_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Llama, or of a family stored as Llama, such as Mistral; ValueError for experts."""
    if meta.integer("expert_count", 0):
        raise ValueError(f"{meta.file}: experts in architecture {meta.architecture} (Mixtral) are not supported")
    found = {**basics(meta, "llama"), **rotary(meta), "hidden_act": "silu"}
    if not meta.has("attention.key_length") and meta.has("rope.dimension_count"):
        found["head_dim"] = meta.size("rope.dimension_count")
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
    found |= {name: f"blk.0.{tensor}.bias" in meta.shapes for name, tensor in biases.items()}
    return found | factors(meta, found["rope_theta"])


def factors(meta: Meta, base: float, rotated: int | None = None) -> dict[str, Any]:
    """Return {"rope_scaling": ...} from the tensor rope_freqs.weight; {} without this tensor.

    base: the rope theta. rotated: the number of a head's features that are rotated; None is all. If the factors after
    the first rotated / 2 are all 1, which is a converter's padding, they are dropped; else all are used, because
    older converters compute them as if all features were rotated. ValueError if the factors are not Llama 3's.
    """
    stored = meta.values.get("rope_freqs.weight")
    if stored is None:
        return {}
    found = np.asarray(stored, np.float64)
    if rotated is not None and (found[rotated // 2 :] == 1).all():
        found = found[: rotated // 2]
    return {"rope_scaling": from_factors(meta, found, base)}


def unpermuted_attention(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return the change that restores the row order of queries and keys, which converters change to Meta's.

    Parameters at other paths get no change. ValueError if the rows do not fit the number of heads.
    """
    for name, key in (("q_proj", "attention.head_count"), ("k_proj", "attention.head_count_kv")):
        if f".{name}." in path:
            heads = int(max(meta.each(key, max(meta.each("attention.head_count")))))
            if shape[0] % (2 * heads):
                raise ValueError(f"{meta.file}: {path} has {shape[0]} rows; expected a multiple of {2 * heads}")
            return TensorChange(rows=unpermuted(shape[0], heads))
    return NO_CHANGE


def qwen_config(model_type: str, meta: Meta) -> dict[str, Any]:
    """Return the config.json entries that Qwen2, Qwen2.5 and Qwen3 share, with this model_type."""
    return {**basics(meta, model_type), **rotary(meta)}


def qwen3_moe_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Qwen3 with experts in every layer."""
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    normed = {"norm_topk_prob": meta.flag("expert_weights_norm", True)}
    return {**qwen_config("qwen3_moe", meta), **routed(meta, "num_experts"), **normed, **sparse}


def gemma3_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Gemma 3's text model; every sixth layer attends to all positions."""
    found = {**basics(meta, "gemma3_text"), **rotary(meta)}
    head_dim = found["head_dim"]
    if found["num_hidden_layers"] == LARGEST_GEMMA:
        head_dim = found["hidden_size"] // found["num_attention_heads"]
    if not found["tie_word_embeddings"]:
        del found["tie_word_embeddings"]
    return found | {
        "query_pre_attn_scalar": head_dim,
        "sliding_window": meta.size("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_theta": meta.number("rope.freq_base", 1e6),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 1e4),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def centred_norms(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return the change that subtracts from a norm's weights the 1 that converters add; none for other parameters.

    mlx-lm's Gemma adds the 1 again when it runs.
    """
    return TensorChange(values=lambda w: w - np.float32(1)) if path.endswith("norm.weight") else NO_CHANGE


LLAMA = Family(llama_config, {**SELF_ATTENTION, **MLP, **FFN_NORM}, unpermuted_attention, head={}, float16=True)
QWEN2 = replace(LLAMA, config=partial(qwen_config, "qwen2"), changes=unchanged)
QWEN3 = replace(QWEN2, config=partial(qwen_config, "qwen3"))
QWEN3_MOE = replace(QWEN3, config=qwen3_moe_config, block={**SELF_ATTENTION, **EXPERTS, **FFN_NORM})
GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA_BLOCK = {**SELF_ATTENTION, **MLP, **POST_NORM, **GEMMA_NORMS}
GEMMA3 = Family(gemma3_config, GEMMA_BLOCK, centred_norms, head={})
