"""Write GGUF files of tiny checkpoints as llama.cpp's converters do: names, changed values, metadata."""

import re
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

LETTERS = [*"abcdefghijkl", "ab"]
KINDS = gguf.GGMLQuantizationType
HEAD = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "layer_output_norm": "layer_output_norm",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.g_proj": "attn_gate",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    **{f"mlp.experts.{n}_proj": f"ffn_{n}_exps" for n in ("gate", "up", "down", "gate_up")},
    **{f"{at}.{n}_proj": f"ffn_{n}_exps" for n in ("gate", "up", "down") for at in ("moe", "mlp.switch_mlp")},
    **{
        f"{at}.{n}_proj": f"ffn_{n}_shexp"
        for n in ("gate", "up", "down")
        for at in ("mlp.shared_experts", "mlp.shared_expert", "share_expert")
    },
    "mlp.gate": "ffn_gate_inp",
    "moe.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "moe.router_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "norm": "attn_norm",
    **{f"mixer.{n}_proj": f"attn_{n}" for n in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ENDS = {
    **{"model.embed_tokens": "token_embd", "backbone.embeddings": "token_embd"},
    **{"model.norm": "output_norm", "backbone.norm_f": "output_norm", "lm_head": "output"},
}
Arrays = dict[str, np.ndarray]


def text_of(config: dict) -> dict:
    return config | config.get("text_config", {})


def stacked(weights: Arrays) -> Arrays:
    """Return tensors with numbered experts stacked."""
    found, experts = {}, {}
    for name, w in weights.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = w
        else:
            found[name] = w
    return found | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}


