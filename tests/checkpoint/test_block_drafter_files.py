"""Load, refuse, inspect and convert the directories of block drafters."""

import json

import block_drafters
import drafters
import families
import mlx.core as mx
import pytest
import tiny
from click.testing import CliRunner
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.build import open_drafter
from mlx_mtp.cli import main

V = families.V
KINDS = block_drafters.KINDS
PROMPT = [1, 2, 3, 0, 2, 2, 1]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return families.headless(tmp_path_factory.mktemp("target"), drafters.HEADLESS["qwen3"])[0]


def refused(target, drafter, match, **options):
    with pytest.raises(ValueError, match=match) as error:
        mlx_mtp.load_model(target, draft_model=drafter, **options)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def plain(target):
    """The target's text without drafts."""
    return text(mlx_mtp.load_model(target, mtp=False), 0)


def text(model, k=4):
    return [t for t, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=6, num_draft_tokens=k, adaptive=False)]


def nested(config: dict, **changes) -> dict:
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}


C, TWO, SPARK, MUSE, SPEC = KINDS.values()
CONFIGS = {
    "activation": (C, {**C, "hidden_act": "gelu"}, "hidden_act='gelu': allowed is 'silu'"),
    "sinks": (C, {**C, "attention_sink_bias": True}, "attention_sink_bias=True: allowed is False"),
    "layers the target lacks": (C, nested(C, target_layer_ids=[0, 5]), r"capture=\(1, 6\): .* integers from 0 to 5"),
    "no layers": (C, nested(C, target_layer_ids=None), "target_layer_ids is missing"),
    "no layers of speculators": (SPEC, {**SPEC, "aux_hidden_state_layer_ids": None}, r"capture=\(\)"),
    "more layers": (C, nested(C, target_layer_ids=[0, 1, 2]), r"fc\.weight has shape \(32, 64\).*expects \(32, 96\)"),
    "no mask": (C, nested(C, mask_token_id=None), "mask_token_id=None: allowed are 0 to 12"),
    "mask": (C, nested(C, mask_token_id=13), "mask_token_id=13: allowed are 0 to 12"),
    "block": (C, {**C, "block_size": 1}, "block_size=1: no drafts; allowed is 2 or more"),
    "block of text": (C, {**C, "block_size": "x"}, "block_size='x': allowed are positive integers"),
    "kinds": (C, {**C, "layer_types": ["full_attention", "x"]}, "layer_types=.*: allowed are 2 of full_attention"),
    "count": (C, {**C, "num_hidden_layers": 3}, "layer_types=.*: allowed are 3 of"),
    "window": (C, {**C, "sliding_window": None}, "sliding_window=None: allowed are 2 to 131,072"),
    "width": (C, {**C, "intermediate_size": 41}, r"mlp\.\w+_proj\.weight has shape .*; config\.json expects"),
    "sizes": (C, {**C, "hidden_size": None}, "hidden_size=None: allowed are positive integers"),
    "rope": (C, {**C, "rope_scaling": {"type": "x"}}, "rope_scaling: type 'x' is unknown"),
    "another target": (C, {**C, "num_target_layers": 9}, "made for a target of 9 layers; this one has 5"),
    "groups": (TWO, nested(TWO, conv_group_size=5), "conv_group_size=5: allowed are divisors of hidden_size 32"),
    "rank": (TWO, nested(TWO, selector_rank=0), "selector_rank=0: allowed are positive integers"),
    "Markov": (SPARK, {**SPARK, "markov_head_type": "x"}, "markov_head_type='x': allowed are vanilla, gated, rnn"),
    "Markov rank": (SPARK, {**SPARK, "markov_rank": 5}, r"markov_w\d\.weight has shape .*expects \(13, 5\)"),
    "vocabulary": (SPEC, {**SPEC, "draft_vocab_size": 8}, r"(lm_head\.weight|d2t) has shape \(9,.*expects \(8,"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_does_not_fit(tmp_path, target, case):
    config, changed, match = CONFIGS[case]
    refused(target, tiny.save(tmp_path, changed, block_drafters.weights(config)), match)


FEW = ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight", "lm_head.weight", "d2t"]
NAMES = [(kind, name) for kind, config in KINDS.items() for name in sorted(block_drafters.weights(config))]
SAMPLE = [
    ("dflash2", "layers.0.mlp_conv.base_kernel"),
    ("dflash2", "candidate_selector.successor_codebook"),
    ("dspark", "markov_head.markov_w2.weight"),
    ("dspark", "confidence_head.proj.bias"),
    ("assistant", "encoder.fc.weight"),
    *(("speculators", name) for name in FEW),
]


@pytest.mark.parametrize(("kind", "name"), sampled(SAMPLE, NAMES))
def test_every_tensor_is_needed_and_trained(tmp_path, target, kind, name):
    config = KINDS[kind]
    w = block_drafters.weights(config)
    tensor = w.pop(name)
    path = tiny.save(tmp_path, config, w)
    if name == "t2d":
        return mlx_mtp.load_model(target, draft_model=path)
    refused(target, path, rf"tensor (model\.)?{name} is missing")
    if name not in ("d2t", "confidence_head.proj.bias"):
        path = tiny.save(tmp_path, config, {**w, name: mx.full(tensor.shape, float("nan"))})
        refused(target, path, rf"model\.safetensors: tensor {name} holds NaN, expected trained weights")
    refused(
        target, tiny.save(tmp_path, config, {**w, name: tensor[None]}), rf"{name} has shape .*config\.json expects"
    )


def test_an_override_of_capture_replaces_missing_layers(tmp_path, target, plain):
    config = nested({name: value for name, value in C.items() if name != "num_target_layers"}, target_layer_ids=None)
    path = tiny.save(tmp_path, config, block_drafters.weights(C))
    refused(target, path, "target_layer_ids is missing")
    assert text(mlx_mtp.load_model(target, draft_model=path, mtp_overrides={"capture": [1, 3]})) == plain


def test_foreign_directories(tmp_path, target):
    w = block_drafters.weights(C)
    path = tiny.save(tmp_path / "other", C, w | {"layers.0.layer_scalar": mx.ones(1)})
    refused(target, path, "a block drafter with layers of another kind, which have layers.0.layer_scalar")
    refused(
        target, tiny.save(tmp_path / "extra", C, w | {"extra.weight": mx.ones(1)}), r"extra\.weight belongs to no"
    )
    refused(target, tiny.save(tmp_path / "twice", C, w | {"model.fc.weight": w["fc.weight"]}), "both become")
    wide = {**C, "hidden_size": 64}
    refused(target, block_drafters.save(tmp_path / "wide", wide), "fc.weight has shape .* 2 x 32 features")
    config = json.loads((target / "config.json").read_text())
    foreign = tiny.save(
        tmp_path / "foreign", {**config, "model_type": "phi99"}, mx.load(str(target / "model.safetensors"))
    )
    refused(target, foreign, "a model of 5 layers, model_type 'phi99'; a drafter is .*EAGLE-3.*, or a block drafter")
    without = tiny.save(tmp_path / "without", C, {n: a for n, a in w.items() if n != "fc.weight"})
    refused(target, without, "tensor fc.weight is missing")
    with pytest.raises(ValueError, match=r"tensor fc\.weight is missing"):
        open_drafter(without)
    large = {**TWO, "vocab_size": 12}
    refused(target, block_drafters.save(tmp_path / "few", large), "made for 12 tokens, the target has 13")
    refused(target, path, "block drafters have no 'fuse'; allowed is capture", mtp_overrides={"fuse": "he"})


def test_nothing_is_left_of_a_drafter_that_is_refused(tmp_path, target, plain):
    model = mlx_mtp.load_model(target, draft_model=block_drafters.save(tmp_path / "d", C))
    drafter = model.drafter
    assert text(model) == text(model, 0) == plain
    assert model.max_draft_tokens == 15
    model.drafter = None
    assert (model.max_draft_tokens, model.taps, "drafter" in model) == (0, (), False)
    assert text(model, 0) == plain
    assert drafter.most == 15


def test_prefixes_and_flat_configs(tmp_path, target):
    """`model.` before every name, the keys of `dflash_config` at the top level, and layers that are not listed."""
    w = {f"model.{name}": tensor for name, tensor in block_drafters.weights(C).items()}
    flat = {name: value for name, value in C.items() if name != "dflash_config"} | C["dflash_config"]
    model = mlx_mtp.load_model(target, draft_model=tiny.save(tmp_path / "flat", flat, w))
    assert (model.drafter.reads, model.drafter.windows) == ((1, 2), (None, 7))
    default = {**nested(C, target_layer_ids=None), "num_target_layers": 5, "layer_types": None}
    model = mlx_mtp.load_model(target, draft_model=tiny.save(tmp_path / "default", default, w))
    assert (model.drafter.reads, model.drafter.windows) == ((2, 3), (None, None))


COUNTS = [
    (C, {}, 15, False),
    (C, {"block_size": 8}, 7, False),
    (SPARK, {"block_size": 9}, 9, True),
    (SPARK, {"block_size": 9, "sample_from_anchor": False}, 9, False),
    (SPARK, {"block_size": 9, "dspark_bonus_anchor": True}, 8, True),
    (SPEC, {"block_size": 8}, 7, False),
    (SPEC, {"block_size": 8, "sample_from_anchor": True}, 8, True),
]


@pytest.mark.parametrize(("config", "changes", "drafts", "anchored"), COUNTS)
def test_how_many_rows_draft(tmp_path, target, plain, config, changes, drafts, anchored):
    model = mlx_mtp.load_model(target, draft_model=block_drafters.save(tmp_path, {**config, **changes}))
    assert (model.max_draft_tokens, model.drafter.net.shape.anchored) == (drafts, anchored)
    assert text(model, drafts) == plain


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads(tmp_path, target, plain, kind):
    config = {**SPARK, "markov_head_type": kind}
    w, rank = block_drafters.weights(config), 6
    name, rows, columns = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}[kind]
    w[f"markov_head.{name}.weight"] = mx.random.normal((rows * rank, columns * rank + 32), key=mx.random.key(0))
    w[f"markov_head.{name}.bias"] = mx.ones(rows * rank)
    model = mlx_mtp.load_model(target, draft_model=tiny.save(tmp_path, config, w))
    assert text(model) == plain


def test_float16_targets_have_drafters_in_float32(tmp_path, target):
    path = block_drafters.save(tmp_path / "d", TWO)
    for dtype, expected in ((mx.float16, mx.float32), (mx.bfloat16, mx.bfloat16), (mx.float32, mx.float32)):
        w = {n: a.astype(dtype) for n, a in mx.load(str(target / "model.safetensors")).items()}
        other = tiny.save(tmp_path / str(dtype), json.loads((target / "config.json").read_text()), w)
        model = mlx_mtp.load_model(other, draft_model=path)
        assert model.drafter.net.dtype == expected
        assert text(model) == text(model, 0)


def test_quantized_drafters_on_devices_without_bfloat16(tmp_path, target, monkeypatch):
    monkeypatch.setattr("mlx_mtp.checkpoint.block_drafter.has_bfloat16", lambda: False)
    w = {n: a.astype(mx.bfloat16) for n, a in mx.load(str(target / "model.safetensors")).items()}
    target = tiny.save(tmp_path / "target", json.loads((target / "config.json").read_text()), w)
    released = block_drafters.save(tmp_path / "released", C)
    mlx_mtp.convert(released, tmp_path / "quantized", quantize=True, q_group_size=32, q_bits=8)
    for name, expected in (("released", mx.bfloat16), ("quantized", mx.float32)):
        assert mlx_mtp.load_model(target, draft_model=tmp_path / name).drafter.net.dtype == expected


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"q_bits": 4}, {4}),
        ({"q_bits": 4, "mtp_q_bits": 16}, set()),
        ({"q_bits": 4, "mtp_q_bits": 6, "mtp_q_group_size": 32}, {6}),
        ({"mtp_q_bits": 16}, set()),
    ],
)
def test_bits_of_heads_override_the_targets_in_a_converted_drafter(tmp_path, options, bits):
    released = block_drafters.save(tmp_path / "released", C)
    mlx_mtp.convert(released, tmp_path / "mlx", quantize=True, q_group_size=32, **options)
    stored = mx.load(str(next((tmp_path / "mlx").glob("*.safetensors"))))
    scales = {name.removesuffix("scales"): w.shape[-1] for name, w in stored.items() if name.endswith("scales")}
    assert {stored[f"{name}weight"].shape[-1] // groups for name, groups in scales.items()} == bits


@pytest.mark.parametrize("kind", KINDS)
def test_converted_drafters(tmp_path, target, plain, kind):
    """Matrices in 8 bits; codebooks, convolutions, norms and what fuses inputs as they were."""
    released = block_drafters.save(tmp_path / "released", KINDS[kind])
    mlx_mtp.convert(released, tmp_path / "mlx", quantize=True, q_group_size=32, q_bits=8)
    model = mlx_mtp.load_model(target, draft_model=tmp_path / "mlx")
    packed = {path for path, m in model.drafter.net.named_modules() if "scales" in m}
    assert {"layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"} <= packed
    wide = ("fc", "conv", "selector", "markov_w1", "confidence")
    assert not [path for path in packed if any(part in path for part in wide)]
    assert text(model) == plain


def test_inspect_and_report(tmp_path, target):
    drafter = block_drafters.save(tmp_path / "d", TWO)
    report = str(mlx_mtp.load_model(target, draft_model=drafter).report)
    assert f"DFlash2, 2 layers, blocks of 15 drafts, {drafter}, reading the target after layers 1, 2" in report
    result = CliRunner().invoke(main, ["inspect", str(drafter)])
    assert "DFlash2, 2 layers, blocks of 15 drafts" in result.output
    assert "MB" in result.output
