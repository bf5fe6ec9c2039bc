"""Load and convert mlx-lm's wrappers of a language model that has a port, in every layout of their tensors."""

import json
import warnings

import families
import mlx.core as mx
import pytest
import tiny
import wrappers
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.tuner.utils import load_adapters as mlx_lm_load_adapters
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint.adapters import load_adapters
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.cure import NeverDrafts
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.checkpoint.small_model import is_small_model
from mlx_mtp.models import find_port

NAMES = sorted(wrappers.TEXTS)
FEW = ("gemma3", "kimi_vl", "qwen3_vl_moe")
PROMPT = [1, 2, 3, 4, 5, 6, 7] * 2
PORTS = {
    "gemma3": "gemma3_text", "kimi_k25": "deepseek_v3", "kimi_vl": "deepseek_v3", "mistral3": "llama",
    "pixtral": "llama", "qwen2_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "prism_hadamard_qwen35": "qwen3_5",
}  # fmt: skip


def loaded(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverDrafts)
        warnings.filterwarnings("ignore", message=".*no MTP heads found")
        return mlx_mtp.load_model(path, **options)


def check(model, plain, n=24, prompt=PROMPT):
    """Assert that logits, and text with drafts by prompt lookup, are those of mlx-lm's model; return statistics."""
    assert mx.array_equal(model(mx.array([prompt])), plain(mx.array([prompt])))
    stats = mlx_mtp.Stats()
    options = {"max_tokens": n, "prompt_lookup": True, "adaptive": False, "stats": stats}
    found = [token for token, _, _ in mlx_mtp.generate_step(prompt, model, **options)]
    assert found == tiny.greedy(plain, prompt, n, found)
    return stats


def port_of(config):
    port = find_port(config)
    return port and port.Model.__module__.rpartition(".")[2]


def test_the_wrappers_of_mlx_lm_and_their_ports():
    texts = {**wrappers.WITHOUT, **wrappers.TEXTS}
    configs = {name: wrappers.config_of(name, texts.get(name, {})) for name in wrappers.families_with_text_config()}
    configs["prism_hadamard_qwen35"] = wrappers.hadamard_config()
    assert {name: port for name in configs if (port := port_of(configs[name]))} == PORTS
    assert PORTS.keys() == {*NAMES, "prism_hadamard_qwen35"}, "each has a config, so that the tests below decode it"


@pytest.mark.parametrize("name", sorted(wrappers.WITHOUT))
def test_a_language_model_without_a_port_gives_none(name):
    config = wrappers.config_of(name, wrappers.WITHOUT[name])
    assert wrappers.unfilled(config)["language_model"]
    assert find_port(config) is None


@pytest.mark.parametrize(("name", "layout"), paired(NAMES, wrappers.LAYOUTS))
def test_logits_and_text_are_those_of_mlx_lms_wrapper(tmp_path, name, layout):
    path, plain = wrappers.build(name, tmp_path, layout)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = mlx_mtp.load_model(path)
    assert ["no MTP heads found" in str(warning.message) for warning in warned] == [True]
    assert check(model, plain).lookup_drafted > 0
    report, outer = model.report, wrappers.LAYOUTS[layout][1]
    assert report.family == name
    tops = {outer(tower).rpartition(tower)[0] + tower.partition(".")[0] + ".*" for tower in wrappers.TOWERS}
    assert set(report.ignored) == tops
    assert f"model_type {name!r} reads no pictures here" in report.vision


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_config_without_a_text_config(tmp_path, name):
    """Qwen2-VL was released with the text's values next to `vision_config`."""
    config = {**wrappers.TEXTS[name], "model_type": name, "vision_config": {"depth": 1}}
    plain, weights = wrappers.plain_model(config)
    check(loaded(wrappers.save(tmp_path, config, weights, "bare")), plain)


def test_fused_experts_as_released(tmp_path):
    config = wrappers.config_of("qwen3_vl_moe")
    plain, weights = wrappers.plain_model(config)
    for i in range(config["text_config"]["num_hidden_layers"]):
        experts = f"language_model.model.layers.{i}.mlp.switch_mlp."
        gate, up, down = (weights.pop(f"{experts}{n}_proj.weight").swapaxes(-2, -1) for n in ("gate", "up", "down"))
        fused = experts.replace("switch_mlp", "experts")
        weights |= {f"{fused}gate_up_proj": mx.concatenate([gate, up], -1), f"{fused}down_proj": down}
    check(loaded(wrappers.save(tmp_path, config, weights, "nested")), plain)


