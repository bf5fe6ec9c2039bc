"""Every family's GGUF, written as converters do, loads as the checkpoint that it was made from."""

import families
import gguf_files
import mlx.core as mx
import numpy as np
import pytest
import tiny
from drafters import EXPERTS, GQA, HEADLESS
from gguf_metadata import metadata
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.parameters import named

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
    """(directory, config, hub tensors) of a tiny checkpoint."""
    if name == "step3p5":
        config = {**tiny.CONFIG, "vocab_size": 13, "rope_scaling": None, "max_position_embeddings": 4096}
        weights = tiny.random_weights(config)
        return tiny.save(path, config, weights), config, weights
    directory, weights, _ = families.build(name, path)
    return directory, families.FAMILIES[name].config, weights


def written(name, path, config, weights, kind=gguf_files.KINDS.F32):
    arch, heads = WITH_HEADS[name]
    tokenizer = gguf_files.letters("glm4" if name.startswith("glm") else "qwen2")
    tensors = gguf_files.tensors_of(config, weights)
    return gguf_files.write(path, arch, metadata(arch, config, heads), tensors, kind, tokenizer=tokenizer)


PROMPT = np.random.default_rng(0).integers(0, 13, 20).tolist()


def drafted(model):
    """Tokens of a greedy text with drafts, their log-probabilities, and how many drafts were right."""
    stats = mlx_mtp.Stats()
    options = {"max_tokens": 8, "logprobs": True, "num_draft_tokens": min(3, model.max_draft_tokens), "adaptive": False}
    steps = list(mlx_mtp.generate_step(PROMPT, model, stats=stats, **options))
    return [token for token, _, _ in steps], np.stack([np.array(logits) for _, logits, _ in steps]), stats.acceptance


def same_parameters(ours, hub):
    ours, hub = named(ours), named(hub)
    assert ours.keys() == hub.keys()
    for path, w in hub.items():
        tolerance = 1e-6 if path.endswith("A_log") else 0
        assert np.allclose(np.array(ours[path]), np.array(w), rtol=tolerance, atol=tolerance), path


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


def dense(name, path):
    """(directory, config, architecture, tensors) of a tiny checkpoint of a family without heads."""
    arch, changes = DENSE[name]
    model_type = name if name in HEADLESS else arch
    config = {**GQA, "model_type": model_type, **changes}
    _, plain = families.headless(path, config)
    weights = {n: w.astype(mx.bfloat16).astype(mx.float32) for n, w in tree_flatten(plain.parameters())}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    directory = tiny.save(path, config, weights)
    return directory, config, arch, gguf_files.tensors_of(config, weights)


@pytest.mark.parametrize("name", DENSE)
def test_families_without_heads(name, tmp_path):
    directory, config, arch, tensors = dense(name, tmp_path / "hub")
    if config.get("rope_scaling") == LLAMA3:
        tensors["rope_freqs.weight"] = gguf_files.llama3_factors(config)
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, 0), tensors)
    transcode(prepare(file), tmp_path / "new")
    ours, hub = (mlx_mtp.load_model(path) for path in (tmp_path / "new", directory))
    same_parameters(ours, hub)
    (tokens, found, _), (expected, logits, _) = drafted(ours), drafted(hub)
    assert tokens == expected
    assert np.allclose(found, logits, atol=2e-5)


@pytest.mark.parametrize("name", WITH_HEADS)
def test_loads_as_the_checkpoint_it_was_made_from(name, tmp_path):
    directory, config, weights = checkpoint(name, tmp_path / "hub")
    file = written(name, tmp_path / "x.gguf", config, weights)
    transcode(prepare(file), tmp_path / "new")
    ours, hub = (mlx_mtp.load_model(path) for path in (tmp_path / "new", directory))
    same_parameters(ours, hub)
    (tokens, found, right), (expected, logits, rights) = drafted(ours), drafted(hub)
    assert (tokens, right) == (expected, rights)
    assert np.allclose(found, logits, atol=1e-5)