def in_layers(weights: Arrays, layers: int, model_type: str) -> Arrays:
    """Return tensors with heads named as layers after the target's."""
    places = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }
    found = {}
    for name, w in weights.items():
        name = name.replace("model.language_model.", "model.").replace(".transformer.", ".")
        name = name.replace("shared_head.output", "shared_head.head")
        if match := re.fullmatch(r"mtp\.(fc|pre_fc_norm_\w+|norm)\.weight", name):
            name = f"model.layers.{layers}.{places[match[1]]}.weight"
        if model_type == "nemotron_h" and name.startswith("mtp."):
            name = name.replace("mtp.layers.1.norm", f"model.layers.{layers}.post_attention_norm")
            name = name.replace("mtp.layers.1.final_layernorm", f"model.layers.{layers}.shared_head.norm")
            name = re.sub(r"mtp\.layers\.[01]", f"model.layers.{layers}", name)
        name = name.replace("mtp.layers.0.", f"model.layers.{layers}.") if name.startswith("mtp.") else name
        if match := re.match(r"model\.mtp\.layers\.(\d+)\.(.+)", name):
            inside = match[2].replace("pre_mlp_layernorm", "post_attention_layernorm")
            inside = inside.replace("final_layernorm", "layer_output_norm")
            name = f"model.layers.{layers + int(match[1])}.{inside}"
        found[name] = w
    return found


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, 2, len(w) // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def tiled(w: np.ndarray, axis: int, k: int, v: int, size: int) -> np.ndarray:
    shape = w.shape
    split = w.reshape(*shape[:axis], k, v // k, size, *shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(shape)


def linear_attention(name: str, w: np.ndarray, text: dict, *, tile: bool) -> Arrays:
    k, v = text["linear_num_key_heads"], text["linear_num_value_heads"]
    dk, dv = text["linear_key_head_dim"], text["linear_value_head_dim"]
    if name.endswith("in_proj_qkvz.weight"):
        sizes = np.cumsum([dk, dk, v // k * dv])
        parts = np.split(w.reshape(k, -1, w.shape[-1]), sizes, axis=1)
        q, key, value, z = (part.reshape(-1, w.shape[-1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate([q, key, value]), name.replace("qkvz", "z"): z}
    if tile and k != v:
        before = 2 * k * dk
        if "in_proj_qkv" in name or "conv1d" in name:
            w = np.concatenate([w[:before], tiled(w[before:], 0, k, v, dv)])
        elif "in_proj_z" in name:
            w = tiled(w, 0, k, v, dv)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            w = tiled(w, 0, k, v, 1)
        elif "out_proj" in name:
            w = tiled(w, 1, k, v, dv)
    return {name: w}


def changed(name: str, w: np.ndarray, config: dict) -> Arrays:
    """Return a tensor with the changes of its family's converter."""
    kind, text = config["model_type"], text_of(config)
    if "linear_attn" in name:
        found = linear_attention(name, w, text, tile=kind.startswith("qwen3_5"))
        return {n: own(n, a) for n, a in found.items()}
    plus = {"qwen3_5", "qwen3_5_moe", "qwen3_next", "step3p5", "gemma3_text"}
    if name.endswith("norm.weight") and kind in plus:
        return {name: w + 1}
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(w, 2, axis=1)
        return {f"{name[:-12]}gate_proj.weight": gate, f"{name[:-12]}up_proj.weight": up}
    if kind in ("llama", "mistral") or (kind == "nemotron_h" and "mixer" in name):
        heads = {"q_proj": text["num_attention_heads"], "k_proj": text["num_key_value_heads"]}
        for part, count in heads.items():
            w = permuted(w, count) if f".{part}." in name else w
    if kind == "nemotron_h" and name.endswith(("mixer.D", "mixer.norm.weight")):
        w = w.reshape(-1, 1) if name.endswith("D") else w.reshape(text["n_groups"], -1)
    if name.endswith("kv_b_proj.weight"):
        heads, nope = text["num_attention_heads"], text["qk_nope_head_dim"]
        both = w.reshape(heads, -1, w.shape[-1])
        k, v = both[:, :nope].swapaxes(1, 2), both[:, nope:]
        return {name.replace("kv_b", "k_b"): k, name.replace("kv_b", "v_b"): v}
    return {name: own(name, w)}


def own(name: str, w: np.ndarray) -> np.ndarray:
    """Return a tensor with the changes that converters make in all recurrent layers."""
    if name.endswith("A_log"):
        return -np.exp(w).reshape(-1, 1) if "mixer" in name else -np.exp(w)
    return w.squeeze() if name.endswith("conv1d.weight") else w


def renamed(name: str, model_type: str) -> str:
    stem, _, suffix = name.rpartition(".")
    match = re.match(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
    if not match:
        return f"{ENDS[stem]}.{suffix}"
    tables = HEAD | LAYER | {"post_attention_norm": "post_attention_norm"}
    if model_type.startswith(("glm4_moe", "qwen3_5", "qwen3_next", "gemma3")) and model_type != "glm4_moe_lite":
        tables["post_attention_layernorm"] = "post_attention_norm"
    rest = match[2]
    if rest in tables:
        place = tables[rest]
        return f"blk.{match[1]}.{place}" + (
            ".weight" if rest.endswith("experts.down_proj") or "gate_up" in rest else ""
        )
    return f"blk.{match[1]}.{tables[rest.rpartition('.')[0]]}.{suffix}"


def tensors_of(config: dict, weights: dict[str, mx.array]) -> Arrays:
    """Return a checkpoint's tensors under GGUF's names, with the converter's changes."""
    text = text_of(config)
    arrays = stacked({name: np.array(w, np.float32) for name, w in weights.items()})
    found = {}
    for name, w in in_layers(arrays, text["num_hidden_layers"], config["model_type"]).items():
        for part, changed_w in changed(name, w, config).items():
            target = renamed(part, config["model_type"])
            found[target] = changed_w
    return {re.sub(r"\.(A_log|D|dt_bias|router_bias|e_score_correction_bias)$", "", n): w for n, w in found.items()}


def iq4_nl(w: np.ndarray) -> np.ndarray:
    """Return rows of IQ4_NL blocks, uint8 [..., bytes], which the gguf package reads but does not write."""
    table = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    groups = w.reshape(*w.shape[:-1], -1, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], -1)
    d = (largest / table[0]).astype(np.float16)
    ratios = groups / np.where(d == 0, 1, d).astype(np.float32)
    codes = np.abs(ratios[..., None] - table).argmin(axis=-1).astype(np.uint8)
    blocks = np.concatenate([d.view(np.uint8), codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return blocks.reshape(*w.shape[:-1], -1)


def write(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: Arrays,
    kind: Any = KINDS.F32,
    *,
    tokenizer: dict[str, Any] | None = None,
    kinds: dict[str, Any] | None = None,
) -> Path:
    """Write a GGUF file; matrices whose rows are whole blocks have type `kind`, other tensors are float32.

    kinds: other types by tensor name.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**{f"{arch}.{k}": v for k, v in metadata.items()}, **(tokenizer or letters())}.items():
        put(writer, key, value)
    for name, w in tensors.items():
        w = np.ascontiguousarray(w, np.float32)
        own = (kinds or {}).get(name, kind)
        if is_matrix(name, w) and w.shape[-1] % gguf.GGML_QUANT_SIZES[own][0] == 0:
            writer.add_tensor(name, iq4_nl(w) if own == KINDS.IQ4_NL else gguf.quants.quantize(w, own), raw_dtype=own)
        else:
            writer.add_tensor(name, w)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all added metadata and tensors, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_matrix(name: str, w: np.ndarray) -> bool:
    kept = ("ffn_gate_inp.weight", "ssm_conv1d.weight", "ssm_norm.weight", "ffn_gate_inp_shexp.weight")
    return w.ndim > 1 and name.endswith(".weight") and not name.endswith(kept)


def put(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def letters(pre: str = "qwen2") -> dict[str, Any]:
    """Return the metadata of a tokenizer with thirteen tokens."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": LETTERS,
        "tokenizer.ggml.token_type": [1] * 10 + [3, 3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 10,
        "tokenizer.ggml.eos_token_id": 11,
    }


def llama3_factors(scaling: dict, dim: int) -> np.ndarray:
    """Return the divisor of each rotary frequency. scaling: with rope_theta; dim: the number of rotated features."""
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    found = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * scaling["rope_theta"] ** (i / dim)
        smooth = (length / wavelength - low) / (high - low)
        found.append(1 / ((1 - smooth) / factor + smooth) if 0 <= smooth <= 1 else 1 if smooth > 1 else factor)
    return np.array(found, np.float32)
