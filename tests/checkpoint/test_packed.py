"""Packed checkpoints keep their integers, scales and size, and compute what their numbers in float32 compute."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import packed_files as files
import pytest
import tiny
from drafters import GQA
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from packed_kinds import KINDS, Kind, compressed, groups, linears, logits, write
from portless import CONFIGS
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint.convert import convert, extract_heads
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.checkpoint.packed.arrays import Arrays
from mlx_mtp.checkpoint.packed.sanitize import sanitized
from mlx_mtp.layers.scaled import SCALE, ScaledLinear, ScaledSwitchLinear, scale_outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TOKENS = [1, 2, 3, 4, 5, 6, 7]
MLA = "deepseek_v3", "glm_moe_dsa"
FAMILIES = ("glm4_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h", "mimo", "mimo_v2_flash", *MLA)
STARCODER = json.dumps(CONFIGS["starcoder2"])


def numbers(module) -> np.ndarray:
    """A quantized module's weights in float32, by MLX's `dequantize`."""
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    w = np.array(
        mx.dequantize(module.weight, scales, biases, module.group_size, module.bits, module.mode, dtype=mx.float32)
    )
    scale = np.array(module[SCALE]) if SCALE in module else np.ones(1, np.float32)
    return w * scale.reshape(*scale.shape, *[1] * (w.ndim - scale.ndim))


def close(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays differ by float32 rounding."""
    return bool(mx.abs(a - b).max() < 2e-5 * mx.abs(b).max())


@pytest.mark.parametrize(("family", "name"), paired(FAMILIES, KINDS))
def test_numbers_and_logits_are_the_files_own(tmp_path, family, name):
    """Numbers to the bit, in the target and the heads, with stacked experts; MLA's kv_b_proj is dequantized."""
    kind = KINDS[name]
    path, unpacked = write(tmp_path, family, linears(kind), kind.config)
    packed, plain = (mlx_mtp.load_model(each, lazy=True) for each in (path, unpacked))
    expected, found = dict(plain.named_modules()), 0
    for path, module in packed.named_modules():
        if "scales" in module:
            found += 1
            assert np.array_equal(numbers(module), np.array(expected[path].weight)), path
    assert found > 4
    assert packed.report.target_quantization.startswith(kind.formats)
    assert packed.report.head_quantization.startswith(kind.formats)
    assert packed.report.target_bytes < plain.report.target_bytes
    assert close(logits(packed, TOKENS), logits(plain, TOKENS))


def test_drafts_of_packed_heads_do_not_change_the_text(tmp_path):
    kind = KINDS["compressed"]
    packed, plain = (mlx_mtp.load_model(path) for path in write(tmp_path, "glm4_moe", linears(kind), kind.config))
    runs = (mlx_mtp.generate_step(TOKENS, m, max_tokens=6, num_draft_tokens=n) for m, n in ((packed, 2), (plain, 0)))
    assert len({tuple(token for token, _, _ in tokens) for tokens in runs}) == 1


@pytest.mark.parametrize("name", sampled(["compressed", "gptq"], KINDS))
def test_families_without_a_port(tmp_path, name):
    kind = KINDS[name]
    paths = write(tmp_path, STARCODER, linears(kind), kind.config)
    packed, plain = (mlx_mtp.load_model(path, mtp=False) for path in paths)
    assert close(packed(mx.array([TOKENS])), plain(mx.array([TOKENS])))
    assert packed.report.target_quantization.startswith(kind.formats)
    assert inspect_checkpoint(paths[0]).target.loaded == packed.report.target_bytes


SIZED = ["modelopt", "compressed", "mxfp8", "fp8 rows", "gptq"]


@pytest.mark.parametrize("name", sampled(["fp8 rows", "gptq"], SIZED))
def test_memory_is_the_files(tmp_path, name):
    """Zero points become biases, and GPTQ's `g_idx` nothing; the rest has its size in the file."""
    kind = KINDS[name]
    path, _ = write(tmp_path, "glm4_moe", linears(kind), kind.config)
    facts, model = inspect_checkpoint(path), mlx_mtp.load_model(path)
    assert not facts.problems
    assert not facts.missing
    assert facts.target.loaded == model.report.target_bytes
    loaded = sum(w.nbytes for _, w in tree_flatten(model.parameters()))
    assert loaded < 1.06 * (path / "model.safetensors").stat().st_size


