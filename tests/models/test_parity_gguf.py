"""Compare GGUF files of random Hugging Face models with these models: PyTorch in float32, logits of every position.

The files are written as llama.cpp's converters do, from the tensors that transformers saves. Step-3.5 is in
`test_parity_transformers.py`, heads are in `test_parity_families.py`.
"""

import drafters
import families
import gguf_files
import mlx.core as mx
import nemotron
import numpy as np
import pytest
import qwen
from gguf_metadata import metadata

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")
pytest.importorskip("gguf", reason="GGUF files need mlx-mtp[gguf]")

TOLERANCE = 1e-4
TOKENS = np.random.default_rng(0).integers(0, 13, 30).tolist()
DENSE = {**drafters.GQA, "vocab_size": 13, "head_dim": 16}
QWEN2 = {**DENSE, "model_type": "qwen2", "head_dim": 8}
# mlx-lm's Gemma rounds the square root of the width to bfloat16; that of 64 is exact.
GEMMA = {**DENSE, **drafters.HEADLESS["gemma3_text"], "hidden_size": 64, "num_hidden_layers": 7}
GEMMA |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}
DEEPSEEK, NEMOTRON = {**families.DEEPSEEK, "num_nextn_predict_layers": 0}, {**nemotron.CONFIG, "norm_eps": 1e-5}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
OF_DEEPSEEK = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}
CASES = {
    "llama": ("llama", {**DENSE, "model_type": "llama"}),
    "biases": ("llama", {**DENSE, "model_type": "llama", "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {**DENSE, "model_type": "llama", "head_dim": 64, "rope_parameters": LLAMA3}),
    "mistral": ("llama", {**DENSE, "model_type": "mistral", "sliding_window": None}),
    "qwen2": ("qwen2", QWEN2),
    "tied": ("qwen2", {**QWEN2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**DENSE, "model_type": "qwen3"}),
    "yarn": ("qwen3", {**DENSE, "model_type": "qwen3", "rope_parameters": YARN}),
    "qwen3 with experts": ("qwen3moe", {**DENSE, **drafters.EXPERTS, "model_type": "qwen3_moe"}),
    "gemma3": ("gemma3", GEMMA),
    "gemma3, scaled": (
        "gemma3",
        {**GEMMA, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 1e4}}},
    ),
    "qwen3.5": ("qwen35", qwen.QWEN),
    "qwen3.5 with experts": ("qwen35moe", qwen.QWEN_MOE),
    "qwen3-next": ("qwen3next", qwen.NEXT),
    "glm-4.5": ("glm4moe", families.GLM),
    "glm-4.5, other switches": (
        "glm4moe",
        {**families.GLM, "use_qk_norm": False, "attention_bias": False, "n_group": 2, "norm_topk_prob": False},
    ),
    "deepseek": ("deepseek2", DEEPSEEK),
    "deepseek, scaled": ("deepseek2", {**DEEPSEEK, "rope_parameters": OF_DEEPSEEK}),
    "deepseek, not normalised": ("deepseek2", {**DEEPSEEK, "norm_topk_prob": False}),
    "whole queries": ("deepseek2", {**DEEPSEEK, "q_lora_rank": None}),
    "glm-4.7-flash": ("deepseek2", {**DEEPSEEK, "model_type": "glm4_moe_lite", "n_group": 1}),
    "glm-5": ("glm-dsa", {**families.GLM_DSA, "index_n_heads": 16}),
    "glm-5.2": (
        "glm-dsa",
        {**families.GLM_DSA, "index_n_heads": 16, "indexer_types": ["full", "shared", "full"]},
    ),
    "mimo-v2": ("mimo2", families.MIMO_V2),
    "nemotron": ("nemotron_h_moe", NEMOTRON),
    "latent experts": ("nemotron_h_moe", {**NEMOTRON, "moe_latent_size": 20}),
}
OF_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_hybrid_override_pattern")


def torch_model(config: dict):
    """Return transformers' random model of a released config.json, without heads."""
    text = {n: v for n, v in gguf_files.text_of(config).items() if n not in (*OF_HEADS, "text_config")}
    kind = config.get("text_config", config)["model_type"]
    if kind == "mimo_v2_flash":  # transformers' window does not count the position itself
        kinds = ["sliding_attention" if sliding else "full_attention" for sliding in text["hybrid_layer_pattern"]]
        text |= {"sliding_window_size": text["sliding_window_size"] - 1, "layer_types": kinds}
    text.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **text)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        biases = {name: w for name, w in model.named_buffers() if name.endswith("correction_bias")}
        for name, w in (dict(model.named_parameters()) | biases).items():
            drawn = torch.randn(w.shape, generator=generator)
            if "norm" in name:
                w.add_(0.1 * drawn)
            else:
                w.copy_(0.25 * (drawn.abs() if name in biases else drawn))
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path, name):
    arch, config = CASES[name]
    theirs = torch_model(config)
    theirs.save_pretrained(tmp_path / "saved")
    weights = {n: w for f in (tmp_path / "saved").glob("*.safetensors") for n, w in mx.load(str(f)).items()}
    tensors = gguf_files.tensors_of(config, weights)
    if (rope := config.get("rope_parameters", {})).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = gguf_files.llama3_factors(rope, config["head_dim"])
    tokenizer = gguf_files.letters("glm4" if config["model_type"].startswith("glm") else "qwen2")
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, 0), tensors, tokenizer=tokenizer)
    transcode(prepare(file), tmp_path / "new")
    ours = mlx_mtp.load_model(tmp_path / "new")
    found = ours.logits(ours.hidden(mx.array([TOKENS]), mlx_mtp.make_prompt_cache(ours).layers))
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits
    assert np.abs(np.array(found) - expected.numpy()).max() < TOLERANCE
