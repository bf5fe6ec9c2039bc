"""Refuse checkpoints packed by an unsupported method; the error names the method and an alternative."""

import json

import families
import mlx.core as mx
import pytest
import tiny
from portless import CONFIGS
from sweep import paired

import mlx_mtp
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.inspect import inspect_checkpoint

# Of each method: config.json's entry, and a matrix's tensors by suffix with their types.
METHODS = {
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"qweight": mx.int32, "qzeros": mx.int32, "scales": mx.float16},
    ),
    "GPTQ": ({"quant_method": "gptq", "bits": 5}, {"qweight": mx.int32, "g_idx": mx.int32, "scales": mx.float16}),
    "AutoRound": ({"quant_method": "auto-round"}, {"qweight": mx.int32, "qzeros": mx.int32, "scales": mx.float16}),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"weight_packed": mx.int32, "weight_scale": mx.bfloat16, "weight_shape": mx.int64},
    ),
    "compressed-tensors (NVFP4)": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"weight_packed": mx.uint8, "weight_scale": mx.uint8, "weight_global_scale": mx.float32},
    ),
    "compressed-tensors (int8)": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        {"weight": mx.int8, "weight_scale": mx.bfloat16},
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, {"weight": mx.uint8, "weight.absmax": mx.uint8}),
    "bitsandbytes (8)": ({"load_in_8bit": True}, {"weight": mx.int8, "SCB": mx.float32}),
    "HQQ": ({"quant_method": "hqq"}, {"W_q": mx.uint8, "scale": mx.float16, "zero": mx.float16}),
    "EETQ": ({"quant_method": "eetq"}, {"weight": mx.int8, "weight_scales": mx.float16}),
    "Quark": ({"quant_method": "quark"}, {"weight": mx.uint8, "weight_scale": mx.uint8}),
    "AQLM": ({"quant_method": "aqlm"}, {"codes": mx.int8, "codebooks": mx.float16, "scales": mx.float16}),
    "torchao": ({"quant_method": "torchao"}, {"weight_qdata": mx.int8, "weight_scale": mx.bfloat16}),
    "ExLlamaV3": ({"quant_method": "exl3"}, {"trellis": mx.int16, "suh": mx.float16}),
    "a_new_one": ({"quant_method": "a_new_one"}, {"packed": mx.int32}),
}
UNNAMED = ["AWQ", "GPTQ", "compressed-tensors", "bitsandbytes", "HQQ", "AQLM", "ExLlamaV3"]  # by their tensors alone


def packed(weights: dict, parts: dict) -> dict:
    """Replace a checkpoint's projections by other tensors, whose values are not read."""
    found = {}
    for name, w in weights.items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            found |= {name.removesuffix("weight") + part: mx.ones((8, 4), kind) for part, kind in parts.items()}
        else:
            found[name] = w
    return found


def source(path, family: str, config: dict, parts: dict):
    if family in CONFIGS:
        path, _ = families.headless(path, CONFIGS[family])
        weights = dict(mx.load(str(path / "model.safetensors")))
    else:
        path, weights, _ = families.build(family, path)
    whole = json.loads((path / "config.json").read_text())
    if "text_config" in whole:
        whole["text_config"] |= {"quantization_config": config} if config else {}
    else:
        whole |= {"quantization_config": config} if config else {}
    return tiny.save(path, whole, packed(weights, parts))


def refused(path, name: str) -> None:
    with pytest.raises(ValueError, match="a conversion to MLX") as error:
        mlx_mtp.load_model(path)
    text = str(error.value)
    assert text.startswith(f"{path}: quantized by {name.partition(' ')[0]}")
    assert "`mlx-mtp convert -q`" in text
    assert "\n" not in text
    assert inspect_checkpoint(path).problems[0] == text


@pytest.mark.parametrize(("name", "family"), paired(METHODS, ["qwen3_5", "starcoder2", "glm4_moe"]))
def test_a_method_that_is_not_read_is_named(tmp_path, name, family):
    refused(source(tmp_path, family, *METHODS[name]), name)


@pytest.mark.parametrize("name", UNNAMED)
def test_a_method_that_only_the_tensors_name(tmp_path, name):
    path = source(tmp_path / "hub", "glm4_moe", {}, METHODS[name][1])
    method = "AWQ or GPTQ" if name == "AWQ" else name
    refused(path, method)
    with pytest.raises(ValueError, match=f"quantized by {method}"):
        convert(path, tmp_path / "new")


@pytest.mark.parametrize("name", ["AWQ", "compressed-tensors", "bitsandbytes"])
def test_dequantized_checkpoints_load(tmp_path, name):
    """Its config.json may still name the method."""
    path = source(tmp_path, "glm4_moe", {}, {"weight": mx.float32})
    _, weights, _ = families.build("glm4_moe", tmp_path / "plain")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": METHODS[name][0]}
    model = mlx_mtp.load_model(tiny.save(path, config, weights))
    assert model.report.target_quantization == mlx_mtp.load_model(tmp_path / "plain").report.target_quantization


def test_formats_of_mlx_lm_still_load(tmp_path):
    """An AWQ checkpoint of a family without a port."""
    config = {**CONFIGS["starcoder2"], "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    path, _ = families.headless(tmp_path, config)
    weights = dict(mx.load(str(path / "model.safetensors")))
    for name in [n for n in weights if n.endswith("q_proj.weight")]:
        size, width = weights.pop(name).shape
        module = name.removesuffix("weight")
        weights[f"{module}qweight"] = mx.full((width, size // 8), 0x12345678, mx.int32)
        weights[f"{module}qzeros"] = mx.full((width // 32, size // 8), 0x11111111, mx.int32)
        weights[f"{module}scales"] = mx.full((width // 32, size), 0.01, mx.float16)
    model = mlx_mtp.load_model(tiny.save(path, config, weights), mtp=False)
    assert "4-bit" in model.report.target_quantization