@pytest.mark.parametrize("name", ["kimi_k25", "kimi_vl"])
def test_numbered_experts_as_released(tmp_path, name):
    """mlx-lm's `kimi_vl` does not split kv_b_proj, which its layers need, so `kimi_k25` is the truth for both."""
    config = wrappers.config_of("kimi_k25")
    trunk = families.FAMILIES["deepseek_v3"].trunk(config["text_config"])
    weights = {f"language_model.{n}": w for n, w in families.random_weights(trunk, 1).items()}
    plain, _ = wrappers.plain_model(config)
    plain.load_weights(list(plain.sanitize(dict(weights)).items()))
    check(loaded(wrappers.save(tmp_path, {**config, "model_type": name}, weights)), plain)


@pytest.mark.parametrize("layout", wrappers.LAYOUTS)
def test_heads_of_the_language_model(tmp_path, layout):
    """No released checkpoint of a wrapper has some; those of its language model are one layer more."""
    text = families.FAMILIES["deepseek_v3"].config
    config = wrappers.config_of("kimi_k25", text)
    _, weights, plain = families.build("deepseek_v3", tmp_path / "language")
    path = wrappers.save(tmp_path / "wrapper", config, {f"language_model.{n}": w for n, w in weights.items()}, layout)
    model, stats = loaded(path), mlx_mtp.Stats()
    assert model.report.heads == 1
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=8, num_draft_tokens=1, adaptive=False, stats=stats)
    assert (found := [token for token, _, _ in steps]) == tiny.greedy(plain, PROMPT, 8, found)
    assert stats.drafted[0] > 0
    convert(path, tmp_path / "new")
    assert loaded(tmp_path / "new").report.heads == 1


def test_a_window_that_mlx_lms_wrapper_ignores(tmp_path):
    """In `mistral` a window is one of every layer, but not in a wrapper of it."""
    config = wrappers.config_of("mistral3", {**wrappers.TEXTS["mistral3"], "sliding_window": 6})
    plain, weights = wrappers.plain_model(config)
    model = loaded(wrappers.save(tmp_path, config, weights))
    check(model, plain)
    assert set(model.windows()) == {None}


@pytest.mark.parametrize("name", sampled(FEW[:2], NAMES))
def test_quantized_weights_of_two_formats(tmp_path, name):
    config = wrappers.config_of(name)
    plain, _ = wrappers.plain_model(config)
    config["quantization"] = wrappers.quantize(plain, "up_proj")
    model = loaded(wrappers.save(tmp_path, config, dict(tree_flatten(plain.parameters()))))
    assert "4-bit" in model.report.target_quantization
    assert f"8-bit affine g32 ({len(config['quantization']) - 2} modules)" in model.report.target_quantization
    check(model, plain)


@pytest.mark.parametrize(("name", "bits"), paired(sampled(FEW, NAMES), (None, 4)))
def test_a_conversion_is_read_by_mlx_lm_and_says_what_it_lacks(tmp_path, name, bits):
    path, plain = wrappers.build(name, tmp_path / "old", "nested")
    options = {"quantize": True, "q_bits": bits, "q_group_size": 32} if bits else {}
    with pytest.warns(UserWarning, match=r"only the language model is written, without model\.multi_modal_projector"):
        convert(path, tmp_path / "new", **options)
    theirs, config = mlx_lm_utils.load_model(tmp_path / "new")
    assert (config["model_type"], "vision_config" in config) == (name, False)
    assert bits or mx.array_equal(theirs(mx.array([PROMPT])), plain(mx.array([PROMPT])))
    check(loaded(tmp_path / "new"), theirs)


def test_a_converted_recipe_names_modules_as_mlx_lm_does(tmp_path):
    path, _ = wrappers.build("gemma3", tmp_path / "old")
    with pytest.warns(UserWarning, match="only the language model"):
        convert(path, tmp_path / "new", quantize=True, q_group_size=32, quant_predicate="mixed_3_6")
    listed = json.loads((tmp_path / "new" / "config.json").read_text())["quantization"]
    others = [path for path, form in listed.items() if isinstance(form, dict)]
    assert others
    theirs, _ = mlx_lm_utils.load_model(tmp_path / "new")
    assert all(dict(theirs.named_modules())[path].bits == listed[path]["bits"] for path in others)
    check(loaded(tmp_path / "new"), theirs)