def test_heads_and_experts_of_stacked_matrices(tmp_path):
    """Step-3.5 stores experts as one tensor; modelopt writes one scale for all, or one for each.

    The norms' convention, which names such as ".scales" decide, is that of the unpacked checkpoint.
    """
    of_step = {**tiny.CONFIG, "max_position_embeddings": 4096}
    weights = {name: np.array(w) for name, w in tiny.random_weights(of_step).items()}
    expected, stored = dict(weights), {name: files.plain(w) for name, w in weights.items()}
    for name, w in weights.items():
        linear = name.endswith(("_proj.weight", "shared_head.output.weight")) and "eh_proj" not in name
        if w.ndim == 2 and w.shape[1] % 16 == 0 and linear:
            found, expected[name] = files.nvfp4(w, reciprocal=False)
            stored |= {name.removesuffix("weight") + kind: t for kind, t in found.items()}
        if w.ndim == 3 and w.shape[2] % 16 == 0:
            found = [files.nvfp4(e, reciprocal=False) for e in w]
            if one := "up_proj" in name:
                found = [files.Weight(found[0].parts, found[0].numbers)] * len(w)
            parts = {
                kind: files.Stored(t.dtype, np.stack([f.parts[kind].values for f in found]))
                for kind, t in found[0].parts.items()
            }
            if one:
                parts["weight_scale_2"] = found[0].parts["weight_scale_2"]
            stored |= {name.removesuffix("weight") + kind: t for kind, t in parts.items()}
            expected[name] = np.stack([f.numbers for f in found])
    layers = {"model.layers.1.moe.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    path = files.save(tmp_path / "packed", of_step, stored)
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}} | config))
    plain = files.save(tmp_path / "plain", of_step, {name: files.plain(w) for name, w in expected.items()})
    packed, model = mlx_mtp.load_model(path), mlx_mtp.load_model(plain)
    assert any(type(m) is ScaledSwitchLinear for m in packed.modules())
    assert type(packed.mtp[2].head) is ScaledLinear
    facts = inspect_checkpoint(path)
    assert (facts.zero_centred, facts.missing, facts.problems) == (inspect_checkpoint(plain).zero_centred, (), ())
    norms = [[w for name, w in tree_flatten(m.parameters()) if "norm" in name] for m in (packed, model)]
    assert all(map(mx.array_equal, *norms))
    tokens = [t % 5 for t in TOKENS]
    assert close(logits(packed, tokens), logits(model, tokens))


def model_of(**modules):
    model = nn.Module()
    for name, module in modules.items():
        model[name] = module
    return model


def arrays(rng, rows: int, columns: int, lead: tuple[int, ...] = ()) -> tuple[Arrays, np.ndarray]:
    w = rng.standard_normal((*lead, rows, columns)).astype(np.float32) * rng.uniform(0.1, 9)
    found = files.nvfp4(w, reciprocal=False)
    parts = {name: mx.array(t.values) for name, t in found.parts.items()}
    words = parts["weight"].view(mx.uint32)
    return Arrays(
        words, parts["weight_scale"], None, parts["weight_scale_2"].reshape(-1), 16, 4, "nvfp4"
    ), found.numbers


def unscaled(a: Arrays) -> np.ndarray:
    return np.array(replace(a, factor=None).dequantized(mx.float32))


