"""Write tiny random checkpoints of every family by the hub's names, with mlx-lm's plain model of each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import nemotron
import numpy as np
import qwen
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models.deepseek_v32 import Indexer
from shapes import H, Shapes, V, ends, gqa, indexer, layer_norms, mla, mlp, moe, nextn


@dataclass(frozen=True)
class Family:
    """config.json, and the shapes of the trunk's and of the heads' tensors by their hub names."""

    config: dict
    trunk: Callable[[dict], Shapes]
    heads: Callable[[dict], Shapes]
    zero_centred: bool = False


def glm_layer(prefix: str, config: dict, dense: bool) -> Shapes:
    heads = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    attention = gqa(f"{prefix}.self_attn", *heads, bias=True, qk_norm=config["use_qk_norm"])
    inner = mlp(f"{prefix}.mlp", config["intermediate_size"]) if dense else moe(f"{prefix}.mlp", config)
    return attention | inner | layer_norms(prefix)


def mla_layer(prefix: str, config: dict, dense: bool) -> Shapes:
    inner = mlp(f"{prefix}.mlp", config["intermediate_size"]) if dense else moe(f"{prefix}.mlp", config)
    return mla(f"{prefix}.self_attn", config) | inner | layer_norms(prefix)


def dsa_layer(prefix: str, config: dict, dense: bool) -> Shapes:
    shapes, layer = mla_layer(prefix, config, dense), int(prefix.rpartition(".")[2])
    if "shared" in config.get("indexer_types", [])[layer : layer + 1]:
        return shapes
    return shapes | indexer(f"{prefix}.self_attn.indexer", config)


def share_indexers(plain, kinds: list[str]) -> None:
    """Make layers of mlx-lm's model, which lacks this, reuse the choice of the last indexer before them."""
    last = {}

    class Keeping(Indexer):
        def __call__(self, *args, **kwargs):
            last["chosen"] = super().__call__(*args, **kwargs)
            return last["chosen"]

    for layer, kind in zip(plain.layers, kinds, strict=True):
        if kind == "full":
            layer.self_attn.indexer.__class__ = Keeping
        else:
            layer.self_attn.indexer = lambda *_, **__: last["chosen"]


def nextn_family(config: dict, layer: Callable, *, own: bool = False) -> Family:
    """Return a family whose head is one more layer of the trunk's kind, numbered after it."""
    N, dense = config["num_hidden_layers"], config["first_k_dense_replace"]

    def trunk(config: dict) -> Shapes:
        shapes = ends()
        for i in range(N):
            shapes |= layer(f"model.layers.{i}", config, i < dense)
        return shapes

    def heads(config: dict) -> Shapes:
        return layer(f"model.layers.{N}", config, dense > N) | nextn(f"model.layers.{N}", own=own)

    return Family(config, trunk, heads)