def test_adapters_of_mlx_lm(tmp_path):
    path, plain = wrappers.build("gemma3", tmp_path / "model")
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 4.0, "dropout": 0.0}}
    trained, _ = wrappers.plain_model(wrappers.config_of("gemma3"))
    linear_to_lora_layers(trained, 2, config["lora_parameters"])
    shapes = {n: w.shape for n, w in tree_flatten(trained.parameters()) if ".lora_" in n}
    folder = tiny.save(tmp_path / "adapter", {}, families.random_weights(shapes, 5), file="adapters.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    before = plain(mx.array([PROMPT]))
    model = load_adapters(loaded(path), folder)
    assert not mx.array_equal(mlx_lm_load_adapters(plain, str(folder))(mx.array([PROMPT])), before)
    check(model, plain)


@pytest.mark.parametrize("name", sampled(FEW[::2], NAMES))
def test_a_wrapper_as_small_model_of_itself(tmp_path, name):
    path, plain = wrappers.build(name, tmp_path)
    model, stats = loaded(path, draft_model=path), mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=12, num_draft_tokens=3, adaptive=False, stats=stats)
    assert (found := [token for token, _, _ in steps]) == tiny.greedy(plain, PROMPT, 12, found)
    assert stats.acceptance[0] == 1


@pytest.mark.parametrize("name", sampled(("mistral3",), sorted({*NAMES} - {"gemma3"})))
def test_a_wrapper_is_split_over_ranks_like_its_language_model(tmp_path, name):
    path, _ = wrappers.build(name, tmp_path)
    facts = inspect_checkpoint(path, ranks=2, values=False)
    assert facts.problems == ()
    assert facts.part < facts.report.target_bytes


BROKEN = [None, [], {}, 7, "text", {"num_hidden_layers": "four"}, {"hidden_size": -8}, {"num_attention_heads": 0}]


@pytest.mark.parametrize(("name", "text"), paired(sampled(NAMES[::2], NAMES), BROKEN))
def test_a_broken_text_config_is_one_line(tmp_path, name, text):
    path, _ = wrappers.build(name, tmp_path)
    text = {**wrappers.TEXTS[name], **text} if isinstance(text, dict) and text else text
    with pytest.raises(ValueError, match=r"\w") as caught:
        loaded(wrappers.rewritten(path, text_config=text))
    assert "\n" not in str(caught.value)


def test_numbers_out_of_range_are_not_built(tmp_path):
    path, _ = wrappers.build("gemma3", tmp_path)
    for name, value in (("num_hidden_layers", 10**9), ("head_dim", 2**50), ("hidden_size", 2**62)):
        wrappers.rewritten(path, text_config={**wrappers.TEXTS["gemma3"], name: value})
        with pytest.raises(ValueError, match=r"\w"):
            loaded(path)
    wrappers.rewritten(path, text_config={**wrappers.TEXTS["gemma3"], "num_hidden_layers": 10**9})
    assert not is_small_model(path)


def test_a_missing_tensor_has_its_stored_name(tmp_path):
    path, _ = wrappers.build("gemma3", tmp_path, "nested")
    weights = mx.load(str(path / "model.safetensors"))
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    tiny.save(path, json.loads((path / "config.json").read_text()), {n: w for n, w in weights.items() if n != name})
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        loaded(path)


@pytest.fixture(scope="module")
def hadamard(tmp_path_factory):
    config = wrappers.hadamard_config()
    plain, weights = wrappers.hadamard_model(config)
    return tiny.save(tmp_path_factory.mktemp("hadamard"), config, weights), plain


def test_a_family_with_other_linear_layers(hadamard, tmp_path):
    path, plain = hadamard
    assert {record["block"] for record in plain.args.modules} == {0, 512}
    check(loaded(path), plain, 6, [1, 2, 3, 1, 2])
    with pytest.warns(UserWarning, match="no MTP heads"):
        convert(path, tmp_path / "new")
    theirs, _ = mlx_lm_utils.load_model(tmp_path / "new")
    assert mx.array_equal(loaded(tmp_path / "new")(mx.array([[1]])), theirs(mx.array([[1]])))
    assert "no way to split model_type" in inspect_checkpoint(path, ranks=2, values=False).problems[0]


def test_the_checks_of_an_extended_family_hold(hadamard, tmp_path):
    config = json.loads((hadamard[0] / "config.json").read_text()) | {"gdn_activation_layout": "other"}
    path = tiny.save(tmp_path, config, mx.load(str(hadamard[0] / "model.safetensors")))
    with pytest.raises(ValueError, match="require grouped GDN activations"):
        loaded(path)
