"""Load every family's GGUF file, written as converters do: it equals the checkpoint of which it was made."""

import families
import gguf_files
import numpy as np
import pytest
import tiny
from gguf_metadata import metadata
from gguf_samples import DENSE, LLAMA3, WITH_HEADS, checkpoint, dense, written
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.plan import GGUFOptions
from mlx_mtp.checkpoint.parameters import named
from mlx_mtp.layers.blocks import is_blocks
from mlx_mtp.models.gguf.dense import factors
from mlx_mtp.models.gguf.meta import Meta
from mlx_mtp.models.gguf.table import FAMILIES

SIMPLER = ("qwen3_5", "glm4_moe_untied", "glm_moe_dsa", "nemotron_h")  # of others' kind
PROMPT = np.random.default_rng(0).integers(0, 13, 20).tolist()


def drafted(model):
    """Return the greedy tokens with drafts, their log-probabilities, and the number of accepted drafts."""
    stats = mlx_mtp.Stats()
    options = {
        "max_tokens": 4,
        "logprobs": True,
        "num_draft_tokens": min(3, model.max_draft_tokens),
        "adaptive": False,
    }
    steps = list(mlx_mtp.generate_step(PROMPT, model, stats=stats, **options))
    return [token for token, _, _ in steps], np.stack([np.array(logits) for _, logits, _ in steps]), stats.acceptance


def same_parameters(ours, hub):
    ours, hub = named(ours), named(hub)
    assert ours.keys() == hub.keys()
    for path, w in hub.items():
        tolerance = 1e-6 if path.endswith("A_log") else 0
        assert np.allclose(np.array(ours[path]), np.array(w), rtol=tolerance, atol=tolerance), path


@pytest.mark.parametrize("name", DENSE)
def test_families_without_heads(name, tmp_path):
    directory, config, arch, tensors = dense(name, tmp_path / "hub")
    if config.get("rope_scaling") == LLAMA3:
        scaling = {**LLAMA3, "rope_theta": config["rope_theta"]}
        tensors["rope_freqs.weight"] = gguf_files.llama3_factors(scaling, config["head_dim"])
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, 0), tensors)
    transcode(prepare(file), tmp_path / "new")
    ours, hub = (mlx_mtp.load_model(path, lazy=True) for path in (tmp_path / "new", directory))
    same_parameters(ours, hub)
    (tokens, found, _), (expected, logits, _) = drafted(ours), drafted(hub)
    assert tokens == expected
    assert np.allclose(found, logits, atol=2e-5)


@pytest.mark.parametrize("name", sampled([name for name in WITH_HEADS if name not in SIMPLER], WITH_HEADS))
def test_loads_as_the_checkpoint_it_was_made_from(name, tmp_path):
    directory, config, weights = checkpoint(name, tmp_path / "hub")
    file = written(name, tmp_path / "x.gguf", config, weights)
    transcode(prepare(file), tmp_path / "new")
    ours, hub = (mlx_mtp.load_model(path, lazy=True) for path in (tmp_path / "new", directory))
    same_parameters(ours, hub)
    (tokens, found, right), (expected, logits, rights) = drafted(ours), drafted(hub)
    assert (tokens, right) == (expected, rights)
    assert np.allclose(found, logits, atol=1e-5)


def test_heads_that_the_metadata_count_and_the_file_lacks(tmp_path):
    """Converters count the heads of config.json, also for a fine-tune that was saved without them."""
    _, config, weights = checkpoint("glm4_moe", tmp_path / "hub")
    layers = config["num_hidden_layers"]
    weights = {name: w for name, w in weights.items() if f"layers.{layers}." not in name}
    transcode(prepare(written("glm4_moe", tmp_path / "x.gguf", config, weights)), tmp_path / "new")
    model = mlx_mtp.load_model(tmp_path / "new")
    assert (len(model.layers), len(model.mtp)) == (layers, 0)


@pytest.mark.parametrize("padded", [True, False])
def test_rotary_factors_of_step(padded):
    """Of the 64 features of 128 that full attention rotates; older converters compute them as if of all 128."""
    released = {**tiny.CONFIG["rope_scaling"], "rope_theta": 5e6}
    found = gguf_files.llama3_factors(released, 64 if padded else 128)
    values = {"rope_freqs.weight": np.concatenate([found, np.ones(64 - len(found), np.float32)])}
    scaling = factors(Meta("x.gguf", values, {}), 5e6, 64)["rope_scaling"]
    assert scaling == tiny.CONFIG["rope_scaling"]


