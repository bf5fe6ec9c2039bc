"""Every family's GGUF, written as converters do, loads as the checkpoint that it was made from."""

import families
import gguf_files
import mlx.core as mx
import numpy as np
import pytest
import tiny
from gguf_metadata import metadata

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.plan import Options
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
