"""Load heads from the released checkpoint, and mlx-vlm's drafters."""

import json
from pathlib import Path

import drafters
import families
import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.inspect import inspect_checkpoint

PARTS = {"norm": "shared_head_norm", "head": "lm_head", "block": "mtp_block"}  # mlx-vlm's names


def parameters(model) -> dict:
    return dict(tree_flatten(model.parameters()))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module", params=["mimo_v2_flash", "qwen3_5_moe", "glm4_moe_lite", "glm_moe_dsa_shared"])
def released(request, tmp_path_factory):
    """(the released checkpoint, its model, a conversion without heads)"""
    path = tmp_path_factory.mktemp(request.param)
    hub, _, _ = families.build(request.param, path / "hub")
    new = convert(hub, path / "new").path
    for name in ("mtp.safetensors", "model.safetensors.index.json"):
        (new / name).unlink()
    return hub, mlx_mtp.load_model(hub, lazy=True), new


@pytest.mark.parametrize("given", ["directory", "shard"])
def test_heads_of_the_released_checkpoint_for_a_conversion_without(released, given):
    hub, model, new = released
    heads = hub if given == "directory" else hub / "model.safetensors"
    separate = mlx_mtp.load_model(new, mtp_path=heads, lazy=True)
    assert same(parameters(separate), parameters(model))
    assert str(hub) in separate.report.source


def test_a_checkpoint_that_has_no_heads_either(released):
    _, _, new = released
    with pytest.raises(ValueError, match=f"^mtp_path={new}: none of its tensors is an MTP head's, expected "):
        mlx_mtp.load_model(new, mtp_path=new)


def split(model, hub: Path, path: Path) -> Path:
    """Write heads as mlx-vlm's `split_mtp` does, in the family's layout."""
    config, heads = json.loads((hub / "config.json").read_text()), {}
    for name, w in parameters(model).items():
        if name.startswith("mtp.0."):
            part, dot, inside = name[6:].partition(".")
            if config["model_type"] == "glm4_moe_lite":
                new = f"{PARTS.get(part, part)}{dot}{inside}"
                heads[new if part == "head" else f"model.{new}"] = w
            elif config["model_type"] == "glm_moe_dsa":
                rest = inside if part == "block" else f"{PARTS.get(part, part)}{dot}{inside}"
                heads[f"mtp.{rest}".replace("lm_head", "shared_head.head")] = w
            else:
                heads[model.spec.stored(name[6:])] = w
    path.mkdir()
    text = config.get("text_config", config)
    drafter = {"model_type": "qwen3_5_mtp" if "qwen" in config["model_type"] else f"{config['model_type']}_mtp"}
    (path / "config.json").write_text(json.dumps(drafter | {"text_config": text, "block_size": 2}))
    mx.save_safetensors(str(path / "model.safetensors"), heads, {"format": "mlx"})
    return path


def test_drafters_of_mlx_vlm(released, tmp_path):
    hub, model, new = released
    if len(model.mtp) > 1:
        pytest.skip("mlx-vlm splits no such family")
    drafter = split(model, hub, tmp_path / "drafter")
    assert same(parameters(mlx_mtp.load_model(new, draft_model=drafter)), parameters(model))
    assert same(parameters(mlx_mtp.load_model(new, mtp_path=drafter, lazy=True)), parameters(model))
    assert (
        inspect_checkpoint(drafter).problems[0].endswith("a drafter, for --draft-model with its target; not a model")
    )


@pytest.mark.parametrize("bits", [None, 4])
def test_a_drafter_is_converted(tmp_path, bits):
    target, _ = families.headless(tmp_path / "target", {**drafters.GQA, "model_type": "qwen3", "head_dim": 8})
    source = drafters.save(tmp_path / "drafter", drafters.CONFIG, drafters.GQA["hidden_size"])
    options = {"quantize": True, "mtp_q_bits": bits, "mtp_q_group_size": 32} if bits else {}
    done = convert(source, tmp_path / "new", **options)
    before, after = (mlx_mtp.load_model(target, draft_model=path) for path in (source, done.path))
    if not bits:
        assert same(parameters(before.mtp[0]), parameters(after.mtp[0]))
    else:
        assert "4-bit affine g32" in done.report.head_quantization == after.report.head_quantization
        assert "scales" not in after.mtp[0].fc
        assert mx.abs(after.mtp[0].norm.weight - before.mtp[0].norm.weight).max() == 0
    tokens = [t for t, *_ in mlx_mtp.generate_step([1, 2, 3], after, max_tokens=5, num_draft_tokens=2)]
    assert tokens == [t for t, *_ in mlx_mtp.generate_step([1, 2, 3], after, max_tokens=5, num_draft_tokens=0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1', expected an integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', expected an integer"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected an integer"),
        ({"routed_scaling_factor": None}, "the model that it describes cannot run"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', expected a number"),
        ({"n_routed_experts": True}, "n_routed_experts is True, expected an integer"),
    ],
)
def test_a_number_that_is_none_is_one_line(tmp_path, change, message):
    """A conversion reports it too, although it computes nothing with it."""
    hub, _, _ = families.build("glm4_moe", tmp_path / "hub")
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | change))
    for use in (mlx_mtp.load_model, lambda path: convert(path, tmp_path / "new")):
        with pytest.raises(ValueError, match=rf"config\.json: .*{message}") as error:
            use(hub)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_bits_of_heads_that_are_not_there(tmp_path):
    path, weights, _ = families.build("glm4_moe", tmp_path / "hub")
    trunk = {name: w for name, w in weights.items() if not name.startswith("model.layers.3.")}
    tiny.save(path, json.loads((path / "config.json").read_text()), trunk)
    with pytest.raises(ValueError, match=r"^mtp_q_bits=4: the checkpoint has no MTP heads"):
        convert(path, tmp_path / "new", quantize=True, q_group_size=32, mtp_q_bits=4, mtp_q_group_size=32)
