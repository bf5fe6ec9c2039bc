"""Check that every spelling of a config.json gives the same arguments, and that unread keys are named."""

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import families
import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import portless
import published
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE
from sweep import sampled
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mlx_mtp
from mlx_mtp.bench.random_model import shaped_model
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.files import checked_config, read_config
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.decoding.memory_needs import stated_positions
from mlx_mtp.models import REMAPPED, field_names, find_family, find_port, text_args
from mlx_mtp.models.config.names import SPELLINGS
from mlx_mtp.models.config.normalize import normalize, with_overrides
from mlx_mtp.models.config.rope_modules import apply_rope

GQA = {
    "hidden_size": 32, "vocab_size": 13, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 5e5,
    "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
           "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
CONFIGS = {
    "llama": {**GQA, "model_type": "llama", "rope_scaling": LLAMA3},
    "mistral": {**GQA, "model_type": "mistral", "sliding_window": 6},
    "qwen2": {**GQA, "model_type": "qwen2", "rope_scaling": YARN},
    "qwen3": {**GQA, "model_type": "qwen3", "head_dim": 16, "rope_scaling": YARN},
    "qwen3_moe": {**GQA, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 16, "rope_scaling": YARN},
    "mimo": {**GQA, "model_type": "mimo", "num_nextn_predict_layers": 1},
    "deepseek_v3": {**families.DEEPSEEK, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "glm4_moe": {**families.GLM, "rope_scaling": LINEAR},
    "glm4_moe_lite": families.FAMILIES["glm4_moe_lite"].config,
    "phi3": {**GQA, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma": {**GQA, "model_type": "gemma", "head_dim": 16, "rope_scaling": LINEAR},
    "gpt_oss": {**portless.CONFIGS["gpt_oss"], "rope_scaling": {**YARN, "truncate": False}},
}
NEXT = families.FAMILIES["qwen3_next"].config
CONFIGS["qwen3_next"] = {**NEXT, **{"rope_theta": 5e5, "partial_rotary_factor": 0.5}}
CONFIGS["qwen3_next"].pop("rope_parameters", None)
MOVED = ("rope_theta", "partial_rotary_factor")  # transformers 5 moves them into rope_parameters


def as_transformers_5(config: dict, kind: str | None = "rope_type") -> dict:
    """Return the config with its rotary embeddings in `rope_parameters`, whose type is called `kind`."""
    config = dict(config)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    inside = {name: value for name, value in scaling.items() if name not in ("type", "rope_type")}
    if kind:
        inside[kind] = scaling.get("type") or scaling["rope_type"]
    inside |= {name: config.pop(name) for name in MOVED if name in config}
    return {**config, "rope_parameters": inside}


def model_of(config: dict):
    """Return the family's model, unevaluated, with its rotary embeddings set up as by a load."""
    normal = normalize(config)
    normal.check("config.json")
    family = find_family(config)
    model = family.Model(family.ModelArgs.from_dict(copy.deepcopy(normal.config)))
    apply_rope(model, normal.config)
    return model


def rotations(config: dict) -> list[tuple]:
    """Return the parameters of each rotary module of the model."""
    found = []
    for path, module in model_of(config).named_modules():
        if type(module).__name__.endswith("RoPE"):
            facts = {n: v for n, v in vars(module).items() if isinstance(v, int | float | bool)}
            freqs = getattr(module, "_freqs", None)
            found.append((path, type(module), facts, None if freqs is None else freqs.tolist()))
    assert found
    return found


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_embeddings_saved_by_transformers_5(name, kind):
    hub = CONFIGS[name]
    expected, newer = rotations(hub), as_transformers_5(hub, kind)
    assert rotations(newer) == expected
    agreeing = {**newer, **{n: hub[n] for n in (*MOVED, "rope_scaling") if n in hub}}
    assert rotations(agreeing) == expected
    assert rotations({**newer, "rope_theta": 17.0}) == expected, "rope_parameters override the top level"
    assert rotations({**newer, "rope_theta": None, "rope_scaling": None}) == expected
    assert rotations(normalize(newer).config) == expected, "normalising twice is normalising once"


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_maximum_context_is_read(name):
    """Also from `text_config`."""
    config = copy.deepcopy(families.FAMILIES[name].config)
    config.get("text_config", config)["max_position_embeddings"] = 777
    assert stated_positions(SimpleNamespace(args=find_port(config).ModelArgs.from_dict(config))) == 777


@pytest.mark.parametrize("name", CONFIGS)
def test_theta_scaling_and_rotated_part_are_applied(name):
    """Changing any value changes the model."""
    hub = CONFIGS[name]
    before = rotations(hub)
    changes = [{"rope_theta": 123.0}]
    if hub.get("rope_scaling"):
        changes += [{"rope_scaling": {**hub["rope_scaling"], "factor": 3.0}}, {"rope_scaling": None}]
    if "partial_rotary_factor" in hub:
        changes += [{"partial_rotary_factor": 1.0}]
    for change in changes:
        for write in (dict, as_transformers_5):
            assert rotations(write({**hub, **change})) != before, change


def test_scaling_is_applied_to_models_that_ignore_it():
    """mlx-lm's models of these families read `rope_scaling` but rotate without it."""
    for name in ("qwen3_moe", "glm4_moe"):
        for scaling, kind in ((YARN, YarnRoPE), (LLAMA3, Llama3RoPE), (LINEAR, nn.RoPE)):
            of_layers = [found for _, found, _, _ in rotations({**CONFIGS[name], "rope_scaling": scaling})]
            assert set(of_layers) == {kind}
            assert len(of_layers) == CONFIGS[name]["num_hidden_layers"]


def test_types_of_layers():
    sliding = {"rope_type": "default", "rope_theta": 900.0}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    scaled = {**LINEAR, "rope_theta": 7e5}
    per_layer = {"layer_types": kinds, "rope_parameters": {"full_attention": scaled, "sliding_attention": sliding}}
    gemma = {**GQA, "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16}
    hub = {**gemma, "rope_theta": 7e5, "rope_local_base_freq": 900.0, "sliding_window_pattern": 3}
    hub |= {"rope_scaling": LINEAR}
    newer = {name: value for name, value in gemma.items() if name != "rope_theta"} | per_layer
    assert rotations(newer) == rotations(hub)
    mimo = families.MIMO_V2
    part = {"rope_type": "default", "partial_rotary_factor": mimo["partial_rotary_factor"]}
    inside = {
        "full_attention": {**part, "rope_theta": mimo["rope_theta"]},
        "sliding_attention": {**part, "rope_theta": mimo["swa_rope_theta"]},
    }
    unsupported = ("rope_theta", "swa_rope_theta", "partial_rotary_factor")
    newer = {name: value for name, value in mimo.items() if name not in unsupported} | {"rope_parameters": inside}
    assert rotations(newer) == rotations(mimo)
    flat = {**CONFIGS["llama"], "rope_scaling": None}
    both = {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    assert rotations({**flat, "rope_parameters": both}) == rotations(flat)
    both["sliding_attention"]["rope_theta"] = 17.0
    with pytest.raises(ValueError, match=r"sliding_attention\.rope_theta=17\.0: this changes the model's output"):
        rotations({**flat, "rope_parameters": both})
    both["sliding_attention"] |= {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=r"sliding_attention\.partial_rotary_factor=0\.5: this changes the model's"):
        rotations({**flat, "rope_parameters": both})
    both = {"full_attention": {**LLAMA3, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    with pytest.raises(ValueError, match="scales layers of every type alike"):
        rotations({**flat, "rope_parameters": both})


def test_a_step_config_with_values_per_layer_type():
    """transformers writes Step-3.5's per-layer lists as values per layer type."""
    hub = {**tiny.CONFIG, "layer_types": ["full_attention", *["sliding_attention"] * 6]}
    newer = {name: value for name, value in hub.items() if name not in (
        "rope_theta", "rope_scaling", "partial_rotary_factors", "yarn_only_types", "attention_other_setting",
        "moe_layers_enum", "moe_num_experts", "moe_top_k", "num_attention_groups",
    )}  # fmt: skip
    newer |= {
        "layer_types": hub["layer_types"][:4],
        "mtp_layer_types": hub["layer_types"][4:],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_sliding_attention_heads": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "full_attention": {**hub["rope_scaling"], "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    }
    assert rotations(newer) == rotations(hub)
    assert not normalize(newer).unread
    shapes = [{path: w.shape for path, w in tree_flatten(model_of(c).parameters())} for c in (newer, hub)]
    assert shapes[0] == shapes[1]


def arguments(config: dict) -> dict:
    """Return the family's arguments; for a wrapper those of its text model."""
    normal = normalize(config).config
    family = find_family(config)
    text = normal.get("text_config") or normal
    return dataclasses.asdict(text_args(family, text).from_dict(text))


SPELLED = [CONFIGS[name] for name in ("llama", "qwen3_moe", "deepseek_v3", "mimo")]
SPELLED += [families.MIMO_V2, tiny.CONFIG, *portless.CONFIGS.values()]


@pytest.mark.parametrize("config", SPELLED, ids=lambda config: config["model_type"])
def test_every_spelling(config):
    read, tried = field_names(text_args(find_family(config), config)), 0
    expected, unread = arguments(config), normalize(config).unread
    for group in SPELLINGS:
        ours = [name for name in group if config.get(name) is not None]
        if len(ours) != 1 or ours[0] not in read:
            continue
        for other in group:
            if other not in read and other not in config:
                renamed = {other if name == ours[0] else name: value for name, value in config.items()}
                assert arguments(renamed) == expected, other
                assert arguments({**renamed, ours[0]: None}) == expected, other
                assert normalize(renamed).unread == unread
                assert not normalize(renamed).unsupported
                tried += 1
    assert tried > 10


def test_null_is_replaced_by_its_derived_value():
    config = CONFIGS["qwen3_moe"]
    assert arguments({**config, "head_dim": None})["head_dim"] == 8
    assert arguments({**config, "num_key_value_heads": None})["num_key_value_heads"] == 4
    cohere = {**GQA, "model_type": "cohere2", "head_dim": 8}
    assert arguments({**cohere, "sliding_window": None})["sliding_window"] == 64
    assert arguments({**cohere, "layer_norm_eps": None}) == arguments(cohere)


def test_patterns_of_layers():
    dense = ["dense", "sparse", "sparse", "sparse"]
    moe = {**CONFIGS["qwen3_moe"], "mlp_only_layers": None}
    assert arguments({**moe, "mlp_layer_types": dense})["mlp_only_layers"] == [0]
    assert arguments({**CONFIGS["deepseek_v3"], "q_lora_rank": None})["q_lora_rank"] is None  # not the default
    deepseek = {**CONFIGS["deepseek_v3"], "num_hidden_layers": 4, "first_k_dense_replace": None}
    assert arguments({**deepseek, "mlp_layer_types": dense})["first_k_dense_replace"] == 1
    full = ["linear_attention", "full_attention"] * 2
    assert arguments({**NEXT, "full_attention_interval": None, "layer_types": full})["full_attention_interval"] == 2
    exaone = {**GQA, "model_type": "exaone4", "head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    assert arguments({**exaone, "layer_types": kinds})["sliding_window_pattern"] == "LGLG"
    uneven = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    gemma = {**GQA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 6}
    for stated in ({"sliding_window_pattern": 2}, {"sliding_window_pattern": None}, {}):
        assert "layer_types" in normalize({**gemma, "layer_types": uneven, **stated}).unsupported[0]


def test_a_text_model_in_a_wrapper():
    hub = families.FAMILIES["qwen3_5"].config
    text = hub["text_config"]
    faster = {**text["rope_parameters"], "rope_theta": 3.0}
    for change in ({"tie_word_embeddings": True}, {"rope_parameters": faster}):
        assert arguments({**hub, "text_config": text | change}) != arguments(hub)
    plain = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    wrapped = {**hub, "text_config": plain, "tie_word_embeddings": True, "dtype": "bfloat16"}
    assert arguments(wrapped)["tie_word_embeddings"] is True
    assert normalize(wrapped).config["torch_dtype"] == "bfloat16"
    strange = normalize({**hub, "frobnicate": 1, "text_config": {**text, "whatever": 2}})
    assert strange.unread == ["text_config.whatever", "frobnicate"]


HARMLESS = {
    "architectures": ["X"], "torch_dtype": "bfloat16", "dtype": "bfloat16", "use_cache": True, "bos_token_id": 1,
    "initializer_range": 0.02, "attention_dropout": 0.1, "transformers_version": "5.0", "auto_map": {"a": "b"},
    "eos_token_id": [1, 2], "pad_token_id": None, "output_router_logits": False, "router_aux_loss_coef": 0.1,
    "id2label": {"0": "a"}, "_name_or_path": "x", "pretraining_tp": 1, "vision_config": {"a": 1},
    "hidden_act": "silu", "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2,
    "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": "b"},
    "quantization_config": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "mimo", "glm4_moe", "deepseek_v3"])
def test_harmless_keys_are_silent_and_others_make_one_warning(name, tmp_path):
    config = {**CONFIGS[name], **HARMLESS}
    for unread in ([], ["frobnicate"], ["frobnicate", "gyre"]):
        normal = normalize(config | dict.fromkeys(unread, 3))
        assert (list(normal.unread), list(normal.unsupported)) == (unread, [])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        normal.warn(tmp_path / "config.json", 1)
    (warning,) = warned
    assert f"model_type '{name}': frobnicate, gyre; check" in str(warning.message)
    assert "\n" not in str(warning.message)


@pytest.mark.parametrize("plain", [False, True])
def test_a_load_and_a_conversion_each_warn_once(plain, tmp_path):
    strange = {"frobnicate": 3, "gyre": 4}
    config = {**(portless.CONFIGS["gpt_oss"] if plain else CONFIGS["qwen2"]), **strange}
    path, _ = families.headless(tmp_path / "model", config)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        mlx_mtp.load_model(path, mtp=False)
    assert ["frobnicate, gyre" in str(warning.message) for warning in warned] == [True]
    assert warned[0].filename == __file__
    if not plain:
        with pytest.warns(UserWarning, match="frobnicate, gyre"):
            convert(path, tmp_path / "new")
    facts = inspect_checkpoint(path)
    assert any("frobnicate, gyre" in warning for warning in facts.warnings)


REFUSED = [
    ("llama", {"hidden_act": "gelu"}),
    ("qwen2", {"hidden_act": "relu"}),
    ("qwen3", {"attn_logit_softcapping": 30.0}),
    ("llama", {"final_logit_softcapping": 30.0}),
    ("llama", {"logits_scaling": 8.0}),
    ("llama", {"residual_multiplier": 0.2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3_moe", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 4}),
    ("phi3", {"sliding_window": 4}),
    ("llama", {"rope_scaling": {"rope_type": "ntk-by-parts", "factor": 2.0}}),
    ("llama", {"rope_scaling": [1, 2]}),
    ("llama", {"num_local_experts": 8}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("qwen2", {"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 1.2}}),
]


@pytest.mark.parametrize(("name", "change"), REFUSED)
def test_unsupported_values_that_change_the_output_are_refused(name, change):
    with pytest.raises(ValueError, match=rf"^config\.json: .*{next(iter(change))}") as caught:
        model_of({**CONFIGS[name], **change})
    assert "\n" not in str(caught.value)
    harmless = dict.fromkeys(change)
    model_of({**CONFIGS[name], **harmless})


def test_a_refused_config_does_not_load_and_is_a_problem_for_inspect(tmp_path):
    path, _ = families.headless(tmp_path, CONFIGS["qwen2"])
    (path / "config.json").write_text(json.dumps({**CONFIGS["qwen2"], "logit_scale": 0.1}))
    with pytest.raises(ValueError, match=r"config\.json: logit_scale=0\.1: this changes the model's output"):
        mlx_mtp.load_model(path)
    facts = inspect_checkpoint(path)
    assert facts.family == "qwen2"
    assert any("logit_scale=0.1" in problem for problem in facts.problems)


@pytest.mark.parametrize("file", published.FILES, ids=lambda file: file.stem)
def test_released_configs_are_read_without_a_warning(file):
    config = published.read_config(file)
    if file.stem.startswith("eagle3-"):
        config = {name: value for name, value in config.items() if name != "draft_vocab_size"}
    normal = normalize(config)
    assert (normal.wrong, list(normal.unsupported), list(normal.unread)) == (None, [], [])
    assert normalize(normal.config).config == normal.config


# mlx-lm's Gemma 2 attends to all positions, which changes its output after 4,096 tokens.
WARNED = {"gemma2": ["sliding_window"]}
NO_TEXT = ("pixtral",)  # the config of a vision tower
ROOMS = (*mlx_lm.models.__path__, *mlx_mtp.models.__path__)
FAMILIES = {file.stem for room in ROOMS for file in Path(room).glob("*.py")}
KNOWN = sorted(name for name in {*CONFIG_MAPPING} - {*NO_TEXT} if REMAPPED.get(name, name) in FAMILIES)
USUAL = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "glm4_moe", "deepseek_v3")
USUAL += ("glm_moe_dsa", "mimo_v2_flash", "nemotron_h", "step3p7", "gemma2", "gemma3", "gpt_oss", "phi3", "mixtral")


@pytest.mark.parametrize("model_type", sampled(USUAL, KNOWN))
def test_defaults_of_transformers_are_read_without_a_warning(model_type):
    config = CONFIG_MAPPING[model_type]().to_json_string(use_diff=False)
    normal = normalize(json.loads(config, object_hook=untagged))
    assert (normal.wrong, list(normal.unsupported)) == (None, [])
    assert list(normal.unread) == WARNED.get(model_type, [])
    assert normalize(normal.config).config == normal.config


def untagged(found: dict):
    """Convert mlx-lm's representation of floats that JSON lacks."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_users_values_override_the_file(name):
    newer = as_transformers_5(CONFIGS[name])
    scaled = [{"rope_scaling": LINEAR}] if CONFIGS[name].get("rope_scaling") else []
    for change in ({"rope_theta": 11.0}, {"rope_scaling": None}, *scaled):
        assert rotations(with_overrides(newer, change)) == rotations({**CONFIGS[name], **change})


def test_overrides_of_a_load(tmp_path):
    hub = {**CONFIGS["qwen2"], "rope_scaling": None}
    path, _ = families.headless(tmp_path, hub)
    (path / "config.json").write_text(json.dumps(as_transformers_5(hub)))
    assert read_config(path, {"rope_theta": 9.0})["rope_theta"] == 9.0
    assert read_config(path)["rope_theta"] == 5e5


def test_bad_values_are_one_line(tmp_path):
    scalings = {"rope_type": ["yarn"]}, {**YARN, "attention_factor": "4"}
    bad = [{"rope_parameters": 3}, *({"rope_scaling": scaling} for scaling in scalings)]
    for change in bad:
        config = checked_config({**CONFIGS["llama"], **change}, tmp_path)
        assert config["model_type"] == "llama"
        with pytest.raises(ValueError, match=r"^config\.json: .*") as caught:
            model_of(config)
        assert "\n" not in str(caught.value)


def test_a_converted_config_is_read_by_mlx_lm(tmp_path):
    """Values inside `rope_parameters` are also written at the top level, under the names that mlx-lm reads."""
    hub = {**CONFIGS["qwen2"], "dtype": "float16"}
    path, _ = families.headless(tmp_path / "old", hub)
    (path / "config.json").write_text(json.dumps(as_transformers_5(hub)))
    convert(path, tmp_path / "new")
    family = find_family(hub)
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    args = family.ModelArgs.from_dict(written)
    assert (args.rope_theta, args.rope_scaling["factor"]) == (5e5, 4.0)
    weights = mx.load(str(tmp_path / "new" / "model.safetensors"))
    assert {w.dtype for w in weights.values()} == {mx.float16}


def test_yarn_frequencies_without_rounded_bounds():
    """GPT-OSS is released with `truncate: false`; MLX's module rounds."""
    changes = {}, {"truncate": False}
    rounded, exact = ({**CONFIGS["gpt_oss"], "rope_scaling": {**YARN, **change}} for change in changes)
    assert rotations(rounded) != rotations(exact)


def test_a_window_of_every_layer(tmp_path):
    """In Mistral every layer has a window; tokens equal those of a full forward pass with mlx-lm's mask."""
    config = CONFIGS["mistral"]
    path, _ = families.headless(tmp_path, {**config, "mlx_lm": "llama"})
    (path / "config.json").write_text(json.dumps(config))
    model = mlx_mtp.load_model(path)
    prompt = [i % 13 for i in range(1, 12)]
    expected = tiny.greedy(model, prompt, 12)
    assert [t for t, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=12)] == expected
    far = [[5, *prompt], [6, *prompt]]  # 4 layers with windows of 6 reach back 20 positions, one beyond the prompt
    rows = [model(mx.array([tokens]))[0] for tokens in far]
    assert not mx.allclose(rows[0][0], rows[1][0])
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": 2, "num_hidden_layers": 4}))
    short = mlx_mtp.load_model(path)
    rows = [short(mx.array([tokens]))[0, -1] for tokens in far]
    assert mx.array_equal(*rows), "four layers of two positions reach four back"


def test_a_random_model_from_a_transformers_5_config(tmp_path):
    hub = CONFIGS["glm4_moe"]
    found = []
    for config in (hub, as_transformers_5(hub)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        model, _ = shaped_model(tmp_path / "config.json", bits=16)
        ropes = [layer.self_attn.rope for layer in model.layers]
        found.append([(rope.dims, rope.base, rope.scale) for rope in ropes])
    assert found[0] == found[1] == [(8, 1e6, 0.5)] * 3
