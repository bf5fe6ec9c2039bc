"""Load what transformers' `save_pretrained` writes: logits equal its own and those of the hub's older form.

Tiny random models of every family that both support. `hub_form` writes a config as transformers 4 did.
"""

import copy
import json

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny

import mlx_mtp

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")

V, LENGTH, TOLERANCE = 40, 24, 1e-4
BASE = {
    "hidden_size": 32, "vocab_size": V, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 123456.0}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
LOCAL = {"rope_type": "default", "rope_theta": 777.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 3e4}
MLA_YARN = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 3e4}  # fmt: skip
TWO = {"num_experts_per_tok": 2}
MOE = {**TWO, "moe_intermediate_size": 24}
SHARED = {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
          "topk_group": 1}  # fmt: skip
MLA = {**SHARED, "n_group": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
       "v_head_dim": 12, "num_key_value_heads": 4}  # fmt: skip
DELTA = {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4}  # fmt: skip
DELTA_MOE = {**DELTA, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}
MROPE = {**HALF, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
DSA = {**MLA, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 16}
ALTERNATE = ["sliding_attention", "full_attention"] * 2
WINDOWS = {"sliding_window": 6, "layer_types": ALTERNATE}
THIRD = {"partial_rotary_factor": 0.334}
# "family" or "family, variant": arguments of transformers' config.
CONFIGS = {
    "llama": {"rope_parameters": PLAIN, "attention_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_parameters": LINEAR},
    "llama, llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "llama, yarn": {"rope_parameters": YARN},
    "llama, yarn's attention_factor": {"rope_parameters": {**YARN, "attention_factor": 1.7}},
    "llama, yarn, not truncated": {"rope_parameters": {**YARN, "truncate": False}},
    "llama, yarn of one mscale": {"rope_parameters": {**YARN, "mscale": 0.5}},
    "llama, tied": {"rope_parameters": PLAIN, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    "mistral": {"rope_parameters": PLAIN, "sliding_window": None},
    "mistral, window": {"rope_parameters": PLAIN, "sliding_window": 6},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {"rope_parameters": YARN, "head_dim": 16},
    "qwen2_moe": {"rope_parameters": PLAIN, "num_experts": 4, "shared_expert_intermediate_size": 16, **MOE},
    "qwen3_moe": {"rope_parameters": YARN, "num_experts": 4, "head_dim": 16, **MOE},
    "qwen3_moe, dense": {"rope_parameters": PLAIN, "num_experts": 4, "mlp_only_layers": [1], "head_dim": 16, **MOE},
    "qwen3_next": {"rope_parameters": HALF, **DELTA_MOE},
    "qwen3_5_text": {"rope_parameters": MROPE, **DELTA},
    "qwen3_5_moe_text": {"rope_parameters": MROPE, **DELTA_MOE},
    "glm4_moe": {"rope_parameters": HALF, "head_dim": 16, "num_nextn_predict_layers": 0, **SHARED},
    "glm4_moe, yarn": {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "head_dim": 16,
                       "num_nextn_predict_layers": 0, **SHARED},
    "glm4_moe_lite": {"rope_parameters": PLAIN, **MLA, "n_group": 1},
    "deepseek_v2": {"rope_parameters": MLA_YARN, **MLA},
    "deepseek_v3": {"rope_parameters": MLA_YARN, "num_nextn_predict_layers": 0, **MLA},
    "deepseek_v3, one mscale": {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}, "num_nextn_predict_layers": 0,
                                **MLA},
    "deepseek_v32": {"rope_parameters": MLA_YARN, **DSA},
    "glm_moe_dsa": {"rope_parameters": PLAIN, **DSA},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, **WINDOWS, **MOE,
                      "rope_parameters": {"full_attention": PLAIN | THIRD, "sliding_attention": LOCAL | THIRD}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "ssm_state_size": 16,
                   "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "n_routed_experts": 4, "head_dim": 16,
                   "moe_shared_expert_intermediate_size": 24, **MOE},
    "gemma2": {"head_dim": 16, "rope_parameters": PLAIN, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWS,
                    "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    "olmo2": {"rope_parameters": YARN},
    "olmo3": {"rope_parameters": YARN, **WINDOWS},
    "olmoe": {"rope_parameters": PLAIN, "num_experts": 4, **TWO},
    "mixtral": {"rope_parameters": YARN, "num_local_experts": 4, "head_dim": 8, **TWO},
    "phi": {"rope_parameters": HALF},
    "phi3": {"rope_parameters": HALF},
    "phi3, longrope": {"original_max_position_embeddings": 8, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 3e4}},
    "stablelm": {"rope_parameters": HALF},
    "granite": {"rope_parameters": PLAIN, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "cohere": {"rope_parameters": PLAIN},
    "cohere2": {"rope_parameters": PLAIN, "head_dim": 8, **WINDOWS},
    "glm": {"rope_parameters": HALF, "head_dim": 16},
    "glm4": {"rope_parameters": HALF, "head_dim": 16},
    "smollm3": {"rope_parameters": PLAIN, "no_rope_layer_interval": 2},
    "exaone4": {"rope_parameters": PLAIN, "head_dim": 8, **WINDOWS},
    "seed_oss": {"rope_parameters": YARN, "head_dim": 16},
    "ernie4_5": {"rope_parameters": PLAIN, "head_dim": 16},
    "hunyuan_v1_dense": {"rope_parameters": PLAIN, "head_dim": 16},
    "dots1": {"rope_parameters": PLAIN, **SHARED},
    "helium": {"rope_parameters": PLAIN, "head_dim": 8},
    "ministral3": {"head_dim": 16, "rope_parameters": {**MLA_YARN, "mscale": 1.0, "llama_4_scaling_beta": 0.1}},
    "nemotron": {"rope_parameters": HALF},
}  # fmt: skip
SKIPPED = {
    "mimo": "transformers has no MiMo-7B",
    "gemma": "mlx-lm's model has the exact GELU where transformers approximates it by tanh",
    "starcoder2": "mlx-lm's model has the exact GELU where transformers approximates it by tanh",
    "gpt_neox": "mlx-lm's model approximates the GELU where transformers has the exact one",
    "gpt_oss": "mlx-lm reads its experts in MXFP4 only, which transformers does not write",
    "bitnet": "mlx-lm reads packed weights only, which transformers does not write",
    "apertus": "mlx-lm needs post_norm and qk_norm, which transformers does not write for a model of its own",
    "lfm2": "mlx-lm needs block_dim, which transformers does not write for a model of its own",
    "minimax_m2": "mlx-lm needs shared_intermediate_size, which transformers does not write for a model of its own",
    "step3p5": "transformers has it inside a vision model only: test_parity_transformers.py compares the logits",
}


def saved_by_transformers(name: str, path):
    """Save transformers' model at `path` with random weights, norms near one; return it and the saved config."""
    family, kind = name.split(",")[0], transformers.CONFIG_MAPPING[name.split(",")[0]]
    values = {**BASE, **copy.deepcopy(CONFIGS[name])}
    if family == "nemotron_h":  # one layer of each type
        del values["num_hidden_layers"]
    config = kind(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            draw = torch.randn_like(parameter)
            if "norm" in parameter_name:
                parameter.add_(0.1 * draw)
            else:
                parameter.copy_(draw * (0.25 if parameter.ndim > 1 else 0.1))
    model.save_pretrained(path)
    return model, path


def hub_form(config: dict) -> dict:
    """Return the config in transformers 4's form: theta, scaling and rotated part at the top level."""
    inside = config.get("rope_parameters")
    if not inside:
        return config
    outer = {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")}
    if "full_attention" in inside:
        outer["rope_local_base_freq"] = outer["swa_rope_theta"] = inside["sliding_attention"]["rope_theta"]
        inside = inside["full_attention"]
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in inside.items() if name not in (*own, "rope_type")}
    outer["rope_scaling"] = None if inside["rope_type"] == "default" else {**scaling, "type": inside["rope_type"]}
    return outer | {name: inside[name] for name in own if name in inside}


def logits(path) -> np.ndarray:
    """Return our model's logits [T, V] for a fixed sequence."""
    model, tokens = mlx_mtp.load_model(path, mtp=False, kernels="off"), mx.array([TOKENS])
    if not hasattr(model, "normed"):  # not a port
        return np.array(model(tokens)[0])
    return np.array(model.logits(model.hidden(tokens, mlx_mtp.make_prompt_cache(model).layers))[0])


TOKENS = np.random.default_rng(0).integers(0, V, LENGTH).tolist()
ONLY_NEW = (
    "glm_moe_dsa",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "ministral3",
    "nemotron_h",
)  # hub's form is the new one


@pytest.mark.parametrize("name", [*CONFIGS, *SKIPPED])
def test_a_saved_model_has_the_logits_of_transformers_and_of_the_hub_form(name, tmp_path):
    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    theirs, path = saved_by_transformers(name, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    ours = logits(path)
    assert ours.shape == expected.shape
    scale = max(1, np.abs(expected).max())
    assert np.abs(ours - expected).max() < TOLERANCE * scale * (2 if "gemma" in name else 1)
    if name not in ONLY_NEW:
        config = json.loads((path / "config.json").read_text())
        hub = hub_form(config)
        assert hub != config
        (path / "config.json").write_text(json.dumps(hub))
        assert np.array_equal(logits(path), ours)


def resaved(config: dict, path) -> dict:
    """Return the hub's config after transformers has saved it again."""
    (path / "config.json").write_text(json.dumps(config))
    transformers.AutoConfig.from_pretrained(path).save_pretrained(path)
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("name", [*families.FAMILIES, "step3p5"])
def test_the_hubs_config_saved_again_has_the_same_logits(name, tmp_path):
    """For every port with heads, including their tensors and the hub's names."""
    if name == "mimo":
        pytest.skip(SKIPPED[name])
    if name == "step3p5":
        config = tiny.CONFIG
        tiny.save(tmp_path, config, tiny.random_weights(config))
    else:
        config = families.FAMILIES[name].config
        families.build(name, tmp_path)
    tokens = mx.array([[t % config.get("text_config", config)["vocab_size"] for t in TOKENS]])

    def run():
        model = mlx_mtp.load_model(tmp_path, kernels="off")
        rows = model.hidden(tokens, (cache := mlx_mtp.make_prompt_cache(model)).layers)
        drafted = model.mtp[0](model.embed(tokens[:, 1:], 0), model.capture(rows)[:, :-1], cache.heads[0])
        return model.logits(rows), model.draft_logits(0, drafted)

    before = run()
    newer = resaved(config, tmp_path)
    assert newer != config
    if name == "mimo_v2_flash":  # transformers' window counts one position more
        newer["sliding_window"] = newer["sliding_window_size"]
    (tmp_path / "config.json").write_text(json.dumps(newer))
    for old, new in zip(before, run(), strict=True):
        assert mx.array_equal(old, new)
