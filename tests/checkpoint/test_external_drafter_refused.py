"""Refuse directories without a drafter, and drafters for another target, with a one-line reason."""

import drafters
import families
import mlx.core as mx
import pytest
import tiny
from click.testing import CliRunner

import mlx_mtp
from mlx_mtp.cli import main

H, V = families.H, families.V
TARGET = {**drafters.GQA, "model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 16}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return families.headless(tmp_path_factory.mktemp("target"), TARGET)[0]


def refused(target, drafter, match, **options):
    with pytest.raises(ValueError, match=match) as error:
        mlx_mtp.load_model(target, draft_model=drafter, **options)
    assert "\n" not in str(error.value)


def test_a_whole_model_of_a_family_without_a_port(tmp_path, target):
    weights = mx.load(str(target / "model.safetensors"))
    foreign = tiny.save(tmp_path, {**TARGET, "model_type": "phi99"}, weights)
    refused(target, foreign, r"a model of 4 layers, model_type 'phi99'; a drafter is an EAGLE-3 head: .*midlayer")


def test_a_head_of_the_first_two_generations(tmp_path, target):
    w = {
        n.replace("midlayer", "layers.0"): a
        for n, a in drafters.weights(drafters.CONFIG, H).items()
        if "hidden_norm" not in n
    }
    refused(target, tiny.save(tmp_path, drafters.CONFIG, w), "an EAGLE-1 or EAGLE-2 head, .* a drafter is an EAGLE-3")


def test_something_else(tmp_path, target):
    refused(target, tmp_path, r"config\.json: not found; a drafter is an EAGLE-3 head")
    (tmp_path / "config.json").write_text("{}")
    refused(target, tmp_path, r"no \*\.safetensors in it; a drafter is an EAGLE-3 head")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(target, tmp_path, r"PyTorch's \.bin format; save them as model\.safetensors")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a.weight": mx.zeros(3)})
    refused(target, tmp_path, "no drafter, model_type None; a drafter is an EAGLE-3 head")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 50)
    refused(target, tmp_path, "truncated or damaged")
    (tmp_path / "config.json").write_text("[")
    refused(target, tmp_path, r"config\.json: not valid JSON")
    refused(target, tmp_path / "nowhere", "no such directory, and not a name on the hub")


