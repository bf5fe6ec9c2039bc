"""Paths in a layer, by tensor name in a block, that the GGUF files of several families have in common."""

from ...layers.mtp_spec import pairs


def inside(module: str, names: str) -> dict[str, str]:
    """Return, by GGUF tensor name, the paths of parameters in a module of a layer, from text as in `pairs`."""
    return {tensor: f"{module}.{name}" for tensor, name in pairs(names)}


ATTENTION_NORM = {"attn_norm": "input_layernorm"}
QKV = "attn_q=q_proj attn_k=k_proj attn_v=v_proj attn_output=o_proj"
SELF_ATTENTION = ATTENTION_NORM | inside("self_attn", f"{QKV} attn_q_norm=q_norm attn_k_norm=k_norm")
MLP = inside("mlp", "ffn_gate=gate_proj ffn_up=up_proj ffn_down=down_proj")
FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_up_exps": ("mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"),
}
FFN = MLP | EXPERTS
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "exp_probs_b": "mlp.gate.e_score_correction"}


def shared_experts(module: str) -> dict[str, str]:
    """Return, by GGUF tensor name, the paths of a shared expert's projections; module: its path in a layer."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}
