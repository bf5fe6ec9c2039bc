"""Describe the GGUF files of families with recurrent layers: Qwen3.5, Qwen3-Next and Nemotron-3."""

from typing import Any

import numpy as np

from .blocks import FFN, POST_NORM, QKV, SELF_ATTENTION, inside, shared_experts
from .common import basics, grouped, rotary, routed
from .dense import unpermuted_attention
from .family import HEAD, NO_CHANGE, Family, TensorChange, ends
from .meta import Meta
from .orders import interleaved, untiled

SHARED_GATE = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
SSM = "ssm_conv1d=conv1d ssm_a=A_log ssm_dt.bias=dt_bias ssm_norm=norm ssm_out=out_proj"
QWEN35_BLOCK = {
    **SELF_ATTENTION,
    **POST_NORM,
    **FFN,
    **shared_experts("mlp.shared_expert"),
    **SHARED_GATE,
    **inside("linear_attn", f"{SSM} attn_qkv=in_proj_qkv attn_gate=in_proj_z ssm_alpha=in_proj_a ssm_beta=in_proj_b"),
}
NEXT_BLOCK = QWEN35_BLOCK | inside(
    "linear_attn", "attn_qkv=in_proj_qkvz attn_gate=in_proj_qkvz ssm_in=in_proj_qkvz ssm_ba=in_proj_ba"
)


