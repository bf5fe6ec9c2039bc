"""Write tiny random checkpoints of mlx-lm's wrappers of a language model, in the layouts that exist."""

import copy
import importlib
import json
from pathlib import Path

import families
import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import qwen
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

from mlx_mtp.models import port_names

SIZES = {
    "hidden_size": 32, "vocab_size": families.V, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
EXPERTS |= {"moe_intermediate_size": 24, "norm_topk_prob": True}
DEEPSEEK = {name: value for name, value in families.DEEPSEEK.items() if name != "num_nextn_predict_layers"}
# Each wrapper's text_config, by model_type: its language model has a port.
TEXTS = {
    "gemma3": {**SIZES, **GEMMA},
    "kimi_k25": DEEPSEEK,
    "kimi_vl": {name: value for name, value in DEEPSEEK.items() if name != "model_type"},
    "mistral3": {**SIZES, "model_type": "mistral"},
    "pixtral": {**SIZES, "model_type": "mistral"},
    "qwen2_vl": {
        **SIZES,
        "model_type": "qwen2_vl_text",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
    "qwen3_vl": {**SIZES, "model_type": "qwen3_vl_text", "tie_word_embeddings": True},
    "qwen3_vl_moe": {**SIZES, **EXPERTS, "model_type": "qwen3_vl_moe_text"},
}
# Text configs of wrappers whose language model has none.
WITHOUT = {
    "mistral3": {
        **SIZES, "model_type": "ministral3",
        "rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    "lfm2-vl": {
        **SIZES, "model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32,
        "block_ff_dim": 48, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3],
    },
    "gemma4": {},
}  # fmt: skip
TOWERS = {"vision_tower.blocks.0.weight": (3, 3), "multi_modal_projector.weight": (3,), "visual.x.bias": (3,)}


def nested(name: str) -> str:
    """Return the name of a language model's tensor in transformers' files since version 4.52."""
    name = name.replace("language_model.model.", "model.language_model.")
    return name.replace("language_model.lm_head", "lm_head")


def bare(name: str) -> str:
    """Return the name of a language model's tensor in files without a prefix."""
    return name.removeprefix("language_model.")


# How the tensors of a language model and those of towers are named.
LAYOUTS = {"mlx-lm": (str, str), "nested": (nested, "model.{}".format), "bare": (bare, str)}


def families_with_text_config() -> list[str]:
    """Return the families of mlx-lm without a port of their own whose ModelArgs reads a text_config."""
    found = []
    for file in sorted(Path(mlx_lm.models.__path__[0]).glob("*.py")):
        if "text_config" in file.read_text() and file.stem not in port_names():
            args = importlib.import_module(f"mlx_lm.models.{file.stem}").ModelArgs
            found += [file.stem] if "text_config" in args.__dataclass_fields__ else []
    return found


def config_of(name: str, text: dict | None = None) -> dict:
    text = copy.deepcopy(TEXTS[name] if text is None else text)
    return {"model_type": name, "text_config": text, "vocab_size": families.V, "vision_config": {"depth": 1}}


def unfilled(config: dict):
    """Return mlx-lm's model of a config.json before loading."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))


def plain_model(config: dict):
    """Return mlx-lm's model of a config.json, and random weights, which it has, by name."""
    plain = unfilled(config)
    weights = families.random_weights({name: w.shape for name, w in tree_flatten(plain.parameters())}, 3)
    plain.load_weights(list(weights.items()))
    return plain, weights


def save(path: Path, config: dict, weights: dict[str, mx.array], layout: str = "mlx-lm") -> Path:
    """Write a checkpoint in a layout of LAYOUTS, with tensors of towers."""
    own, outer = LAYOUTS[layout]
    towers = {outer(name): mx.ones(shape) for name, shape in TOWERS.items()}
    return tiny.save(path, config, {own(name): w for name, w in weights.items()} | towers)


def build(name: str, path: Path, layout: str = "mlx-lm"):
    """Return (checkpoint directory, mlx-lm's model)."""
    config = config_of(name)
    plain, weights = plain_model(config)
    return save(path, config, weights, layout), plain


def quantize(plain, few: str) -> dict:
    """Quantize a model, its modules whose path contains `few` to 8 bits; return config.json's entry."""
    nn.quantize(plain, 32, 4, class_predicate=lambda path, m: _form(path, m, few))
    eights = [path for path, m in plain.named_modules() if getattr(m, "bits", None) == 8]
    return {"group_size": 32, "bits": 4} | {path: {"group_size": 32, "bits": 8} for path in eights}


def _form(path: str, module: nn.Module, few: str):
    fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
    return {"group_size": 32, "bits": 8 if few in path else 4} if fits else False


def hadamard_config() -> dict:
    """Return a config of `prism_hadamard_qwen35`, whose linear layers have 2 bits and, in part, rotated inputs."""
    text = {**qwen.QWEN_TEXT, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    text |= {"linear_value_head_dim": 64, "model_type": "qwen3_5_text", "num_hidden_layers": 2}
    text |= {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]}
    del text["mtp_num_hidden_layers"]
    language = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(text))
    modules = [
        {"path": path, "embedding": type(m) is nn.Embedding, "dtype": "float16", "block": width // 512 * 512}
        for path, m in language.named_modules()
        if type(m) in (nn.Linear, nn.Embedding) and (width := m.weight.shape[-1]) % 128 == 0
    ]
    return {
        "model_type": "prism_hadamard_qwen35", "schema_version": 2, "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"}, "modules": modules, "text_config": text,
    }  # fmt: skip


def hadamard_model(config: dict):
    """Return mlx-lm's model of `hadamard_config`, and random weights, which it has, by name."""
    plain = unfilled(config)
    rng, weights = np.random.default_rng(0), {}
    for name, w in tree_flatten(plain.parameters()):
        values = rng.standard_normal(w.shape) * 0.1 + ("norm" in name)
        if w.dtype == mx.uint32:
            weights[name] = mx.array(rng.integers(0, 2**32, w.shape, dtype=np.uint32))
        else:
            kept = np.float32 if name.endswith(("A_log", "signs")) else np.float16
            weights[name] = mx.array((np.sign(values) if name.endswith("signs") else values).astype(kept))
    plain.load_weights(list(weights.items()))
    return plain, weights


def rewritten(path: Path, **changes) -> Path:
    """Replace keys of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    return path
