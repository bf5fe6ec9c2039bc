"""Adapters on quantized targets, and sums of adapters: logits equal those of merged weights from numpy."""

import json
from functools import partial

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint import load as loading
from mlx_mtp.checkpoint.adapters import by_name
from mlx_mtp.checkpoint.load import _adapted

TOKENS = mx.array([[1, 2, 3, 4, 5, 6]])
CONFIG = {
    **families.GLM,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "num_nextn_predict_layers": 0,
    "num_hidden_layers": 2,
}
FORMATS = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)] + [
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
QUERY, UP, DOWN = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.switch_mlp.up_proj",
    "model.layers.0.mlp.down_proj",
)
VALUES, GATE = "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.switch_mlp.gate_proj"
PEFT, DORA = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}, {"rank": 2, "scale": 1.5, "dropout": 0.0}

load_model = partial(loading.load_model, lazy=True)  # nothing is damaged, and there are no heads to test


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Ignore the warnings about models without heads."""


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.2


def save(path, config, file, tensors, dtype=mx.float32):
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / file), {name: mx.array(w).astype(dtype) for name, w in tensors.items()})
    return path


def peft(path, weights, seed=0, scale=2.0, rank=3, modules=(QUERY, UP), experts=(0, 2), dtype=mx.float32):
    """Save an adapter in PEFT's form; return it, and the changes of the weights that it adds."""
    tensors, changes = {}, {}
    for i, name in enumerate(modules):
        *stacked, size, width = weights[f"{name}.weight"].shape
        changes[name] = np.zeros((*stacked, size, width), np.float32)
        for e in experts if stacked else (None,):
            a, b = draw(seed + 10 * i + (e or 0), rank, width), draw(seed + 5 + 10 * i + (e or 0), size, rank)
            changes[name][e if stacked else ...] = scale * b @ a
            stored = name.replace("switch_mlp", f"experts.{e}")
            tensors |= {f"base_model.model.{stored}.lora_{k}.weight": w for k, w in (("A", a), ("B", b))}
    config = {**PEFT, "r": rank, "lora_alpha": scale * rank}
    return save(path, config, "adapter_model.safetensors", tensors, dtype), changes


def of_mlx_lm(path, weights, kind, seed=20, modules=(GATE, VALUES)):
    """Save an adapter in mlx-lm's form, of kind "lora" or "dora"; return it and its new weights as a function."""
    tensors, changes = {}, {}
    for i, name in enumerate(modules):
        *stacked, size, width = weights[f"{name}.weight"].shape
        a, b = draw(seed + i, *stacked, 2, width), draw(seed + 7 + i, *stacked, size, 2)
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = (a, b) if stacked else (a.T, b.T)
        changes[name] = 1.5 * b @ a
        if kind == "dora":
            m, adapted = 1 + draw(seed + 3, size) ** 2, np.array(weights[f"{name}.weight"]) + changes[name]
            tensors[f"{name}.m"] = m
            changes[name] += (m / np.linalg.norm(adapted, axis=1) - 1)[:, None] * adapted
    keys = [name.partition("layers.")[2].partition(".")[2] for name in modules]
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": {**DORA, "keys": keys}}
    return save(path, config, "adapters.safetensors", tensors), changes


def quantized(path, mode, bits, group, dtype=mx.float32):
    """Return (checkpoint, config.json without quantization, dequantized weights) of a mixture of experts."""
    _, plain = families.headless(path / "whole", CONFIG)
    plain.set_dtype(dtype)
    plain, config = quantize_model(plain, dict(CONFIG), group, bits, mode=mode)
    stored = dict(tree_flatten(plain.parameters()))
    weights = {name: w for name, w in stored.items() if not name.endswith((".scales", ".biases"))}
    for name in (name.removesuffix(".scales") for name in stored if name.endswith(".scales")):
        parts = [stored[f"{name}.weight"], stored[f"{name}.scales"], stored.get(f"{name}.biases")]
        weights[f"{name}.weight"] = mx.dequantize(*parts, group, bits, mode, dtype=mx.float32)
    return tiny.save(path / "small", config, stored), {n: w.astype(mx.float32) for n, w in weights.items()}


def merged(path, weights, *changes):
    weights = dict(weights)
    for change in changes:
        for name, delta in change.items():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + mx.array(delta)
    return load_model(tiny.save(path, CONFIG, weights))


@pytest.mark.parametrize("form", sampled([FORMATS[1], FORMATS[2], *FORMATS[-3:]], FORMATS))
def test_every_format_with_peft_and_dora_together(tmp_path, form):
    """Experts included; the quantized modules stay as they are."""
    path, weights = quantized(tmp_path, *form)
    one, added = peft(tmp_path / "one", weights, modules=(QUERY, UP, DOWN))
    other, changed = of_mlx_lm(tmp_path / "other", weights, "dora", modules=(VALUES, QUERY))
    expected = merged(tmp_path / "merged", weights, added, changed)(TOKENS)
    model = load_model(path)
    plain = model(TOKENS)
    for order in ([one, other], [other, str(one)]):
        model = _adapted(load_model(path), order)
        assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=2e-3)
        assert not mx.allclose(plain, expected, atol=0.05)
    assert dict(model.named_modules())[UP].linear.bits == form[1]