def recurrent(meta: Meta) -> dict[str, Any]:
    """Return config.json's sizes of gated-delta layers, and full_attention_interval, by default 4."""
    heads = meta.size("ssm.time_step_rank")
    return {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": meta.size("ssm.group_count"),
        "linear_key_head_dim": meta.size("ssm.state_size"),
        "linear_value_head_dim": meta.size("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "full_attention_interval": meta.size("full_attention_interval", 4),
    }


def qwen_experts(meta: Meta) -> dict[str, Any]:
    """Return config.json's entries for Qwen's routed and shared experts; {} for a model without experts."""
    if not meta.integer("expert_count", 0):
        return {}
    shared = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
    return {**routed(meta, "num_experts", **shared), "norm_topk_prob": meta.flag("expert_weights_norm", True)}


def partial_rotary(meta: Meta, head_dim: int) -> float:
    """Return the share of a head's features that are rotated; 1 if the metadata do not state it."""
    return meta.size("rope.dimension_count", head_dim) / head_dim


def qwen35_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Qwen3.5, 3.6 or 3.8, with experts or without; its fields are in `text_config`."""
    kind = "qwen3_5_moe" if meta.integer("expert_count", 0) else "qwen3_5"
    text = {**basics(meta, f"{kind}_text"), **recurrent(meta), **qwen_experts(meta)}
    rope: dict[str, Any] = {"rope_type": "default", **rotary(meta)}
    rope |= rope.pop("rope_scaling", {})
    text["rope_parameters"] = {**rope, "partial_rotary_factor": partial_rotary(meta, text["head_dim"])}
    if meta.heads:
        text["mtp_num_hidden_layers"] = meta.heads
    interval = text["full_attention_interval"]
    kinds = ("linear_attention", "full_attention")
    text["layer_types"] = [kinds[(i + 1) % interval == 0] for i in range(meta.layers)]
    return {"model_type": kind, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}


def next_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Qwen3-Next."""
    found = {**basics(meta, "qwen3_next"), **rotary(meta), **recurrent(meta), **qwen_experts(meta)}
    found["partial_rotary_factor"] = partial_rotary(meta, found["head_dim"])
    return found | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def recurrent_changes(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return the change that restores A_log, and the shapes of conv1d and the shared expert's gate; else none."""
    if path.endswith(".A_log"):
        return TensorChange(values=log_of_negative, shape=(shape[0],))
    if path.endswith(".conv1d.weight"):
        return TensorChange(shape=(*shape[:2], 1))
    if path.endswith(".shared_expert_gate.weight"):
        return TensorChange(shape=(1, shape[-1]))
    return NO_CHANGE


def log_of_negative(a: np.ndarray) -> np.ndarray:
    """Return A_log [rows, columns] from the stored a = -exp(A_log)."""
    with np.errstate(all="ignore"):
        return np.log(-a)


def qwen35_changes(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return `recurrent_changes`, with value heads grouped by key head again; converters tile them.

    Only parameters of gated-delta layers are reordered. ValueError if a tensor's size does not fit the metadata.
    """
    change = recurrent_changes(meta, path, shape)
    if ".linear_attn." not in path or path.endswith(".norm.weight"):
        return change
    sizes = recurrent(meta)
    k, v = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    key, value = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    if v % k:
        raise ValueError(f"{meta.file}: {v} value heads; expected a multiple of {k} key heads")
    before = 2 * k * key if "in_proj_qkv" in path or "conv1d" in path else 0
    size = 1 if path.endswith((".A_log", ".dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else value
    columns = path.endswith("out_proj.weight")
    _check_size(meta, path, before + v * size, shape[columns])
    order = untiled(before, k, v, size)
    return change._replace(columns=order) if columns else change._replace(rows=order)


def next_changes(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return `recurrent_changes`, or the change that orders the rows of in_proj_qkvz by key head.

    Converters sort those rows by kind (q, k, v, z) and split them into two tensors; a layer with one tensor, ssm_in,
    has them by key head already.
    """
    layer = path.rpartition(".linear_attn.")[0].rpartition(".")[2]
    if path.endswith("in_proj_qkvz.weight") and f"blk.{layer}.ssm_in.weight" not in meta.shapes:
        sizes = recurrent(meta)
        k, key = sizes["linear_num_key_heads"], sizes["linear_key_head_dim"]
        value = sizes["linear_num_value_heads"] // k * sizes["linear_value_head_dim"]
        _check_size(meta, path, 2 * k * (key + value), shape[0])
        return TensorChange(rows=interleaved(k, key, key, value, value))
    return recurrent_changes(meta, path, shape)


def _check_size(meta: Meta, path: str, expected: int, size: int) -> None:
    """Raise ValueError unless a tensor's number of rows or columns, `size`, is the one that the metadata give."""
    if expected != size:
        raise ValueError(f"{meta.file}: {path} has {size} rows or columns; its metadata give {expected}")


NEMOTRON_MIXER = inside(
    "mixer",
    f"{QKV} {SSM} ssm_in=in_proj ssm_d=D ffn_up=up_proj ffn_down=down_proj "
    "ffn_gate_inp=gate exp_probs_b.bias=gate.e_score_correction_bias "
    "ffn_up_exps=switch_mlp.fc1 ffn_down_exps=switch_mlp.fc2 "
    "ffn_up_shexp=shared_experts.up_proj ffn_down_shexp=shared_experts.down_proj "
    "ffn_latent_down=fc1_latent_proj ffn_latent_up=fc2_latent_proj",
)


def nemotron_config(meta: Meta) -> dict[str, Any]:
    """Return config.json of Nemotron-H or Nemotron-3; each layer's kind follows from the names of its tensors.

    ValueError for a block that has none of these tensors.
    """
    found = basics(meta, "nemotron_h")
    epsilon, heads = found.pop("rms_norm_eps"), meta.size("ssm.time_step_rank")
    names = (("ssm_in", "M"), ("attn_q", "*"), ("ffn_up_exps", "E"), ("ffn_up", "-"))
    kinds = [next((k for n, k in names if f"blk.{i}.{n}.weight" in meta.shapes), "?") for i in range(meta.layers)]
    if "?" in kinds:
        raise ValueError(f"{meta.file}: block {kinds.index('?')} has no tensor of Mamba2, attention, experts or MLP")
    conv_bias = any(name.endswith("ssm_conv1d.bias") for name in meta.shapes)
    found |= {
        "hybrid_override_pattern": "".join(kinds),
        "layer_norm_epsilon": epsilon,
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.size("ssm.inner_size") // heads,
        "n_groups": meta.size("ssm.group_count"),
        "ssm_state_size": meta.size("ssm.state_size"),
        "conv_kernel": meta.size("ssm.conv_kernel"),
        "use_conv_bias": conv_bias,
        "time_step_limit": [0.0, float("inf")],
        **dict.fromkeys(("attention_bias", "mamba_proj_bias", "use_bias", "mlp_bias"), False),
        "mlp_hidden_act": "relu2",
    }
    if "-" in kinds:  # files with experts state the experts' size alone
        found["intermediate_size"] = meta.shapes[f"blk.{kinds.index('-')}.ffn_up.weight"][0]
    return found | (_nemotron_experts(meta) if "E" in kinds else {}) | _nemotron_head(meta)


def _nemotron_experts(meta: Meta) -> dict[str, Any]:
    shared = meta.size("expert_shared_feed_forward_length")
    found = {**routed(meta, "n_routed_experts"), **grouped(meta), "moe_shared_expert_intermediate_size": shared}
    for name in ("topk_method", "scoring_func"):
        del found[name]
    found["n_shared_experts"] = meta.size("expert_shared_count", 1)
    if latent := meta.integer("moe_latent_size", 0):
        found["moe_latent_size"] = latent
    return found


def _nemotron_head(meta: Meta) -> dict[str, Any]:
    """Return config.json's entries for MTP heads, with their own number of experts; {} without heads."""
    if not meta.heads:
        return {}
    found: dict[str, Any] = {"num_nextn_predict_layers": meta.heads, "mtp_hybrid_override_pattern": "*E"}
    if experts := meta.shapes.get(f"blk.{meta.layers}.ffn_up_exps.weight"):
        found["mtp_n_routed_experts"] = experts[0]
    return found


def nemotron_changes(meta: Meta, path: str, shape: tuple[int, ...]) -> TensorChange:
    """Return the change that restores Mamba2's A_log and shapes, or the row order of attention's queries and keys.

    Converters store Mamba2's vectors as matrices of one column.
    """
    size = int(np.prod(shape))
    if path.endswith(".A_log"):
        return TensorChange(values=log_of_negative, shape=(size,))
    if path.endswith((".mixer.D", ".mixer.norm.weight")):
        return TensorChange(shape=(size,))
    if path.endswith(".conv1d.weight"):
        return TensorChange(shape=(*shape[:2], 1))
    return unpermuted_attention(meta, path, shape)


QWEN35 = Family(
    qwen35_config, QWEN35_BLOCK, qwen35_changes,
    layers="language_model.model.layers.", ends=ends("language_model.model.", "language_model.lm_head"),
)  # fmt: skip
QWEN3_NEXT = Family(next_config, NEXT_BLOCK, next_changes)
NEMOTRON = Family(
    nemotron_config,
    {"attn_norm": "norm", **NEMOTRON_MIXER},
    nemotron_changes,
    layers="backbone.layers.",
    ends={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    head=HEAD,
    in_head={
        **inside("block.layers", "attn_norm=0.norm post_attention_norm=1.norm ffn_norm=1.norm"),
        # Layer 0 is attention, layer 1 experts.
        **{n: f"block.layers.{int(not n.startswith('attn_'))}.{path}" for n, path in NEMOTRON_MIXER.items()},
    },
)
