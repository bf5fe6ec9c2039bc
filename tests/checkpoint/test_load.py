"""Load layouts that work, and get one-line errors for those that do not."""

import json
import struct

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten
from step_checkpoints import CONFIG, DAMAGE, converted, head_names
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.files import read_header

PROMPT = [1, 2, 3, 0, 4, 2, 1, 3, 0, 1, 2, 2]


def text(model, k=None, n=5):
    return [t for t, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=n, num_draft_tokens=k, adaptive=False)]


def rows_of_heads(model) -> list:
    """Return each head's output rows for the prompt, from the target's rows."""
    cache, tokens = mlx_mtp.make_prompt_cache(model), mx.array(PROMPT)[None]
    hidden = model.capture(model.hidden(tokens, cache.layers)[:, :-1])
    heads = zip(model.mtp, cache.heads, strict=True)
    return [head(model.embed(tokens[:, 1:], i), hidden, kept) for i, (head, kept) in enumerate(heads)]


def assert_alike(ours, theirs):
    """Assert that two loads have the same facts and equal parameters, and therefore the same drafts."""
    assert ours.spec == theirs.spec
    ours, theirs = (dict(tree_flatten(model.parameters())) for model in (ours, theirs))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def raw():
    weights = tiny.random_weights(CONFIG, seed=2)
    return weights, tiny.greedy(tiny.plain_model(CONFIG, weights), PROMPT, 5)


@pytest.fixture(scope="module")
def as_usual(raw, tmp_path_factory):
    """The model of the raw checkpoint in one file, which no test changes."""
    return mlx_mtp.load_model(tiny.save(tmp_path_factory.mktemp("usual"), CONFIG, raw[0]))


@pytest.fixture
def whole(tmp_path, raw):
    """The raw checkpoint in one file."""
    return tiny.save(tmp_path / "whole", CONFIG, raw[0])


def test_sharded_equals_whole(tmp_path, raw, as_usual):
    weights, expected = raw
    path, names = tmp_path / "sharded", sorted(weights)
    tiny.save(path, CONFIG, {}, file="unused.safetensors")
    files = {n: f"model-0000{i % 3}.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        mx.save_safetensors(str(path / file), {n: weights[n] for n in names if files[n] == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = mlx_mtp.load_model(path)
    assert text(model) == expected
    assert_alike(model, as_usual)
    stats = mlx_mtp.Stats()
    list(mlx_mtp.generate_step(PROMPT, model, max_tokens=20, adaptive=False, stats=stats))
    assert sum(stats.accepted) > 0

    (path / "model-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00001\.safetensors: missing; model\.safetensors\.index\.json"):
        mlx_mtp.load_model(path)


@pytest.mark.parametrize("where", ["mtp.safetensors", "mtp/a.safetensors", "model-mtp-head.safetensors", "elsewhere"])
def test_sidecars(tmp_path, raw, as_usual, where):
    weights, expected = raw
    heads = {n: weights[n] for n in head_names(weights)}
    path = tiny.save(tmp_path / "split", CONFIG, {n: w for n, w in weights.items() if n not in heads})
    file = (tmp_path if where == "elsewhere" else path) / where
    file.parent.mkdir(exist_ok=True)
    options = {}
    if where == "elsewhere":
        file = tmp_path / "heads.safetensors"
        options = {"mtp_path": file}
    mx.save_safetensors(str(file), heads)
    model = mlx_mtp.load_model(path, **options)
    assert file.name in model.report.source
    assert text(model) == expected
    assert_alike(model, as_usual)


def test_mtp_path_replaces_the_checkpoints_own_heads(tmp_path, raw, whole):
    other = tiny.random_weights(CONFIG, seed=9)
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {n: other[n] for n in head_names(other)})
    model = mlx_mtp.load_model(whole, mtp_path=tmp_path / "other.safetensors")
    assert mx.array_equal(model.mtp[1].eh_proj.weight, other["model.layers.5.eh_proj.weight"])
    assert text(model) == raw[1]
    with pytest.raises(ValueError, match=r"mtp_path=.*nothing: no such file"):
        mlx_mtp.load_model(whole, mtp_path=tmp_path / "nothing")


@pytest.mark.parametrize("sidecar", ["shifted", "raw"])
def test_converted_by_mlx_lm(tmp_path, raw, as_usual, sidecar):
    """Norms are shifted once per container: a raw sidecar of a converted trunk is recognised."""
    weights, expected = raw
    path = converted(tmp_path / "converted", CONFIG, weights, heads=sidecar == "shifted")
    if sidecar == "raw":
        mx.save_safetensors(str(path / "mtp.safetensors"), {n: weights[n] for n in head_names(weights)})
    model = mlx_mtp.load_model(path)
    for (name, a), (_, b) in zip(tree_flatten(model.parameters()), tree_flatten(as_usual.parameters()), strict=True):
        assert mx.allclose(a, b, atol=1e-6), name
    assert text(model) == expected


