"""Load Nemotron-3: converted and quantized layouts, the released heads' names, heads of another form."""

import json

import families
import mlx.core as mx
import nemotron
import pytest
import tiny
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.models import nemotron_h

HEAD = list(nemotron.heads(nemotron.CONFIG))


def text(model, k: int = 2) -> list[int]:
    return [
        t
        for t, _, _ in mlx_mtp.generate_step([1, 2, 3, 4, 5], model, max_tokens=6, num_draft_tokens=k, adaptive=False)
    ]


def same_parameters(a, b) -> bool:
    a, b = (dict(tree_flatten(model.parameters())) for model in (a, b))
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and mx.array_equal(a[n], b[n]) for n in a)


def stacked(weights: dict[str, mx.array], plain) -> dict[str, mx.array]:
    """Return the tensors of a converted checkpoint, in mlx-lm's names and layouts, with the head."""
    renamed = {name.replace("mtp.", "backbone."): w for name, w in weights.items() if name.startswith("mtp.")}
    head = {name.replace("backbone.", "mtp."): w for name, w in plain.sanitize(renamed).items()}
    return plain.sanitize(dict(weights)) | head


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_latent"])
def test_a_converted_checkpoint_is_as_good(tmp_path, name):
    changes = {"n_routed_experts": 6} if "latent" in name else {}  # mlx-lm stacks one number of experts
    path, weights, plain = families.build(name, tmp_path / "raw", **changes)
    config = json.loads((path / "config.json").read_text())
    converted = stacked(weights, plain)
    assert any(".switch_mlp.fc1." in n and n.startswith("mtp.") for n in converted)
    assert not any(".experts." in n.replace(".shared_experts.", "") for n in converted)
    model, raw = (mlx_mtp.load_model(p) for p in (tiny.save(tmp_path / "converted", config, converted), path))
    assert text(model) == tiny.greedy(plain, [1, 2, 3, 4, 5], 6, text(raw))
    assert model.spec == raw.spec
    assert same_parameters(model, raw)


def test_a_quantized_checkpoint_decodes_the_same_with_drafts(tmp_path):
    path, weights, plain = families.build("nemotron_h", tmp_path / "raw", moe_intermediate_size=32)
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    packed = {}
    for name, w in stacked(weights, plain).items():
        base = name.removesuffix("weight")
        if w.ndim < 2 or w.shape[-1] % 32 or ".gate." in name or "conv1d" in name:
            packed[name] = w
        else:
            packed[name], packed[f"{base}scales"], packed[f"{base}biases"] = mx.quantize(w, group_size=32, bits=8)
    model = mlx_mtp.load_model(tiny.save(tmp_path / "packed", config, packed))
    assert "8-bit affine g32" in model.report.target_quantization
    assert "8-bit affine g32" in model.report.head_quantization
    assert text(model, 3) == text(model, 0)


@pytest.mark.parametrize(("config", "tensors"), [("CONFIG", 270), ("LATENT", 1040)])
def test_the_released_heads_names(config, tensors):
    """Nemotron-3.5 Lightning's head has 270 tensors with 128 experts; Nemotron-3 Super's has 1,040 with 512."""
    config = {**getattr(nemotron, config), "mtp_n_routed_experts": 128 if tensors == 270 else 512}
    names = list(nemotron.heads(config))
    assert len(names) == tensors
    model = nemotron_h.Model(nemotron_h.ModelArgs.from_dict(config), heads=1)
    parameters = {name for name, _ in tree_flatten(model.parameters()) if name.startswith("mtp.")}
    assert {path for name in names for path in model.renamed(name)} == parameters


WRONG = [
    ({"mtp_hybrid_override_pattern": "*-"}, {}, r"mtp_hybrid_override_pattern: \*-; allowed is \*E"),
    ({"hybrid_override_pattern": "MEM*-MX"}, {}, r"hybrid_override_pattern: X; allowed are M, \*, - and E"),
    ({"mtp_n_routed_experts": 5}, {}, r"mtp\.layers\.1\.mixer\.experts\.4\.(up|down)_proj\.weight is missing"),
    (
        {},
        {"mtp.layers.2.norm.weight": (32,)},
        r"mtp\.layers\.2\.norm\.weight is not part of .* made of layers\.0\.enorm",
    ),
    ({}, {"mtp.layers.0.q_norm.weight": (16,)}, r"mtp\.layers\.0\.q_norm\.weight is not part of the model"),
    ({}, {"backbone.layers.7.norm.weight": (32,)}, r"backbone\.layers\.7\.norm\.weight is not part of the model"),
]


@pytest.mark.parametrize(("changes", "more", "message"), WRONG)
def test_errors_are_named(tmp_path, changes, more, message):
    path, weights, _ = families.build("nemotron_h", tmp_path)
    config = {**json.loads((path / "config.json").read_text()), **changes}
    tiny.save(path, config, weights | {name: mx.ones(shape) for name, shape in more.items()})
    with pytest.raises(ValueError, match=message) as error:
        mlx_mtp.load_model(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (".experts.", r"tensor mtp\.layers\.1\.mixer\.experts\.\*\.up_proj\.weight is missing"),
        ("layers.0.", r"tensor mtp\.layers\.0\.\S+ is missing"),
        ("layers.1.", r"tensor mtp\.layers\.1\.\S+ is missing"),
        ("layers.1.final_layernorm", r"tensor mtp\.layers\.1\.final_layernorm\.weight is missing"),
    ],
)
def test_a_part_of_the_head_is_missing(tmp_path, part, message):
    path, weights, _ = families.build("nemotron_h", tmp_path)
    gone = {name for name in HEAD if part in name and "shared_experts" not in name}
    config = json.loads((path / "config.json").read_text())
    tiny.save(path, config, {name: w for name, w in weights.items() if name not in gone})
    with pytest.raises(ValueError, match=message):
        mlx_mtp.load_model(path)


def test_a_zeroed_head_is_refused(tmp_path):
    path, weights, _ = families.build("nemotron_h", tmp_path)
    name = "mtp.layers.0.mixer.o_proj.weight"
    tiny.save(path, json.loads((path / "config.json").read_text()), weights | {name: mx.zeros_like(weights[name])})
    with pytest.raises(ValueError, match=f"tensor {name} holds only zeros"):
        mlx_mtp.load_model(path)


def test_a_cache_of_another_pattern_is_refused(tmp_path):
    models = []
    for i, pattern in enumerate(("MEM*-ME", "ME*E*ME-M")):
        path, _, _ = families.build("nemotron_h", tmp_path / str(i), hybrid_override_pattern=pattern)
        models.append(mlx_mtp.load_model(path))
    cache = mlx_mtp.make_prompt_cache(models[0])
    assert [c.is_state for c in cache.layers] == [True, True, False, True]
    list(mlx_mtp.generate_step([1, 2, 3], models[0], max_tokens=4, prompt_cache=cache))
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    with pytest.raises(ValueError, match="made with another model"):
        mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", models[1])
