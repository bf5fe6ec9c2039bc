"""Test the formats of a conversion: the target's equal those of mlx-lm's conversion, and can be dequantized."""

import json

import damage
import families
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from layouts import in_8_bits
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as mlx_lm_convert
from mlx_lm.models.switch_layers import SwitchLinear
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.convert_precision import Precision

WHOLE = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32}  # so that groups of 32 fit


def stored(path) -> dict:
    return {name: w for file in path.glob("model*.safetensors") for name, w in mx.load(str(file)).items()}


def parameters(path) -> dict:
    return dict(tree_flatten(mlx_mtp.load_model(path, lazy=True).parameters()))


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert mx.array_equal(a[name], b[name]), name


def formats(path, names) -> dict:
    """Return the quantization in config.json of every quantized module."""
    listed = json.loads((path / "config.json").read_text())["quantization"]
    usual = {name: listed[name] for name in ("bits", "group_size", "mode")}
    modules = {name.removesuffix(".scales") for name in names if name.endswith(".scales")}
    return {module: {"mode": "affine"} | listed.get(module, usual) for module in modules}


FEW = (
    {},
    {"quantize": True, "q_bits": 3, "q_group_size": 32, "dtype": "float32"},
    {"quantize": True, "q_mode": "mxfp4"},
    {"quantize": True, "quant_predicate": "mixed_3_6", "q_group_size": 64},
)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A checkpoint with a tokenizer, whose matrices have rows of whole groups of 64, or of 32."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "share_expert_dim")
    config = {**tiny.CONFIG, **dict.fromkeys(sizes, 64), "vocab_size": 13, "torch_dtype": "bfloat16"}
    path = tiny.save(tmp_path_factory.mktemp("step"), config, tiny.random_weights(config))
    damage.write_tokenizer(path)
    return path


@pytest.mark.parametrize("options", sampled(FEW, [*FEW, {"dtype": "float16"}, {"quantize": True}]), ids=str)
def test_the_target_is_that_of_mlx_lms_conversion(step, tmp_path, options):
    mlx_lm_convert(str(step), tmp_path / "theirs", **options)
    convert(step, tmp_path / "ours", **options)
    ours, theirs = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    same(ours, theirs)
    index = [json.loads((tmp_path / who / "model.safetensors.index.json").read_text()) for who in ("ours", "theirs")]
    assert json.loads((tmp_path / "ours/config.json").read_text())["torch_dtype"] == options.get("dtype", "bfloat16")
    assert index[0]["weight_map"].items() >= index[1]["weight_map"].items()
    if options.get("quantize"):
        assert formats(tmp_path / "ours", ours) == formats(tmp_path / "theirs", theirs)


@pytest.mark.parametrize("name", sampled(["deepseek_v3"], ["deepseek_v3", "qwen3_5_moe", "mimo"]))
def test_dequantized_again(tmp_path, name):
    """Linear layers with and without biases, embeddings, experts, and the matrices of latent attention."""
    changes = WHOLE if name == "deepseek_v3" else {}
    path, _, _ = families.build(name, tmp_path / "source", **changes)
    convert(path, tmp_path / "4", quantize=True, q_group_size=32, mtp_q_group_size=32)
    convert(tmp_path / "4", tmp_path / "back", dequantize=True)
    packed = parameters(tmp_path / "4")
    expected = {
        n: w for n, w in packed.items() if n.rpartition(".")[0] + ".scales" not in packed or n.endswith("bias")
    }
    for name in packed:
        if (module := name.removesuffix(".scales")) != name:
            w, scales, biases = (packed[f"{module}.{kind}"] for kind in ("weight", "scales", "biases"))
            bits = w.shape[-1] * 32 // (scales.shape[-1] * 32)
            expected[f"{module}.weight"] = mx.dequantize(w, scales, biases, 32, bits)
    same(parameters(tmp_path / "back"), expected)
    assert "quantization" not in (tmp_path / "back" / "config.json").read_text()


def test_quantized_modules_are_not_quantized_again(step, tmp_path):
    convert(step, tmp_path / "4", quantize=True, mtp_q_bits=16)
    words = (
        "^quantize=True: nothing left to quantize in the target, whose matrices are already 4-bit affine g64, 8-bit"
    )
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "4", tmp_path / "new", quantize=True, q_bits=8)
    convert(tmp_path / "4", tmp_path / "6", mtp_q_bits=6)
    words = "^mtp_q_bits=8: nothing left to quantize in the heads, whose matrices are already 6-bit affine g64$"
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "6", tmp_path / "new", mtp_q_bits=8)
    path, _, _ = families.build("mimo", tmp_path / "mimo")
    with pytest.raises(ValueError, match="in the target, whose matrices are not in rows of whole groups"):
        convert(path, tmp_path / "new", quantize=True, q_group_size=128)
    assert not (tmp_path / "new").exists()


def test_experts_with_a_scale_for_each_cannot_be_turned_back():
    model = nn.Module()
    model.experts = SwitchLinear(64, 8, 4, bias=False).to_quantized(16, 4, "nvfp4", global_scale=True)
    with pytest.raises(ValueError, match="dequantize=True: experts is a QuantizedSwitchLinear with a global scale"):
        Precision(dequantize=True).apply(model, None)


@pytest.mark.parametrize(("name", "scales"), paired(["deepseek_v3", "glm4_moe"], ["block", "row"]))
def test_8_bit_floats_become_their_values(tmp_path, name, scales):
    path, weights, _ = families.build(name, tmp_path / "a")
    packed, plain = in_8_bits(weights, scales)
    plain = {
        n: w.astype(mx.bfloat16) if f"{n}_scale" in packed or f"{n}_scale_inv" in packed else w
        for n, w in plain.items()
    }
    config = json.loads((path / "config.json").read_text())
    method = (
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        if scales == "row"
        else {"quant_method": "fp8"}
    )
    tiny.save(tmp_path / "packed", config | {"quantization_config": method}, packed)
    tiny.save(tmp_path / "plain", config, plain)
    for source in ("packed", "plain"):
        convert(tmp_path / source, tmp_path / f"{source} new", quantize=True, q_group_size=32)
    same(stored(tmp_path / "packed new"), stored(tmp_path / "plain new"))
    config, other = (
        json.loads((tmp_path / f"{source} new/config.json").read_text()) for source in ("packed", "plain")
    )
    assert config == other
    assert mlx_mtp.load_model(tmp_path / "packed new").report.heads == 1


def test_a_family_keeps_types(tmp_path):
    """In target and heads: correction biases, which choose experts, stay float32."""
    path, _, _ = families.build("glm4_moe", tmp_path / "a")
    convert(path, tmp_path / "new", dtype="bfloat16")
    found = stored(tmp_path / "new") | mx.load(str(tmp_path / "new" / "mtp.safetensors"))
    types = {name.endswith("e_score_correction_bias"): w.dtype for name, w in found.items()}
    assert types == {True: mx.float32, False: mx.bfloat16}