@pytest.mark.parametrize("by_row", [(), ("q", "gate_up", "e1", "mla")])
def test_factors_follow_the_rows_of_fused_split_and_stacked_weights(by_row):
    """Whatever a family's `sanitize` does to rows, each keeps the scale of the tensor or row that it comes from."""
    rng = np.random.default_rng(0)
    packed, plain = {}, {}
    for name in ("q", "k", "v", "gate_up", "e0", "e1", "mla"):
        packed[name], plain[name] = arrays(rng, 8, 32)
        if name in by_row:
            times = rng.uniform(0.5, 2, 8).astype(np.float32)
            packed[name] = replace(packed[name], factor=packed[name].factor * mx.array(times))
            plain[name] = unscaled(packed[name]) * np.array(packed[name].factor)[:, None]
    model = model_of(
        qkv=nn.Linear(32, 24, bias=False),
        gate=nn.Linear(32, 4, bias=False),
        up=nn.Linear(32, 4, bias=False),
        experts=SwitchLinear(32, 8, 2, bias=False),
        mla=nn.Linear(8, 32, bias=False),
    )

    def fuse(weights):
        w = {name.removesuffix(".weight"): a for name, a in weights.items()}
        return {
            "qkv.weight": mx.concatenate([w["k"][::2], w["q"], w["v"], w["k"][1::2]]),
            "gate.weight": w["gate_up"][:4],
            "up.weight": w["gate_up"][4:],
            "experts.weight": mx.stack([w["e0"], w["e1"]]),
            "mla.weight": mx.contiguous(w["mla"].T) if w["mla"].dtype == mx.float32 else w["mla"].T,
        }

    found = sanitized(fuse, packed, model, {"norm.weight": mx.zeros(1)})
    expected = fuse({f"{name}.weight": mx.array(w) for name, w in plain.items()})
    nn.quantize(model, 16, 4, mode="nvfp4", class_predicate=lambda path, _: f"{path}.scales" in found)
    scale_outputs(model, found)
    model.load_weights(list(found.items()))
    shapes = [(24,), (4,), (2, 8)] if by_row else [(24,), (1,), (2,)]
    assert [model[n][SCALE].shape for n in ("qkv", "gate", "experts")] == shapes
    for name in ("qkv", "gate", "up", "experts"):
        assert np.array_equal(numbers(model[name]), np.array(expected[f"{name}.weight"])), name
    assert type(model["mla"]) is nn.Linear
    assert np.array_equal(np.array(model["mla"].weight), plain["mla"].T)


def test_mixed_groups_are_chosen_by_target_patterns(tmp_path):
    """Names before patterns before class names, as in compressed-tensors; ignored modules stay plain."""
    kinds = {"nvfp4": KINDS["compressed"], "int4": KINDS["int4"], "int8": KINDS["int8"]}
    fp8 = Kind(files.fp8, 1, 1, {}, "")
    config = compressed("mixed-precision") | {
        "config_groups": groups(
            group_0=(["Linear"], "nvfp4-pack-quantized", 4),
            group_1=([r"re:.*self_attn\.(q|k|v)_proj$"], "pack-quantized", 4),
            group_2=(["model.layers.1.self_attn.q_proj"], "pack-quantized", 8),
            group_3=([r"re:.*shared_experts\.up_proj$"], "float-quantized", 8),
        ),
        "ignore": ["lm_head", r"re:.*o_proj$"],
    }

    def choose(module: str, w: np.ndarray):
        if not module.endswith("_proj") or module.endswith(("o_proj", "eh_proj")):
            return None
        name = "int4" if module.endswith(("q_proj", "k_proj", "v_proj")) else "nvfp4"
        name = "int8" if module == "model.layers.1.self_attn.q_proj" else name
        kind = fp8 if module.endswith("shared_experts.up_proj") else kinds[name]
        return kind.pack if kind.packs(w) else None

    packed, plain = (mlx_mtp.load_model(path) for path in write(tmp_path, "glm4_moe", choose, config))
    first, second = (packed.model.layers[i].self_attn for i in (0, 1))
    assert [(m.bits, m.mode) for m in (first.q_proj, second.q_proj)] == [(4, "affine"), (8, "affine")]
    assert "scales" not in first.o_proj
    assert {"4-bit affine", "4-bit nvfp4"} <= {f"{m.bits}-bit {m.mode}" for m in packed.modules() if "scales" in m}
    assert close(logits(packed, TOKENS), logits(plain, TOKENS))


def test_scales_that_are_no_powers_of_two_are_read_as_before(tmp_path):
    """Whatever `scale_fmt` states; a matrix of one block has one scale, and is exact."""

    def pack(w):
        found = files.mxfp8(w, (128, 128), "F32")
        scale = found.parts["weight_scale_inv"]
        return files.Weight(
            found.parts | {"weight_scale_inv": files.Stored("F32", scale.values * np.float32(1.5))},
            found.numbers * 1.5,
        )

    kind = KINDS["ue8m0 128"]._replace(pack=pack)
    config = json.dumps({**GQA, "model_type": "llama", "intermediate_size": 160})
    packed, plain = (mlx_mtp.load_model(path) for path in write(tmp_path, config, linears(kind), kind.config))
    ours, theirs = packed.model.layers[0], plain.model.layers[0]
    assert "scales" not in ours.mlp.up_proj
    assert mx.array_equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight.astype(mx.bfloat16))
    assert np.array_equal(numbers(ours.self_attn.q_proj), np.array(theirs.self_attn.q_proj.weight))


