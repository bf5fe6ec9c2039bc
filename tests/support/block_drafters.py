"""Write tiny random block drafters with the tensor names of the hub's, in each form of config.json."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import tiny

V, H = 13, 32
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "vocab_size": V,
    "block_size": 16,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
}
DFLASH2 = {
    **CONFIG,
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        **CONFIG["dflash_config"],
        **{"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
        **{"output_multiplier": 0.5, "input_embedding_scale": 2.0, "final_logit_softcapping": 20.0},
    },
}
DSPARK = {
    **CONFIG,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 15,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
ASSISTANT = {
    **{name: value for name, value in CONFIG.items() if name not in ("dflash_config", "rope_theta")},
    **CONFIG["dflash_config"],
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
LAYER = {name: CONFIG[name] for name in list(CONFIG)[1:13] if name != "block_size"}
LAYER |= {"layer_types": CONFIG["layer_types"], "sliding_window": 8}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 9,
    "block_size": 16,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": 5,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
}
KINDS = {"dflash": CONFIG, "dflash2": DFLASH2, "dspark": DSPARK, "assistant": ASSISTANT, "speculators": SPECULATORS}


def options(config: dict) -> dict:
    """All keys of a config at one level."""
    return {**config, **config.get("transformer_layer_config", {}), **config.get("dflash_config", {})}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    c = options(config)
    width, D, inner, vocab = c["hidden_size"], c["head_dim"], c["intermediate_size"], c["vocab_size"]
    taps = len(c.get("target_layer_ids") or c["aux_hidden_state_layer_ids"])
    first = ("encoder.fc", "encoder.output_norm_enc") if "muse" in c["model_type"] else ("fc", "hidden_norm")
    found = {f"{first[0]}.weight": (width, taps * width), f"{first[1]}.weight": (width,), "norm.weight": (width,)}
    two = "conv_group_size" in c
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}."
        found |= {f"{p}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        for name, heads in (("q", c["num_attention_heads"]), *((n, c["num_key_value_heads"]) for n in "kv")):
            found[f"{p}self_attn.{name}_proj.weight"] = (heads * D, width)
        found[f"{p}self_attn.o_proj.weight"] = (width, c["num_attention_heads"] * D)
        found |= {f"{p}self_attn.{name}_norm.weight": (D,) for name in "qk"}
        found |= {f"{p}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{p}mlp.down_proj.weight"] = (width, inner)
        for name in ("attention_conv", "mlp_conv") if two else ():
            taps, groups = c["conv_kernel_size"], width // c["conv_group_size"]
            found[f"{p}{name}.base_kernel"] = (2, taps, width)
            found[f"{p}{name}.kernel_projection.weight"] = (2 * taps * groups, width)
    if two:
        rank = c["selector_rank"]
        found |= {f"candidate_selector.{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
        found["candidate_selector.hidden_projection.weight"] = (rank, width)
    if rank := c.get("markov_rank"):
        found |= {"markov_head.markov_w1.weight": (vocab, rank)}
        found |= {"markov_head.markov_w2.weight": (c.get("draft_vocab_size", vocab), rank)}
    if c.get("enable_confidence_head"):
        found |= {"confidence_head.proj.weight": (1, width + rank), "confidence_head.proj.bias": (1,)}
    if c.get("draft_vocab_size", vocab) < vocab:
        found["lm_head.weight"] = (c["draft_vocab_size"], width)
    return found


def weights(config: dict, seed: int = 0) -> dict[str, mx.array]:
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        values = rng.standard_normal(shape)
        values = 1 + 0.1 * values if "norm" in name else 0.4 * values
        found[name] = mx.array(values.astype(np.float32))
    c = options(config)
    if "lm_head.weight" in found:
        known = np.sort(rng.choice(c["vocab_size"], c["draft_vocab_size"], replace=False))
        found["d2t"] = mx.array(known - np.arange(len(known)))
        found["t2d"] = mx.array(np.isin(np.arange(c["vocab_size"]), known))
    return found


def save(path: Path, config: dict, seed: int = 0) -> Path:
    return tiny.save(path, config, weights(config, seed))


def save_for(path: Path, kind: str, width: int, vocab: int) -> Path:
    """Write a drafter of a kind for a target of these sizes; its mask token is the last token."""
    config = {**KINDS[kind]}
    sizes = {"hidden_size": width, "vocab_size": vocab}
    if "transformer_layer_config" in config:
        config["transformer_layer_config"] = config["transformer_layer_config"] | sizes
        config["draft_vocab_size"] = min(vocab, 9)
    nested = {"mask_token_id": vocab - 1, "target_layer_ids": [0, 1]}
    if "dflash_config" in config:
        config["dflash_config"] = config["dflash_config"] | nested
    return save(path, {**config, **sizes, "mask_token_id": vocab - 1})
