"""Describe the GGUF files of families whose heads are blocks after the target's: Step, GLM, DeepSeek, MiMo-V2."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .blocks import ATTENTION_NORM, CORRECTION, FFN, FFN_NORM, POST_NORM, SELF_ATTENTION, inside, shared_experts
from .common import basics, first_dense, grouped, rotary, routed, sparse_layers
from .dense import factors
from .family import HEAD, NO_CHANGE, Family, TensorChange
from .meta import Meta
from .rope import scaling

FULL, SLIDING = "full_attention", "sliding_attention"
SHARED = shared_experts("mlp.shared_experts")
STEP_BLOCK = {
    **SELF_ATTENTION,
    **FFN_NORM,
    **FFN,
    **shared_experts("mlp.share_expert"),
    "attn_gate": "self_attn.g_proj",
    **inside("mlp.gate", "ffn_gate_inp=gate exp_probs_b.bias=router_bias"),
}
MLA_BLOCK = {
    **ATTENTION_NORM,
    **inside("self_attn", "attn_q=q_proj attn_q_a=q_a_proj attn_q_b=q_b_proj attn_q_a_norm=q_a_layernorm"),
    **inside("self_attn", "attn_kv_a_mqa=kv_a_proj_with_mqa attn_kv_a_norm=kv_a_layernorm attn_k_b=embed_q"),
    **inside("self_attn", "attn_v_b=unembed_out attn_output=o_proj"),
    "attn_kv_b": ("self_attn.embed_q", "self_attn.unembed_out"),
    **FFN_NORM,
    **FFN,
    **CORRECTION,
    **SHARED,
}
INDEXER = inside("self_attn", "indexer.attn_k=indexer.wk indexer.attn_q_b=indexer.wq_b")
INDEXER |= inside("self_attn", "indexer.proj=indexer.weights_proj indexer.k_norm=indexer.k_norm")


def step_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Step-3.5.

    Layer types, RoPE's theta and rotated share, and SwiGLU's limits are lists by layer. The numbers of heads of
    sliding-window layers are in `attention_other_setting`.
    """
    found = basics(meta, "step3p5")
    sliding = [bool(v) for v in meta.each("attention.sliding_window_pattern")]
    heads, groups = meta.each("attention.head_count"), meta.each("attention.head_count_kv")
    full, slid = (next((i for i, s in enumerate(sliding) if s == kind), 0) for kind in (False, True))
    base = meta.number("rope.freq_base")
    bases = base, meta.number("rope.freq_base_swa", 10000.0)
    rotated = min(meta.size("rope.dimension_count", found["head_dim"]), found["head_dim"] // 2)
    found |= {
        "num_attention_heads": int(heads[full]),
        "num_attention_groups": int(groups[full]),
        "attention_other_setting": {
            "attention_type": SLIDING,
            "num_attention_heads": int(heads[slid]),
            "num_attention_groups": int(groups[slid]),
            "head_dim": found["head_dim"],
        },
        "layer_types": [SLIDING if s else FULL for s in sliding],
        "rope_theta": [bases[s] for s in sliding],
        "partial_rotary_factors": [1.0 if s else rotated / found["head_dim"] for s in sliding],
        "sliding_window": meta.size("attention.sliding_window"),
        "use_head_wise_attn_gate": "blk.0.attn_gate.weight" in meta.shapes,
        "moe_layers_enum": ",".join(map(str, sparse_layers(meta))),
        "moe_num_experts": meta.size("expert_count"),
        "moe_top_k": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "share_expert_dim": meta.size("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_expert_weight": meta.flag("expert_weights_norm", False),
        "num_nextn_predict_layers": meta.heads,
    }
    for name, key in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        found[name] = meta.each(key, 0.0)[: meta.layers]
    meta.integer("expert_gating_func", 2)
    del found["num_key_value_heads"]
    if scaled := factors(meta, base, rotated):
        found |= {**scaled, "yarn_only_types": [FULL]}
    return found


def glm_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of GLM-4.5 to 4.7."""
    found = {**basics(meta, "glm4_moe"), **rotary(meta), **routed(meta, "n_routed_experts"), **grouped(meta)}
    del found["topk_method"], found["scoring_func"]
    rotated = meta.size("rope.dimension_count", found["head_dim"] // 2)
    return found | {
        "n_shared_experts": meta.integer("expert_shared_count", 1),
        "first_k_dense_replace": first_dense(meta),
        "partial_rotary_factor": rotated / found["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in meta.shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.shapes,
        "num_nextn_predict_layers": meta.heads,
    }


def _mla(meta: Meta, model_type: str) -> dict[str, Any]:
    """Return the config.json entries that families with MLA share, with this model_type.

    ValueError for a missing value, or keys that are not longer than their rotated part.
    """
    found = {**basics(meta, model_type), **routed(meta, "n_routed_experts"), **grouped(meta)}
    rope = meta.size("rope.dimension_count")
    key, value = (
        meta.size(f"attention.{n}_length_mla", None) or meta.size(f"attention.{n}_length") for n in ("key", "value")
    )
    if key <= rope:
        name = "attention.key_length" + ("_mla" if meta.has("attention.key_length_mla") else "")
        raise ValueError(f"{meta.file}: {name} is {key}; expected more than rope.dimension_count, {rope}")
    del found["head_dim"]
    return found | {
        "num_key_value_heads": found["num_attention_heads"],
        "q_lora_rank": meta.size("attention.q_lora_rank", None),
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "n_shared_experts": meta.integer("expert_shared_count", 1) or None,
        "first_k_dense_replace": first_dense(meta),
        "moe_layer_freq": 1,
        "attention_bias": False,
        "num_nextn_predict_layers": meta.heads,
    }


def deepseek_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of DeepSeek-V3 or Kimi-K2, or of GLM-4.7-Flash if the file names GLM's pre-tokenizer."""
    pre = meta.values.get("tokenizer.ggml.pre")
    kind = "glm4_moe_lite" if pre == "glm4" else "deepseek_v3"
    scale = meta.number("rope.scaling.yarn_log_multiplier", 0.0) * 10
    mscale = {"mscale": round(scale, 6), "mscale_all_dim": round(scale, 6)} if scale else {}
    return {**_mla(meta, kind), **rotary(meta, **mscale)}


def glm_dsa_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of GLM-5, 5.1 or 5.2."""
    found = _mla(meta, "glm_moe_dsa") | {
        "index_n_heads": meta.size("attention.indexer.head_count"),
        "index_head_dim": meta.size("attention.indexer.key_length"),
        "index_topk": meta.size("attention.indexer.top_k"),
    }
    rope = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base", 10000.0)}
    found["rope_parameters"] = rope | (scaling(meta) or {})
    full = [f"blk.{i}.indexer.attn_k.weight" in meta.shapes for i in range(meta.layers)]
    if meta.has("attention.indexer.types"):
        full = [bool(kind) for kind in meta.each("attention.indexer.types")[: meta.layers]]
    if not all(full) and any(full):
        found["indexer_types"] = ["full" if kind else "shared" for kind in full]
    return found


def mla_changes(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return the change that takes the keys' or the values' rows out of `attn_kv_b`, which older files do not split.

    The keys' part is transposed in each head. Other parameters get no change. ValueError if the rows do not fit the
    heads.
    """
    if len(shape) != 2 or not path.endswith((".embed_q.weight", ".unembed_out.weight")):
        return NO_CHANGE
    heads = int(max(meta.each("attention.head_count")))
    nope = _mla(meta, "")["qk_nope_head_dim"]
    if shape[0] % heads or shape[0] // heads <= nope:
        expected = f"more than {nope} for each of {heads} heads"
        raise ValueError(f"{meta.file}: {path} has {shape[0]} rows, expected {expected}")
    rows = np.arange(shape[0]).reshape(heads, -1)
    if path.endswith(".unembed_out.weight"):
        return TensorChange(rows=rows[:, nope:].reshape(-1), shape=(heads, shape[0] // heads - nope, shape[1]))
    return TensorChange(
        rows=rows[:, :nope].reshape(-1),
        values=lambda keys: keys.reshape(heads, nope, -1).swapaxes(1, 2).reshape(-1, nope),
        shape=(heads, shape[1], nope),
    )


def mimo_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of MiMo-V2-Flash."""
    found = {**basics(meta, "mimo_v2_flash"), **rotary(meta), **routed(meta, "n_routed_experts")}
    found |= grouped(meta, normed=True)
    every = [int(bool(v)) for v in meta.each("attention.sliding_window_pattern")]
    hybrid = every[: meta.layers]
    groups, sparse = meta.each("attention.head_count_kv"), sparse_layers(meta)
    full, slid = (hybrid.index(kind) if kind in hybrid else 0 for kind in (0, 1))
    sizes = {"head_dim": found["head_dim"], "v_head_dim": meta.size("attention.value_length")}
    sizes["num_attention_heads"] = found["num_attention_heads"]
    rotated = meta.size("rope.dimension_count", found["head_dim"]) / found["head_dim"]
    sinks = {kind for i, kind in enumerate(every) if f"blk.{i}.attn_sinks.weight" in meta.shapes}
    found["layernorm_epsilon"] = found.pop("rms_norm_eps")
    if found["routed_scaling_factor"] == 1.0:
        found["routed_scaling_factor"] = None
    found |= sizes | {f"swa_{name}": value for name, value in sizes.items()}
    return found | {
        "n_shared_experts": None,
        "hybrid_layer_pattern": hybrid,
        "moe_layer_freq": [int(i in sparse) for i in range(meta.layers)],
        "num_key_value_heads": int(groups[full]),
        "swa_num_key_value_heads": int(groups[slid]),
        "sliding_window_size": meta.size("attention.sliding_window"),
        "partial_rotary_factor": math.ceil(rotated * 1000) / 1000,
        "attention_value_scale": meta.number("attention.value_scale", 1.0),
        "swa_rope_theta": meta.number("rope.freq_base_swa", 10000.0),
        "add_swa_attention_sink_bias": 1 in sinks,
        "add_full_attention_sink_bias": 0 in sinks,
    }


STEP = Family(step_config, STEP_BLOCK)
GLM = Family(glm_config, {**SELF_ATTENTION, **POST_NORM, **FFN, **CORRECTION, **SHARED})
DEEPSEEK = Family(deepseek_config, MLA_BLOCK, mla_changes)
GLM_DSA = replace(DEEPSEEK, config=glm_dsa_config, block={**MLA_BLOCK, **INDEXER})
SINKS = {"attn_sinks.weight": "self_attn.attention_sink_bias"}
MIMO_BLOCK = {**SELF_ATTENTION, **FFN_NORM, **FFN, **CORRECTION, **SINKS}
MIMO = Family(mimo_config, MIMO_BLOCK, head={**HEAD, "layer_output_norm": "norm"})