SIZES = {"hidden_size": H, "vocab_size": V, "intermediate_size": 48, "moe_intermediate_size": 24}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GLM = {
    **SIZES,
    **EXPERTS,
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "attention_bias": True,
    "use_qk_norm": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    **SIZES,
    **EXPERTS,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
# Fewer positions than most of the tests' prompts have, so that some are dropped.
DSA = {**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 5, "index_n_heads": 4, "index_head_dim": 12}
GLM_DSA = {
    **DSA,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
MIMO = {
    "model_type": "mimo",
    "hidden_size": H,
    "vocab_size": V,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MIMO_V2 = {
    **SIZES,
    **EXPERTS,
    "model_type": "mimo_v2_flash",
    "n_shared_experts": None,
    "routed_scaling_factor": None,
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "sliding_window_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "partial_rotary_factor": 0.334,
    "attention_value_scale": 0.707,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "max_position_embeddings": 4096,
    "layernorm_epsilon": 1e-5,
}


def mimo_block(prefix: str, config: dict) -> Shapes:
    attention = gqa(f"{prefix}.self_attn", 4, 2, H // 4, bias=True)
    return attention | mlp(f"{prefix}.mlp", config["intermediate_size"]) | layer_norms(prefix)


def mimo_trunk(config: dict) -> Shapes:
    shapes = ends()
    for i in range(config["num_hidden_layers"]):
        shapes |= mimo_block(f"model.layers.{i}", config)
    return shapes


def mimo_heads(config: dict) -> Shapes:
    prefix = "model.mtp_layers.0"
    shapes = mimo_block(prefix, config) | {f"{prefix}.input_proj.weight": (H, 2 * H)}
    return shapes | {f"{prefix}.{n}_layernorm.weight": (H,) for n in ("token", "hidden", "final")}


def mimo_v2_layer(prefix: str, config: dict, sliding: bool) -> Shapes:
    kv = config["swa_num_key_value_heads" if sliding else "num_key_value_heads"]
    shapes = gqa(f"{prefix}.self_attn", 4, kv, 24, bias=False, v=16) | layer_norms(prefix)
    return shapes | ({f"{prefix}.self_attn.attention_sink_bias": (4,)} if sliding else {})


def mimo_v2_trunk(config: dict) -> Shapes:
    shapes = ends()
    for i, (sliding, sparse) in enumerate(zip(config["hybrid_layer_pattern"], config["moe_layer_freq"], strict=True)):
        shapes |= mimo_v2_layer(f"model.layers.{i}", config, bool(sliding))
        shapes |= moe(f"model.layers.{i}.mlp", config) if sparse else mlp(f"model.layers.{i}.mlp", 48)
    return shapes


def mimo_v2_heads(config: dict) -> Shapes:
    shapes: Shapes = {}
    for k in range(3):
        prefix = f"model.mtp.layers.{k}"
        block = mimo_v2_layer(prefix, config, True) | mlp(f"{prefix}.mlp", config["intermediate_size"])
        block[f"{prefix}.pre_mlp_layernorm.weight"] = block.pop(f"{prefix}.post_attention_layernorm.weight")
        shapes |= block | {f"{prefix}.{n}.weight": (H,) for n in ("enorm", "hnorm", "final_layernorm")}
        shapes[f"{prefix}.eh_proj.weight"] = (H, 2 * H)
    return shapes


FAMILIES = {
    "qwen3_next": Family(qwen.NEXT, qwen.next_trunk, qwen.next_heads, zero_centred=True),
    "qwen3_5": Family(qwen.QWEN, qwen.qwen_trunk, qwen.qwen_heads, zero_centred=True),
    "qwen3_5_moe": Family(qwen.QWEN_MOE, qwen.qwen_trunk, qwen.qwen_heads, zero_centred=True),
    "glm4_moe": nextn_family(GLM, glm_layer, own=True),
    "glm4_moe_untied": nextn_family({**GLM, "use_qk_norm": False, "num_hidden_layers": 2}, glm_layer),
    "deepseek_v3": nextn_family(DEEPSEEK, mla_layer, own=True),
    "glm4_moe_lite": nextn_family({**DEEPSEEK, "model_type": "glm4_moe_lite", "n_group": 1}, mla_layer, own=True),
    "deepseek_v32": nextn_family(DSA, dsa_layer, own=True),
    "glm_moe_dsa": nextn_family(GLM_DSA, dsa_layer, own=True),
    "glm_moe_dsa_shared": nextn_family({**GLM_DSA, "indexer_types": ["full", "shared", "full"]}, dsa_layer),
    "mimo": Family(MIMO, mimo_trunk, mimo_heads),
    "mimo_v2_flash": Family(MIMO_V2, mimo_v2_trunk, mimo_v2_heads),
    "nemotron_h": Family(nemotron.CONFIG, nemotron.trunk, nemotron.heads),
    "nemotron_h_latent": Family(nemotron.LATENT, nemotron.trunk, nemotron.heads),
}


def random_weights(
    shapes: Shapes, seed: int, *, zero_centred: bool = False, scale: float = 0.25
) -> dict[str, mx.array]:
    """Return normal random weights; norms are near one (zero if `zero_centred`, except those of recurrent layers).

    Correction biases are positive, as in the released checkpoints.
    """
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> mx.array:
        values = rng.standard_normal(shape)
        if "norm" in name:
            values = 0.1 * values + (not zero_centred or name.endswith("linear_attn.norm.weight"))
        else:
            values = scale * values
        values = np.abs(values) if name.endswith("correction_bias") else values
        return mx.array(values.astype(np.float32))

    return {name: draw(name, shape) for name, shape in shapes.items()}


def build(name: str, path: Path, seed: int = 0, **changes):
    """Return (checkpoint directory, its tensors, mlx-lm's plain model of the trunk)."""
    family = FAMILIES[name]
    config = {**family.config, **changes}
    trunk = random_weights(family.trunk(config), seed, zero_centred=family.zero_centred)
    weights = trunk | random_weights(family.heads(config), seed + 1000, zero_centred=family.zero_centred)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    plain = module.Model(module.ModelArgs.from_dict(config))
    if "indexer_types" in config:
        share_indexers(plain, config["indexer_types"])
    plain.load_weights(list(plain.sanitize(dict(trunk)).items()))
    return tiny.save(path, config, weights), weights, plain


def headless(path: Path, config: dict, seed: int = 0):
    """Return (checkpoint directory, mlx-lm's model) for a config of any family of mlx-lm's, in mlx-lm's names."""
    module = importlib.import_module(f"mlx_lm.models.{config.get('mlx_lm', config['model_type'])}")
    plain = module.Model(module.ModelArgs.from_dict(config))
    shapes = {name: array.shape for name, array in tree_flatten(plain.parameters())}
    weights = random_weights(shapes, seed)
    plain.load_weights(list(weights.items()))
    return tiny.save(path, config, weights), plain
