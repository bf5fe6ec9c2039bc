"""Test PEFT adapters: logits equal those of weights W + scale * B A from numpy; other methods are refused."""

import json
import math
import re

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

import mlx_mtp
from mlx_mtp.checkpoint.load import _adapted, load_model

TOKENS = mx.array([[1, 2, 3, 4, 5, 6]])
BEGIN = "base_model.model."
BASE = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
DENSE = {
    "model_type": "llama",
    "hidden_size": 32,
    "vocab_size": 13,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(checkpoint directory, its config.json, its weights, its logits)"""
    path, plain = families.headless(tmp_path_factory.mktemp("base"), DENSE)
    weights = dict(mx.load(str(path / "model.safetensors")))
    return path, json.loads((path / "config.json").read_text()), weights, plain(TOKENS)


def pairs(weights: dict, names, rank=4, seed=0) -> dict:
    """Return an adapter for each named module: A [r, in] and B [out, r]."""
    generator = np.random.default_rng(seed)
    found = {}
    for name in names:
        size, width = weights[f"{name}.weight"].shape
        r = rank(name) if callable(rank) else rank
        found[f"{name}.lora_A.weight"] = generator.normal(size=(r, width)).astype(np.float32) * 0.3
        found[f"{name}.lora_B.weight"] = generator.normal(size=(size, r)).astype(np.float32) * 0.3
    return found


def save(path, config: dict, tensors: dict, begin=BEGIN, file="adapter_model.safetensors"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / file), {begin + name: mx.array(w) for name, w in tensors.items()})
    return str(path)


def merged(weights: dict, tensors: dict, scales: dict) -> dict:
    """Return the weights W + scale * B A of the modules in `scales`."""
    found = dict(weights)
    for name, scale in scales.items():
        delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"] * scale
        found[f"{name}.weight"] = weights[f"{name}.weight"] + mx.array(delta)
    return found


def modules(weights: dict, *kinds) -> list[str]:
    return [n.removesuffix(".weight") for n in weights if n.endswith(tuple(f"{kind}.weight" for kind in kinds))]


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Ignore the warnings about models without heads."""


def applied(base, tmp_path, config: dict, tensors: dict, scales: dict, **options) -> None:
    """Compare the logits of the adapted model with those of the model with merged weights."""
    path, text, weights, plain = base
    model = _adapted(load_model(path, lazy=True), save(tmp_path / "adapter", config, tensors, **options))
    merger = tiny.save(tmp_path / "merged", text, merged(weights, tensors, scales))
    expected = load_model(merger, lazy=True)(TOKENS)
    assert not mx.allclose(plain, expected, atol=1e-3)
    assert mx.allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-5)


def named(*kinds, layers=(0, 1, 2)) -> list[str]:
    inside = {"q_proj": "self_attn", "v_proj": "self_attn", "up_proj": "mlp", "down_proj": "mlp"}
    return [f"model.layers.{layer}.{inside[kind]}.{kind}" for layer in layers for kind in kinds]