def test_a_dense_raw_trunk_is_shifted(tmp_path):
    config = {**CONFIG, "moe_layers_enum": "99"}
    weights = tiny.random_weights(config, seed=1)
    model = mlx_mtp.load_model(tiny.save(tmp_path, config, weights))
    assert mx.allclose(model.model.norm.weight, weights["model.norm.weight"] + 1)
    assert mx.allclose(model.mtp[2].enorm.weight, weights["model.layers.6.enorm.weight"] + 1)


@pytest.mark.parametrize("bits", sampled([4], [4, 8]))
def test_quantized_trunk_with_full_precision_heads(tmp_path, bits):
    """mlx-lm always quantizes routers to 8 bits, so config.json lists each."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "share_expert_dim")
    config = {**CONFIG, **dict.fromkeys(sizes, 64)}
    path = converted(tmp_path, config, tiny.random_weights(config), bits=bits)
    assert "model.layers.1.mlp.gate.gate" in json.loads((path / "config.json").read_text())["quantization"]
    model = mlx_mtp.load_model(path)
    assert f"{bits}-bit affine g32" in model.report.target_quantization
    assert "8-bit affine g64 (3 modules)" in model.report.target_quantization
    assert model.report.head_quantization == "not quantized (float32)"
    assert text(model, 3) == text(model, 0)


def test_per_module_quantization_and_quantized_heads(tmp_path, raw):
    """8-bit LM heads, 4-bit blocks, unquantized eh_proj: each keeps its bits, also without config.json's entry."""
    weights, expected = raw
    heads = {}
    for name in head_names(weights):
        w = weights[name]
        quantized = w.ndim == 2 and "eh_proj" not in name and w.shape[1] % 32 == 0
        if not quantized:
            heads[name] = w + 1 if name.endswith("norm.weight") else w
            continue
        bits = 8 if "shared_head" in name else 4
        base = name.removesuffix("weight")
        heads[name], heads[f"{base}scales"], heads[f"{base}biases"] = mx.quantize(w, group_size=32, bits=bits)
    path = converted(tmp_path, CONFIG, weights, heads=False)
    mx.save_safetensors(str(path / "mtp.safetensors"), heads)
    model = mlx_mtp.load_model(path)
    kinds = {type(m).__name__ for m in (model.mtp[0].head, model.mtp[0].block.self_attn.q_proj)}
    assert kinds == {"QuantizedLinear"}
    assert (model.mtp[0].head.bits, model.mtp[0].block.self_attn.q_proj.bits) == (8, 4)
    assert type(model.mtp[0].eh_proj) is nn.Linear
    assert text(model, 3) == expected


def test_mtp_false_allocates_no_heads(whole, raw):
    model = mlx_mtp.load_model(whole, mtp=False)
    assert not any(name.startswith("mtp") for name, _ in tree_flatten(model.parameters()))
    assert model.report.heads == model.report.head_bytes == 0
    assert text(model) == raw[1]


def test_no_heads_is_one_warning_and_decodes(tmp_path, raw):
    weights, expected = raw
    trunk = {n: w for n, w in weights.items() if n not in head_names(weights)}
    path = tiny.save(tmp_path, CONFIG, trunk)
    with pytest.warns(UserWarning, match="no MTP heads found") as caught:
        model = mlx_mtp.load_model(path)
    assert len(caught) == 1
    assert text(model) == expected
    assert "0 of 3 declared" in str(model.report)


def test_config_cut_to_its_layers(tmp_path, raw, as_usual):
    """Heads without entries in per-layer lists have a sliding window, theta 1e4 and full rotary dimensions."""
    weights, expected = raw
    cut = {**CONFIG, **{n: CONFIG[n][:4] for n in ("layer_types", "rope_theta", "partial_rotary_factors")}}
    cut.pop("num_nextn_predict_layers")
    model = mlx_mtp.load_model(tiny.save(tmp_path / "cut", cut, weights))
    assert text(model) == expected
    assert model.head_windows() == as_usual.head_windows() == [8] * 3
    assert all(map(mx.array_equal, rows_of_heads(model), rows_of_heads(as_usual)))