@pytest.mark.parametrize(("arch", "normed"), [("deepseek2", False), ("glm-dsa", False), ("mimo2", True)])
def test_unstated_normalisation_is_llama_cpps(arch, normed):
    name = {"deepseek2": "deepseek_v3", "glm-dsa": "glm_moe_dsa", "mimo2": "mimo_v2_flash"}[arch]
    values = {"general.architecture": arch}
    values |= {f"{arch}.{k}": v for k, v in metadata(arch, families.FAMILIES[name].config, 0).items()}
    values.pop(f"{arch}.expert_weights_norm", None)
    meta = Meta("x.gguf", values, {"token_embd.weight": (13, 32)})
    assert FAMILIES[arch].config(meta)["norm_topk_prob"] is normed


PACKED = ("deepseek_v3", "qwen3_5_moe", "step3p5")  # with products per head, with columns in another order, experts


@pytest.mark.parametrize("name", sampled(PACKED[1:2], WITH_HEADS))
def test_packed_types_decode_as_transcoded_ones(name, tmp_path):
    """The heads', too; all weights are exact in both."""
    _, config, weights = checkpoint(name, tmp_path / "hub")
    file = written(name, tmp_path / "x.gguf", config, weights, gguf_files.KINDS.IQ4_NL)
    for plan in ("packed", "affine"):
        transcode(prepare(file, GGUFOptions(plan=plan, float32=True)), tmp_path / plan)
    ours, theirs = (mlx_mtp.load_model(tmp_path / plan, lazy=True) for plan in ("packed", "affine"))
    kinds = {type(module).__name__ for module in ours.modules() if is_blocks(module)}
    assert {"BlockLinear"} < kinds
    assert not any(is_blocks(module) for module in theirs.modules())
    (tokens, found, right), (expected, logits, rights) = drafted(ours), drafted(theirs)
    assert (tokens, right) == (expected, rights)
    assert np.allclose(found, logits, atol=1e-5)


def test_a_parameter_of_tensors_of_several_types(tmp_path):
    _, config, weights = checkpoint("qwen3_next", tmp_path / "hub")
    arch, heads = WITH_HEADS["qwen3_next"]
    tensors = gguf_files.tensors_of(config, weights)
    kinds = {"blk.0.attn_qkv.weight": gguf_files.KINDS.Q8_0, "blk.0.attn_gate.weight": gguf_files.KINDS.Q4_0}
    assert kinds.keys() <= tensors.keys()
    known = metadata(arch, config, heads)
    file = gguf_files.write(tmp_path / "x.gguf", arch, known, tensors, kinds=kinds)
    transcode(prepare(file, measure=True), tmp_path / "new")
    assert mlx_mtp.load_model(tmp_path / "new").mtp


def test_keys_and_values_in_one_tensor(tmp_path):
    """Older DeepSeek files contain `attn_kv_b` as one tensor."""
    directory, config, weights = checkpoint("deepseek_v3", tmp_path / "hub")
    arch, heads = WITH_HEADS["deepseek_v3"]
    tensors = gguf_files.tensors_of(config, weights)
    for layer in range(config["num_hidden_layers"] + heads):
        k, v = (tensors.pop(f"blk.{layer}.attn_{n}_b.weight") for n in "kv")
        whole = np.concatenate([k.swapaxes(1, 2), v], axis=1)
        tensors[f"blk.{layer}.attn_kv_b.weight"] = whole.reshape(-1, whole.shape[-1])
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, heads), tensors)
    transcode(prepare(file), tmp_path / "new")
    same_parameters(*(mlx_mtp.load_model(path, lazy=True) for path in (tmp_path / "new", directory)))


def test_fused_experts_and_projections(tmp_path):
    """Some files join gate and up projections, and older Qwen3-Next files keep the released projection."""
    directory, config, weights = checkpoint("qwen3_next", tmp_path / "hub")
    arch, heads = WITH_HEADS["qwen3_next"]
    tensors = gguf_files.tensors_of(config, weights)
    for layer in range(config["num_hidden_layers"] + heads):
        parts = [tensors.pop(f"blk.{layer}.ffn_{n}_exps.weight") for n in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
        if tensors.pop(f"blk.{layer}.attn_qkv.weight", None) is not None:
            del tensors[f"blk.{layer}.attn_gate.weight"]
            name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
            tensors[f"blk.{layer}.ssm_in.weight"] = np.array(weights[name])
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, heads), tensors)
    transcode(prepare(file), tmp_path / "new")
    same_parameters(*(mlx_mtp.load_model(path, lazy=True) for path in (tmp_path / "new", directory)))