ALL = named("q_proj", "down_proj")
RANKS = {"rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7}}
ALPHAS = {"alpha_pattern": {"q_proj": 1.5, "^model.layers.0.mlp.down_proj": 9}}


def rank_of(name: str) -> int:
    return 2 if "down_proj" in name else 7 if ".1." in name else 4


def alpha_of(name: str) -> float:
    return 1.5 if "q_proj" in name else 9 if ".0." in name else 6


# Changes of the config, each module's rank and alpha, and the selected modules.
SCALED = {
    "alpha / r": ({}, lambda n: 4, lambda n: 6),
    "without r and alpha": ({"r": ..., "lora_alpha": ...}, lambda n: 8, lambda n: 8),
    "ranks": (RANKS, rank_of, lambda n: 6),
    "alphas": (ALPHAS, lambda n: 4, alpha_of),
    "ranks and alphas": ({**RANKS, **ALPHAS}, rank_of, alpha_of),
}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("case", SCALED)
def test_ranks_and_scales(base, tmp_path, case, rslora):
    change, rank, alpha = SCALED[case]
    config = {name: value for name, value in {**BASE, **change, "use_rslora": rslora}.items() if value is not ...}
    weights = base[2]
    scales = {name: alpha(name) / (math.sqrt(rank(name)) if rslora else rank(name)) for name in ALL}
    applied(base, tmp_path, config, pairs(weights, ALL, rank), scales)


TARGETS = {
    "names": ({"target_modules": ["q_proj"]}, named("q_proj")),
    "ends of names": ({"target_modules": ["self_attn.q_proj", "1.mlp.down_proj"]}, [*named("q_proj"), ALL[3]]),
    "a regex": (
        {"target_modules": r".*\.[02]\.(self_attn|mlp)\.(q|down)_proj"},
        named("q_proj", "down_proj", layers=(0, 2)),
    ),
    "all": ({"target_modules": "all-linear"}, ALL),
    "none": ({"target_modules": None}, ALL),
    "layers": ({"layers_to_transform": [0, 2]}, named("q_proj", "down_proj", layers=(0, 2))),
    "a layer": ({"layers_to_transform": 1, "layers_pattern": "layers"}, named("q_proj", "down_proj", layers=(1,))),
    "another pattern": ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, [ALL[2], ALL[3]]),
    "excluded": ({"exclude_modules": ["down_proj"]}, named("q_proj")),
    "excluded by a regex": ({"exclude_modules": r".*\.0\..*"}, named("q_proj", "down_proj", layers=(1, 2))),
}


@pytest.mark.parametrize("case", TARGETS)
def test_which_modules_a_config_means(base, tmp_path, case, recwarn):
    change, names = TARGETS[case]
    tensors = pairs(base[2], ALL)
    applied(base, tmp_path, {**BASE, **change}, tensors, dict.fromkeys(names, 6 / 4))
    assert any("not used" in str(w.message) for w in recwarn) == (len(names) < len(ALL))


@pytest.mark.parametrize("begin", [BEGIN, "", "base_model.model.language_model."])
def test_prefixes_of_names(base, tmp_path, begin):
    """PEFT's prefix, none, and a vision wrapper's, whose vision adapters are not used."""
    tensors = pairs(base[2], ALL)
    applied(base, tmp_path, BASE, tensors, dict.fromkeys(ALL, 6 / 4), begin=begin)


def test_the_name_of_an_adapter_and_those_of_a_vision_tower(base, tmp_path, recwarn):
    tensors = pairs(base[2], ALL)
    stored = {name.replace(".weight", ".default.weight"): w for name, w in tensors.items()}
    for matrix in ("A", "B"):
        stored[f"model.visual.blocks.0.attn.q_proj.lora_{matrix}.weight"] = mx.ones((4, 4))
    path, text, weights, _ = base
    model = _adapted(load_model(path), save(tmp_path / "adapter", BASE, stored))
    expected = load_model(tiny.save(tmp_path / "merged", text, merged(weights, tensors, dict.fromkeys(ALL, 6 / 4))))
    assert mx.allclose(model(TOKENS), expected(TOKENS), rtol=1e-4, atol=1e-5)
    assert any("visual" in str(warning.message) for warning in recwarn)


def test_a_quantized_target_stays_quantized(base, tmp_path):
    """The product of the quantized weights, plus the adapter's in full precision."""
    path, text, weights, _ = base
    plain = families.headless(tmp_path / "again", DENSE)[1]
    plain, config = quantize_model(plain, text, 32, 4)
    small = dict(tree_flatten(plain.parameters()))
    path = tiny.save(tmp_path / "small", config, small)
    tensors = pairs(weights, ALL)
    model = _adapted(load_model(path), save(tmp_path / "adapter", BASE, tensors))
    assert "4-bit" in load_model(path).report.target_quantization
    stored = {
        n: mx.dequantize(small[f"{n}.weight"], small[f"{n}.scales"], small[f"{n}.biases"], 32, 4)
        for n in (name.removesuffix(".scales") for name in small if name.endswith(".scales"))
    }
    whole = weights | {f"{name}.weight": w for name, w in stored.items()}
    expected = load_model(tiny.save(tmp_path / "merged", text, merged(whole, tensors, dict.fromkeys(ALL, 6 / 4))))
    assert mx.allclose(model(TOKENS), expected(TOKENS), rtol=1e-3, atol=1e-4)
    assert all(module.linear.bits == 4 for name, module in model.named_modules() if name in ALL)


