"""Load one model in every published layout of experts, 8-bit floats and prefixes."""

import json

import families
import mlx.core as mx
import pytest
import tiny
from layouts import in_8_bits, unpacked
from mlx.utils import tree_flatten
from sweep import paired

import mlx_mtp


def parameters(path, config: dict, weights: dict) -> dict:
    return dict(tree_flatten(mlx_mtp.load_model(tiny.save(path, config, weights), lazy=True).parameters()))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]) for n in a)


def built(name: str, path):
    path, weights, _ = families.build(name, path)
    return json.loads((path / "config.json").read_text()), weights


def numbered(weights: dict, part: str) -> dict:
    """Split fused experts of tensors whose names start with `part` into numbered ones."""
    found = {}
    for name, w in weights.items():
        before, fused, projection = name.rpartition(".experts.")
        if not fused or not name.startswith(part):
            found[name] = w
            continue
        split = mx.split(w, 2, axis=1) if projection == "gate_up_proj" else [w]
        for kind, experts in zip(("gate", "up") if len(split) == 2 else ("down",), split, strict=True):
            found |= {f"{before}.experts.{e}.{kind}_proj.weight": experts[e] for e in range(len(w))}
    return found


@pytest.mark.parametrize("part", ["mtp.", "model.language_model.", ""])
def test_numbered_experts_next_to_fused_ones(tmp_path, part):
    config, weights = built("qwen3_5_moe", tmp_path / "fused")
    stored = numbered(weights, part)
    assert len(stored) > len(weights)
    assert same(parameters(tmp_path / "a", config, stored), parameters(tmp_path / "b", config, weights))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_model_without_its_wrapper(tmp_path, name):
    """A flat config.json, with the wrapper's tensor names or plain ones."""
    config, weights = built(name, tmp_path / "wrapped")
    expected = parameters(tmp_path / "a", config, weights)
    flat = {**config["text_config"], "model_type": f"{name}_text"}
    assert same(parameters(tmp_path / "b", flat, weights), expected)
    plain = {n.replace("model.language_model.", "model."): w for n, w in weights.items()}
    assert same(parameters(tmp_path / "c", flat, plain), expected)


def test_a_derivative_with_a_model_type_of_its_own(tmp_path):
    config, weights = built("deepseek_v3", tmp_path / "a")
    derived = {**config, "model_type": "kimi_k2"}
    assert same(parameters(tmp_path / "b", derived, weights), parameters(tmp_path / "c", config, weights))


def test_a_vision_wrappers_conversion(tmp_path):
    """All tensors of the text model, with the heads, are under `language_model.`."""
    weights = tiny.random_weights(tiny.CONFIG)
    config = {"model_type": "step3p7", "text_config": tiny.CONFIG}
    moved = {f"language_model.{n}": w for n, w in weights.items()}
    assert same(parameters(tmp_path / "a", config, moved), parameters(tmp_path / "b", config, weights))


EIGHT_BIT = paired(["glm4_moe", "qwen3_next", "qwen3_5", "mimo", "deepseek_v3"], ["block", "row", "tensor"])


@pytest.mark.parametrize(("name", "scales"), EIGHT_BIT)
def test_8_bit_floats(tmp_path, name, scales):
    config, weights = built(name, tmp_path / "a")
    if scales == "row":
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    stored, plain = in_8_bits(weights, scales)
    assert len(stored) > len(weights)
    found = parameters(tmp_path / "b", config, stored)
    assert any(name.endswith(".output_scale") for name in found)
    assert same(unpacked(found), parameters(tmp_path / "c", config, plain))


def test_blocks_are_128_wide(tmp_path):
    """A weight of three by two blocks, with incomplete blocks at the edges."""
    config, weights = built("mimo", tmp_path / "a")
    config["intermediate_size"] = 300
    shapes = families.FAMILIES["mimo"]
    weights = families.random_weights(shapes.trunk(config) | shapes.heads(config), 0)
    name = "model.mtp_layers.0.mlp.gate_proj.weight"
    scale = mx.array([[0.5], [2.0], [4.0]])
    packed = mx.to_fp8(weights[name])
    stored = {**weights, name: packed, f"{name}_scale_inv": scale}
    found = parameters(tmp_path / "b", config, stored)["mtp.0.block.mlp.gate_proj.weight"]
    expected = mx.from_fp8(packed, dtype=mx.float32)
    for block, factor in enumerate(scale.flatten().tolist()):
        rows = slice(128 * block, 128 * (block + 1))
        assert mx.allclose(found[rows].astype(mx.float32), expected[rows] * factor, rtol=1e-2)
    stored[f"{name}_scale_inv"] = mx.ones((2, 2))
    with pytest.raises(
        ValueError, match=r"model\.safetensors: tensor .*gate_proj\.weight_scale_inv has shape \(2, 2\); "
    ) as e:
        parameters(tmp_path / "b", config, stored)
    assert str(e.value).endswith("expected one scale, 300 for the rows, or (3, 1) for blocks of 128")


def test_two_spellings_of_one_tensor(tmp_path):
    for name, tensor in (("qwen3_5", "mtp.fc.weight"), ("nemotron_h", "mtp.layers.0.eh_proj.weight")):
        config, weights = built(name, tmp_path / name)
        twice = weights | {f"model.{tensor}": weights[tensor] + 1}
        with pytest.raises(ValueError, match=rf"tensors \S*{tensor} and \S*{tensor} stand for the same tensor"):
            mlx_mtp.load_model(tiny.save(tmp_path / name, config, twice))


def test_a_sidecar_next_to_heads_in_the_shards(tmp_path):
    """The sidecar's modules are used, others come from the shards, and unused copies are reported."""
    config, weights = built("mimo_v2_flash", tmp_path)
    heads = {name: w for name, w in weights.items() if name.startswith("model.mtp.")}
    first = {name: w * 1.5 for name, w in heads.items() if ".mtp.layers.0." in name and "self_attn" in name}
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), first)
    model = mlx_mtp.load_model(tmp_path)
    expected = parameters(tmp_path / "expected", config, weights | first)
    assert same(dict(tree_flatten(model.parameters())), expected)
    assert {f"{name} of the shards" for name in first} == set(model.report.ignored)
    assert model.report.source == "mtp.safetensors and the model's shards"


def test_heads_given_by_path_are_not_mixed_with_the_shards(tmp_path):
    _, weights = built("mimo", tmp_path)
    heads = {name: w for name, w in weights.items() if ".mtp_layers." in name}
    part = {name: w for name, w in heads.items() if "input_proj" not in name}
    mx.save_safetensors(str(tmp_path / "head.safetensors"), part)
    with pytest.raises(ValueError, match=r"head\.safetensors: tensor \S+input_proj\.weight is missing"):
        mlx_mtp.load_model(tmp_path, mtp_path=tmp_path / "head.safetensors")