CONFIGS = {
    "another activation": ({"hidden_act": "gelu"}, "hidden_act='gelu': allowed is 'silu'"),
    "more layers": ({"num_hidden_layers": 2}, "num_hidden_layers=2: allowed is 1"),
    "layers the target lacks": (
        {"eagle_aux_hidden_state_layer_ids": [2, 5, 3]},
        r"capture=\(2, 5, 3\): .*allowed are integers from 0 to 4",
    ),
    "one state": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false: allowed is true"),
    "no sizes": ({"hidden_size": None}, r"config\.json: no drafter can be built from it"),
    "another width": ({"intermediate_size": 41}, r"mlp\.\w+_proj\.weight has shape .*; config\.json expects"),
    "another vocabulary": ({"draft_vocab_size": 9}, r"(lm_head\.weight|d2t) has shape \(7,.*expects \(9,"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_does_not_fit(tmp_path, target, case):
    change, match = CONFIGS[case]
    w = drafters.weights(drafters.CONFIG, H)
    refused(target, tiny.save(tmp_path, {**drafters.CONFIG, **change}, w), match)


@pytest.mark.parametrize("name", sorted(drafters.weights(drafters.CONFIG, H)))
def test_every_tensor_is_needed(tmp_path, target, name):
    w = drafters.weights(drafters.CONFIG, H)
    del w[name]
    path = tiny.save(tmp_path, drafters.CONFIG, w)
    if name == "t2d":
        mlx_mtp.load_model(target, draft_model=path)
    elif name == "d2t":
        refused(target, path, "tensor d2t is missing; it maps the LM head's 7 tokens to the vocabulary of 13")
    elif name in ("fc.weight", "midlayer.hidden_norm.weight"):  # these identify the kind
        refused(target, path, "a drafter is an EAGLE-3 head")
    elif name == "lm_head.weight":
        refused(target, path, r"tensor lm_head\.weight is missing")
    else:
        refused(target, path, rf"tensor {name} is missing")


def test_another_target(tmp_path, target):
    wide = drafters.save(tmp_path / "wide", drafters.CONFIG, 2 * H)
    refused(target, wide, r"fc\.weight has shape \(32, 192\); .*expects \(32, 96\) \(its target has 3 x 32 fea")
    narrow = drafters.save(tmp_path / "narrow", {**drafters.CONFIG, "hidden_size": 24}, H)
    refused(target, narrow, "hidden_size 24 is not the target's 32, so the drafter needs an embedding and an LM head")
    large = drafters.save(tmp_path / "large", {**drafters.CONFIG, "vocab_size": 400}, H)
    refused(target, large, r"drafts tokens \d+ to \d+, the target has 0 to 12")
    w = drafters.weights(drafters.CONFIG, H) | {"embed_tokens.weight": mx.zeros((13, H)), "extra.weight": mx.zeros(1)}
    refused(target, tiny.save(tmp_path / "extra", drafters.CONFIG, w), r"tensor extra\.weight belongs to no part")


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.o_proj.weight", "norm.weight", "lm_head.weight"])
def test_untrained_tensors(tmp_path, target, name):
    w = drafters.weights(drafters.CONFIG, H)
    for value, words in ((0.0, "only zeros"), (float("nan"), "NaN")):
        path = tiny.save(tmp_path, drafters.CONFIG, w | {name: mx.full(w[name].shape, value)})
        refused(target, path, rf"model\.safetensors: tensor {name} holds {words}, expected trained weights")


def test_two_spellings_of_one_tensor(tmp_path, target):
    w = drafters.weights(drafters.CONFIG, H)
    for name in ("fc.weight", "midlayer.self_attn.q_proj.weight"):
        path = tiny.save(tmp_path, drafters.CONFIG, w | {f"model.{name}": w[name] + 1})
        refused(target, path, rf"tensors (model\.)?{name} and (model\.)?{name} both become")


def test_constants_are_named_as_not_used(tmp_path, target):
    w = drafters.weights(drafters.CONFIG, H)
    more = {"midlayer.self_attn.rotary_emb.inv_freq": mx.ones(6), "model.t2d": w.pop("t2d")}
    model = mlx_mtp.load_model(target, draft_model=tiny.save(tmp_path, drafters.CONFIG, w | more))
    assert set(model.report.ignored) == set(more)


def test_options_that_contradict(tmp_path, target):
    drafter = drafters.save(tmp_path, drafters.CONFIG, H)
    refused(target, drafter, "not together with mtp=False", mtp=False)
    refused(target, drafter, "not together with mtp_path=x", mtp_path="x")
    refused(target, drafter, "drafters have no 'head'; allowed are capture, fee", mtp_overrides={"head": "shared"})
    assert mlx_mtp.load_model(target, draft_model=drafter, mtp_overrides={"fuse": "he"}).spec.fuse == "he"
    refused(target, drafter, r"capture=\(9,\): .*allowed are integers from 0 to 4", mtp_overrides={"capture": 9})
    refused(
        target, drafter, r"capture=\('pre',\): .*allowed are integers from 0 to 4", mtp_overrides={"capture": "pre"}
    )
    refused(target, drafter, "feedback='x'; allowed are pre, post", mtp_overrides={"feedback": "x"})


def test_command_line(tmp_path):
    result = CliRunner().invoke(main, ["generate", "--draft-model", str(tmp_path), "-p", "x"], standalone_mode=True)
    assert result.exit_code
    assert "config.json: not found; a drafter is an EAGLE-3 head" in result.output