FAMILIES = {
    "glm4_moe": ["self_attn.q_proj", "mlp.down_proj", "mlp.experts.0.up_proj", "mlp.experts.2.down_proj"],
    "qwen3_5": ["self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.out_proj", "mlp.gate_proj"],
    "mimo": ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"],
    "deepseek_v3": ["self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.experts.1.gate_proj", "lm_head"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_ports(tmp_path, name):
    """Hub names, stacked experts and wrappers: output changes, and heads stay the same."""
    path, weights, _ = families.build(name, tmp_path / "base")
    model, text = load_model(path), json.loads((path / "config.json").read_text())
    layers = model.args.num_hidden_layers
    mine = [n for n in modules(weights, *FAMILIES[name]) if model.spec.locate(f"{n}.weight", layers) is None]
    assert len({n.rpartition(".")[2] for n in mine}) > 1
    tensors = pairs(weights, mine)
    config = {**BASE, "target_modules": sorted({n.rpartition(".")[2] for n in mine})}
    model = _adapted(model, save(tmp_path / "adapter", config, tensors))
    changed = merged(weights, tensors, dict.fromkeys(mine, 6 / 4))
    expected = load_model(tiny.save(tmp_path / "merged", text, changed))

    def steps(of, drafts):
        options = {"max_tokens": 4, "num_draft_tokens": drafts, "adaptive": False, "logprobs": True}
        return [(token, logprobs) for token, logprobs, _ in mlx_mtp.generate_step([1, 2, 3], of, **options)]

    ours, theirs = steps(model, 0), steps(expected, 0)
    assert [token for token, _ in ours] == [token for token, _ in steps(model, 1)] == [token for token, _ in theirs]
    assert all(mx.allclose(a, b, rtol=1e-3, atol=1e-4) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    plain = steps(load_model(path, lazy=True), 0)
    assert not mx.allclose(plain[0][1], theirs[0][1], atol=1e-2)


REFUSED = {
    "DoRA": ({"use_dora": True}, {}),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, {}),
    "trainable_token_indices": ({"trainable_token_indices": [1]}, {}),
    "target_parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, {}),
    "bias='all'": ({"bias": "all"}, {}),
    "lora_bias": ({"lora_bias": True}, {}),
    "layer_replication": ({"layer_replication": [[0, 2]]}, {}),
    "peft_type=IA3": ({"peft_type": "IA3"}, {}),
    "peft_type=ADALORA": ({"peft_type": "PeftType.ADALORA"}, {}),
    "init_lora_weights='pissa_niter_4'": ({"init_lora_weights": "pissa_niter_4"}, {}),
    "DoRA, use_dora": ({}, {"model.layers.0.mlp.down_proj.lora_magnitude_vector": (32,)}),
    "adapters of embeddings": ({}, {"model.embed_tokens.lora_embedding_A": (4, 13)}),
    "a whole weight, modules_to_save": ({}, {"lm_head.weight": (13, 32)}),
    "a bias": ({}, {"model.layers.0.mlp.down_proj.bias": (32,)}),
    "a bias of lora_B": ({}, {"model.layers.0.mlp.down_proj.lora_B.bias": (32,)}),
    "no regular expression": ({"target_modules": "(q_proj"}, {}),
    "'(q' is no regular expression": ({"rank_pattern": {"(q": 2}}, {}),
    "'(h' is no regular expression": (
        {"layers_to_transform": [0], "layers_pattern": "(h"},
        {},
    ),
    "alpha_pattern is [3], expected an object": ({"alpha_pattern": [3]}, {}),
    "lora_alpha": ({"lora_alpha": None}, {}),
    "r is": ({"r": 0}, {}),
    "no module model.layers.7.mlp.down_proj": (
        {},
        {f"model.layers.7.mlp.down_proj.lora_{x}.weight": (4, 4) for x in "AB"},
    ),
    "lora_B of model.layers.0.mlp.up_proj is missing": ({}, {"model.layers.0.mlp.up_proj.lora_A.weight": (4, 32)}),
    "not a linear layer": (
        {"target_modules": None},
        {f"model.embed_tokens.lora_{x}.weight": (4, 4) for x in "AB"},
    ),
}


def refusal(base, tmp_path, config: dict, tensors: dict, message: str, **options) -> str:
    path = base[0]
    with pytest.raises(ValueError, match=message) as error:
        _adapted(load_model(path, lazy=True), save(tmp_path / "adapter", config, tensors, **options))
    text = str(error.value)
    assert text.startswith(f"{tmp_path / 'adapter'}: no usable adapters (adapter")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_lora_is_refused_by_name(base, tmp_path, what):
    change, more = REFUSED[what]
    tensors = pairs(base[2], ALL) | {name: np.ones(shape, np.float32) for name, shape in more.items()}
    refusal(base, tmp_path, {**BASE, **change}, tensors, re.escape(what))


@pytest.mark.parametrize("matrix", ["A", "B"])
def test_other_ranks_and_shapes_name_the_module_and_both_shapes(base, tmp_path, matrix):
    tensors = pairs(base[2], ALL)
    text = refusal(base, tmp_path, {**BASE, "r": 8}, tensors, r"q_proj\.lora_A\.weight has shape \[4, 32\]; rank 8")
    assert text.endswith("give [8, 32])")
    name = f"{ALL[-1]}.lora_{matrix}.weight"
    tensors[name] = tensors[name][:, :-1]
    refusal(
        base,
        tmp_path,
        BASE,
        tensors,
        rf"{name} has shape \[\d+, {tensors[name].shape[1]}\]; rank 4 and the module {ALL[-1]} give",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_adapters_that_are_not_numbers(base, tmp_path, value):
    tensors = pairs(base[2], ALL)
    tensors[f"{ALL[1]}.lora_B.weight"][3, 2] = value
    refusal(base, tmp_path, BASE, tensors, rf"{ALL[1]}\.lora_B\.weight holds NaN or infinity")


@pytest.mark.parametrize("change", [{"target_modules": ["nothing"]}, {"layers_to_transform": [9]}])
def test_adapters_that_fit_nothing(base, tmp_path, change):
    tensors = pairs(base[2], ALL)
    refusal(base, tmp_path, {**BASE, **change}, tensors, "none of its tensors fits a module")


def test_files_that_are_not_there(base, tmp_path):
    text = refusal(base, tmp_path, BASE, {}, r"adapter_model\.safetensors: not found", file="adapters.safetensors")
    assert "PEFT" in text
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"")
    refusal(base, tmp_path, BASE, {}, r"\.bin files are not read", file="adapters.safetensors")


OWN = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
OWN["lora_parameters"]["keys"] = ["self_attn.q_proj"]
PLACE = "model.layers.2.self_attn.q_proj"
MISFITS = {
    "another rank": ({f"{PLACE}.lora_a": (32, 8)}, r"q_proj\.lora_a has shape \[32, 8\]; .* give \[32, 4\]"),
    "another layer": ({PLACE.replace("2", "0") + ".lora_a": (32, 4)}, "none of its tensors fits"),
    "another module": (
        {f"{PLACE}.lora_a": (32, 4), "model.x.lora_a": (32, 4)},
        r"tensor model\.x\.lora_a does not fit",
    ),
    "nothing": ({}, "no tensors in it"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_adapters_of_mlx_lm_that_do_not_fit(base, tmp_path, case):
    shapes, message = MISFITS[case]
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    refusal(base, tmp_path, OWN, tensors, message, begin="", file="adapters.safetensors")


def test_adapters_that_change_nothing_are_a_warning(base, tmp_path):
    path, _, weights, _ = base
    tensors = {name: w * ("lora_A" in name) for name, w in pairs(weights, ALL).items()}
    with pytest.warns(UserWarning, match="change nothing"):
        _adapted(load_model(path), save(tmp_path / "adapter", BASE, tensors))