def test_bfloat16_becomes_float16_beside_float16_scales(tmp_path):
    """As in mlx-lm's transform, because MLX would compute in float32; a conversion keeps that."""
    kind = KINDS["awq"]
    path, _ = write(tmp_path, "mimo", linears(kind), kind.config)
    tensors = dict(mx.load(str(path / "model.safetensors")))
    tensors = {n: w.astype(mx.bfloat16) if w.dtype == mx.float32 else w for n, w in tensors.items()}
    config = json.loads((path / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    model = mlx_mtp.load_model(tiny.save(path, config, tensors))
    assert {w.dtype for _, w in tree_flatten(model.parameters())} == {mx.float16, mx.uint32}
    new = convert(path, tmp_path / "new").path
    assert json.loads((new / "config.json").read_text())["torch_dtype"] == "float16"
    assert mx.array_equal(logits(mlx_mtp.load_model(new), TOKENS), logits(model, TOKENS))


@pytest.mark.parametrize("name", sampled(["modelopt"], ["modelopt", "gptq", "ue8m0 128"]))
def test_conversions_keep_the_format(tmp_path, name):
    kind = KINDS[name]
    path, _ = write(tmp_path, "mimo", linears(kind), kind.config)
    model, new = mlx_mtp.load_model(path), tmp_path / "new"
    if name == "modelopt":
        with pytest.warns(UserWarning, match="weights keep their scale per tensor or row, as 'output_scale'; mlx-lm"):
            convert(path, new)
    else:
        convert(path, new)
    again = mlx_mtp.load_model(new)
    assert again.report.target_bytes == model.report.target_bytes
    assert again.report.head_quantization == model.report.head_quantization
    assert mx.array_equal(logits(again, TOKENS), logits(model, TOKENS))
    convert(path, tmp_path / "wide", dequantize=True, dtype="float32")
    wide = mlx_mtp.load_model(tmp_path / "wide")
    assert wide.report.target_quantization.startswith("not quantized")
    assert close(logits(wide, TOKENS), logits(model, TOKENS))


def test_heads_of_a_packed_release_for_another_target(tmp_path):
    """The heads' own config.json describes them."""
    kind = KINDS["gptq asymmetric"]
    packed, plain = write(tmp_path, "glm4_moe", linears(kind), kind.config)
    model = mlx_mtp.load_model(plain, mtp_path=packed)
    parameters = tree_flatten(model.parameters())
    assert all(w.dtype == mx.float32 for name, w in parameters if not name.startswith("mtp."))
    assert model.report.head_quantization.startswith(kind.formats)
    assert model.report.target_quantization.startswith("not quantized")
    extract_heads(packed, tmp_path / "heads.safetensors")
    again = mlx_mtp.load_model(plain, mtp_path=tmp_path / "heads.safetensors")
    pairs = zip(tree_flatten(again.mtp[0].parameters()), tree_flatten(model.mtp[0].parameters()), strict=True)
    assert all(a[0] == b[0] and mx.array_equal(a[1], b[1]) for a, b in pairs)


def test_draft_vocabularies_of_scaled_heads(tmp_path):
    kind = KINDS["modelopt"]
    choose = linears(kind)

    def all_heads(module, w):
        return kind.pack if module.endswith(("lm_head", "shared_head.head")) else choose(module, w)

    packed, plain = write(tmp_path, "glm4_moe", all_heads, kind.config)
    few = [mlx_mtp.load_model(path, draft_vocab=[1, 3, 4, 7]) for path in (packed, plain)]
    for prompt in (TOKENS, TOKENS[::-1]):
        drafts = [[t for t, *_ in mlx_mtp.generate_step(prompt, m, max_tokens=4, num_draft_tokens=2)] for m in few]
        assert drafts[0] == drafts[1]
    x = mx.random.normal((1, 2, 32))
    heads = [
        next(m for path, m in model.mtp[0].named_modules() if path.startswith("head") and "weight" in m)
        for model in few
    ]
    assert type(heads[0]) is ScaledLinear
    assert heads[0].weight.shape[0] == heads[1].weight.shape[0] == 4
    assert close(heads[0](x), heads[1](x))