def test_adapters_in_half_precision_on_experts(tmp_path):
    """MLX multiplies experts on a CPU in float32 only."""
    path, weights = quantized(tmp_path, "affine", 8, 32, mx.bfloat16)
    one, added = peft(tmp_path / "one", weights, modules=(QUERY, UP, GATE), dtype=mx.bfloat16)
    expected = merged(tmp_path / "merged", weights, added)(TOKENS)
    plain, found = load_model(path)(TOKENS), _adapted(load_model(path), one)(TOKENS)
    assert found.dtype == mx.bfloat16
    assert mx.abs(found - expected).mean() < 0.1 * mx.abs(plain - expected).mean()


def test_mlx_lms_experts_around_pefts(tmp_path):
    """Of different ranks around the same modules; the order changes rounding only."""
    path, weights = quantized(tmp_path, "mxfp4", 4, 32)
    one, added = peft(tmp_path / "one", weights)
    two, second = peft(tmp_path / "two", weights, seed=50, rank=1, modules=(UP, QUERY), experts=(2, 3))
    three, third = of_mlx_lm(tmp_path / "three", weights, "lora", modules=(UP, QUERY, GATE))
    expected = merged(tmp_path / "merged", weights, added, second, third)(TOKENS)
    for order in ([one, two, three], [three, one, two]):
        assert mx.allclose(_adapted(load_model(path), order)(TOKENS), expected, rtol=1e-3, atol=2e-3)


def test_adapters_by_name_leave_the_model_alone(tmp_path):
    path, weights = quantized(tmp_path, "affine", 4, 32)
    paths = [peft(tmp_path / "one", weights)[0], of_mlx_lm(tmp_path / "other", weights, "dora", modules=(QUERY,))[0]]
    plain, model = load_model(path)(TOKENS), _adapted(load_model(path), by_name(paths))
    modules = {name: id(module) for name, module in model.named_modules()}
    assert model.runtime.adapters.names == ("one", "other")
    for name, adapter in (("one", paths[0]), ("other", paths[1]), ("one", paths[0])):
        model.runtime.adapters.select(name)
        assert mx.array_equal(model(TOKENS), _adapted(load_model(path), adapter)(TOKENS))
        assert model.runtime.adapters.fingerprint
    model.runtime.adapters.select(None)
    assert mx.array_equal(model(TOKENS), plain)
    assert {name: id(module) for name, module in model.named_modules()} == modules
    with pytest.raises(ValueError, match=r"adapter='two': allowed are 'one', 'other', None"):
        model.runtime.adapters.select("two")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_quantized_embedding(tmp_path, kind):
    """mlx-lm has no DoRA of one."""
    path, weights = quantized(tmp_path, "affine", 6, 32)
    a, b = draw(1, len(weights["model.embed_tokens.weight"]), 2), draw(2, 2, 64)
    name, keys = "model.embed_tokens", {"keys": ["model.embed_tokens"]}
    tensors = {f"{name}.lora_a": a, f"{name}.lora_b": b}
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": {**DORA, **keys}}
    adapter = save(tmp_path / "adapter", config, "adapters.safetensors", tensors)
    if kind == "dora":
        with pytest.raises(ValueError, match=f"DoRA of {name}, a quantized embedding, is not supported; load"):
            _adapted(load_model(path), adapter)
        return
    expected = merged(tmp_path / "merged", weights, {name: 1.5 * a @ b})(TOKENS)
    assert mx.allclose(_adapted(load_model(path), adapter)(TOKENS), expected, rtol=1e-3, atol=2e-3)


def whole(path, weights, name):
    return save(
        path, {"fine_tune_type": "full"}, "adapters.safetensors", {f"{name}.weight": weights[f"{name}.weight"]}
    )


def test_what_cannot_be_added_up(tmp_path):
    """Two DoRA or whole weights of one module; LoRA is added to either, and different modules do not meet."""
    path, _ = families.headless(tmp_path / "base", CONFIG)
    weights = dict(mx.load(str(path / "model.safetensors")))
    dora = [of_mlx_lm(tmp_path / f"dora{i}", weights, "dora", seed=i, modules=(QUERY,))[0] for i in (1, 2)]
    full = [whole(tmp_path / f"full{i}", weights, QUERY) for i in (1, 2)]
    for pair in (dora, full, [dora[0], full[0]], [full[1], dora[1]]):
        with pytest.raises(
            ValueError, match=rf"{pair[0].name} and {pair[1].name}: both have .* for {QUERY}, .*"
        ) as e:
            _adapted(load_model(path), pair)
        assert "\n" not in str(e.value)
    lora, added = peft(tmp_path / "lora", weights)
    double = {name: 2 * w for name, w in weights.items()}
    twice = merged(tmp_path / "merged", {**weights, f"{QUERY}.weight": double[f"{QUERY}.weight"]}, added)
    for order in ([lora, whole(tmp_path / "twice", double, QUERY)], [whole(tmp_path / "twice", double, QUERY), lora]):
        assert mx.allclose(_adapted(load_model(path), order)(TOKENS), twice(TOKENS), rtol=1e-3, atol=1e-4)
    _adapted(load_model(path), [dora[0], whole(tmp_path / "values", weights, VALUES)])


def test_directories_given_twice_or_with_one_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a/one", "b/one"):
        (tmp_path / path).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^adapter_path=b/\.\./a/one: given twice$"):
        by_name(["a/one", "b/../a/one"])
    with pytest.raises(ValueError, match=r"^adapter_path=b/one: a/one has the name 'one', too; rename one"):
        by_name(["a/one", "b/one"])
    with pytest.raises(ValueError, match=r"^adapter_path=a/one: given twice$"):
        mlx_mtp.load(families.headless(tmp_path / "base", CONFIG)[0], adapter_path=["a/one", "a/one"])