def test_step3p7_is_a_wrapper(tmp_path, raw):
    weights, expected = raw
    inner = {n: v for n, v in CONFIG.items() if n != "model_type"}
    config = {"model_type": "step3p7", "text_config": inner}
    vision = {"vision_model.conv1.weight": mx.ones((2, 2)), "vit_large_projector.weight": mx.ones((2, 2))}
    model = mlx_mtp.load_model(tiny.save(tmp_path, config, weights | vision))
    assert text(model) == expected
    assert model.report.ignored == ("vision_model.*", "vit_large_projector.*")


def test_every_tensor_is_used(whole, raw, as_usual):
    """Each tensor of the checkpoint becomes exactly one parameter, and each parameter comes from one."""
    weights, _ = raw
    model = as_usual
    paths = [path for name in weights for path in model.renamed(name)]
    assert sorted(paths) == sorted(name for name, _ in tree_flatten(model.parameters()))
    assert set(read_header([whole / "model.safetensors"])) == set(weights)


def test_half_precision_experts_on_a_cpu(tmp_path, raw):
    weights = {n: w.astype(mx.bfloat16) for n, w in raw[0].items()}
    model = mlx_mtp.load_model(tiny.save(tmp_path, CONFIG, weights))
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert model.report.expanded == on_cpu
    assert len(text(model)) == 5


def test_lazy(whole, raw):
    assert text(mlx_mtp.load_model(whole, lazy=True)) == raw[1]


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_weights(tmp_path, raw, case):
    weights, (damage, message) = dict(raw[0]), DAMAGE[case]
    damage(weights)
    path = tiny.save(tmp_path, CONFIG, weights)
    with pytest.raises(ValueError, match=message) as error:
        mlx_mtp.load_model(path)
    assert str(path) in one_line(error)


CONTRADICTIONS = {
    "fewer layers": ({"num_hidden_layers": 3}, "config.json expects 3 layers"),
    "more layers": ({"num_hidden_layers": 5}, "is not part of the model|is missing"),
    "another width": ({"hidden_size": 64}, r"model\.embed_tokens\.weight has shape \(5, 32\); .*\(5, 64\)"),
    "another vocabulary": ({"vocab_size": 6}, r"has shape \(5, 32\); config\.json expects \(6, 32\)"),
    "another head count": ({"num_attention_heads": 2}, r"layers\.0\.self_attn\..* has shape"),
    "not a number": ({"hidden_size": "wide"}, r"config\.json: the model cannot be built"),
    "layers not a number": ({"num_hidden_layers": None}, r"config\.json: num_hidden_layers is None"),
    "a field is missing": ({"vocab_size": ...}, r"config\.json: .*'vocab_size'"),
    "an unknown model": ({"model_type": "gpt9"}, r"model_type 'gpt9' is unknown; known are .*step3p5"),
    "no model_type": ({"model_type": ...}, "expected an object with a model_type"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_config_that_contradicts_the_tensors(tmp_path, raw, case):
    change, message = CONTRADICTIONS[case]
    config = {n: v for n, v in {**CONFIG, **change}.items() if v is not ...}
    path = tiny.save(tmp_path, config, raw[0])
    with pytest.raises(ValueError, match=message) as error:
        mlx_mtp.load_model(path)
    assert str(path) in one_line(error)


def truncate(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


BROKEN_FILES = {
    "cut in the data": lambda path: truncate(path / "model.safetensors", 0.9),
    "cut in the header": lambda path: truncate(path / "model.safetensors", 0.001),
    "empty": lambda path: (path / "model.safetensors").write_bytes(b""),
    "header too long": lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}"),
    "a cut sidecar": lambda path: (path / "mtp.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_truncated_files(whole, case):
    BROKEN_FILES[case](whole)
    file = "mtp" if "sidecar" in case else "model"
    with pytest.raises(ValueError, match=rf"{file}\.safetensors: truncated or damaged") as error:
        mlx_mtp.load_model(whole)
    one_line(error)


def test_not_a_checkpoint(tmp_path, whole):
    cases = {
        tmp_path / "none": "no such directory",
        tmp_path: r"config\.json: not found",
        whole / "config.json": "not a directory",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            mlx_mtp.load_model(path)
        one_line(error)
    (whole / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        mlx_mtp.load_model(whole)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"no model\*\.safetensors in it"):
        mlx_mtp.load_model(tmp_path)


def test_tokenizer_is_missing(whole):
    with pytest.raises(ValueError, match="no usable tokenizer") as error:
        mlx_mtp.load(whole)
    one_line(error)


def test_random_weights_are_what_the_tests_think(raw):
    assert len(head_names(raw[0])) == 3 * 17
    assert np.isclose(float(raw[0]["model.norm.weight"].mean()), 0, atol=0.1)
