"""Make tiny checkpoints of all families and the GGUF files that converters make of them."""

import families
import gguf
import gguf_files
import mlx.core as mx
import numpy as np
import tiny
from drafters import EXPERTS, GQA, HEADLESS
from gguf_metadata import metadata
from mlx.utils import tree_flatten

from mlx_mtp.checkpoint.gguf import header

WITH_HEADS = {
    "qwen3_5": ("qwen35", 1),
    "qwen3_5_moe": ("qwen35moe", 1),
    "qwen3_next": ("qwen3next", 1),
    "glm4_moe": ("glm4moe", 1),
    "glm4_moe_untied": ("glm4moe", 1),
    "deepseek_v3": ("deepseek2", 1),
    "glm4_moe_lite": ("deepseek2", 1),
    "glm_moe_dsa": ("glm-dsa", 1),
    "glm_moe_dsa_shared": ("glm-dsa", 1),
    "mimo_v2_flash": ("mimo2", 3),
    "nemotron_h": ("nemotron_h_moe", 1),
    "nemotron_h_latent": ("nemotron_h_moe", 1),
    "step3p5": ("step35", 3),
}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}


def checkpoint(name, path):
    """Return (directory, config, hub tensors) of a tiny checkpoint."""
    if name == "step3p5":
        config = {**tiny.CONFIG, "vocab_size": 13, "rope_scaling": None, "max_position_embeddings": 4096}
        weights = tiny.random_weights(config)
        return tiny.save(path, config, weights), config, weights
    directory, weights, _ = families.build(name, path)
    return directory, families.FAMILIES[name].config, weights


def written(name, path, config, weights, kind=gguf_files.KINDS.F32):
    """Write and return the GGUF file of a family with heads."""
    arch, heads = WITH_HEADS[name]
    tokenizer = gguf_files.letters("glm4" if name.startswith("glm") else "qwen2")
    tensors = gguf_files.tensors_of(config, weights)
    return gguf_files.write(path, arch, metadata(arch, config, heads), tensors, kind, tokenizer=tokenizer)


DENSE = {
    "llama": ("llama", {"rope_theta": 5e5}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5, "head_dim": 64, "tie_word_embeddings": True}),
    "yarn": ("qwen3", {"rope_scaling": YARN, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3moe", {"head_dim": 16, **EXPERTS}),
    "gemma3_text": ("gemma3", {**HEADLESS["gemma3_text"], "num_hidden_layers": 7, "tie_word_embeddings": True}),
}


def dense(name, path, **more):
    """Return (directory, config, architecture, tensors) of a tiny checkpoint of a family without heads."""
    arch, changes = DENSE[name]
    model_type = name if name in HEADLESS else arch
    config = {**GQA, "model_type": model_type, **changes, **more}
    _, plain = families.headless(path, config)
    weights = {n: w.astype(mx.bfloat16).astype(mx.float32) for n, w in tree_flatten(plain.parameters())}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    directory = tiny.save(path, config, weights)
    return directory, config, arch, gguf_files.tensors_of(config, weights)


def coded_file(folder):
    """Write and return a file of types without an MLX equivalent: Q6_K and IQ4_XS in rows of 256."""
    _, config, arch, tensors = dense("qwen3", folder / "hub", hidden_size=256, intermediate_size=256)
    known = metadata(arch, config, 0)
    rng, file = np.random.default_rng(0), folder / "x.gguf"
    writer = gguf.GGUFWriter(file, arch)
    for key, value in {**{f"{arch}.{k}": v for k, v in known.items()}, **gguf_files.letters()}.items():
        gguf_files.put(writer, key, value)
    for name, w in tensors.items():
        kind = gguf_files.KINDS.Q6_K if "ffn" in name else gguf_files.KINDS.IQ4_XS
        if gguf_files.is_matrix(name, w) and w.shape[-1] == 256:
            size = gguf.GGML_QUANT_SIZES[kind][1]
            raw = rng.integers(0, 256, (*w.shape[:-1], size), dtype=np.uint8)
            at = 208 if kind == gguf_files.KINDS.Q6_K else 0
            raw[..., at : at + 2] = np.float16(0.001).tobytes()[0], np.float16(0.001).tobytes()[1]
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, w)
    gguf_files.finish(writer)
    return file


def dequantized(file, path, kind=gguf_files.KINDS.F32):
    """Write the same file with every tensor dequantized to float32 by the gguf package, then quantized to `kind`."""
    contents, tensors = header.read(file), {}
    for name, entry in contents.tensors.items():
        blocks = gguf.quants.dequantize(np.array(entry.blocks()), gguf_files.KINDS[entry.kind])
        tensors[name] = blocks.reshape(entry.shape)
    arch = contents.metadata["general.architecture"]
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in contents.metadata.items()}
    own = {k.removeprefix(f"{arch}."): v for k, v in plain.items() if k.startswith(f"{arch}.")}
    tokenizer = {k: v for k, v in plain.items() if k.startswith("tokenizer.") and v != []}
    return gguf_files.write(path, arch, own, tensors, kind, tokenizer=tokenizer)
