"""Load every family: places of heads, modules that may repeat the target's, and damaged heads."""

import functools
import json
import re

import families
import mlx.core as mx
import pytest
import tiny
from layouts import unpacked
from mlx.utils import tree_flatten
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint.load import load_tokenizer
from mlx_mtp.cli.chat import chat
from mlx_mtp.cli.options import generation_options
from mlx_mtp.demo import demo_path

PROMPT = [1, 2, 3, 4, 5, 6, 7]
NAMES = sorted(families.FAMILIES)


def text(model, k=2, n=6):
    return [t for t, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=n, num_draft_tokens=k, adaptive=False)]


def drafted(model):
    """Return (tokens, number of accepted drafts per depth, the spec, every parameter)."""
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=4, num_draft_tokens=2, adaptive=False, stats=stats)
    return [t for t, _, _ in steps], stats.accepted, model.spec, dict(tree_flatten(model.parameters()))


def assert_alike(ours, theirs):
    """Assert that two results of `drafted` are equal, with parameters, because a short output hides small errors."""
    assert ours[:3] == theirs[:3]
    assert ours[3].keys() == theirs[3].keys()
    for name, parameter in ours[3].items():
        assert mx.array_equal(parameter, theirs[3][name]), name


@pytest.fixture(scope="module")
def drafted_as_built(tmp_path_factory):
    """Return (path, tensors, result of `drafted`) of a family's standard checkpoint."""

    @functools.cache
    def build(name):
        path, weights, _ = families.build(name, tmp_path_factory.mktemp("usual"))
        return path, weights, drafted(mlx_mtp.load_model(path, lazy=True))

    return build


def head_tensors(name: str) -> list[str]:
    return list(families.FAMILIES[name].heads(families.FAMILIES[name].config))


@pytest.mark.parametrize("name", sampled(NAMES[0::3], NAMES))
def test_a_sidecar_is_as_good(tmp_path, drafted_as_built, name):
    path, weights, whole = drafted_as_built(name)
    apart = {n: weights[n] for n in head_tensors(name)}
    config = json.loads((path / "config.json").read_text())
    path = tiny.save(tmp_path / "apart", config, {n: w for n, w in weights.items() if n not in apart})
    mx.save_safetensors(str(path / "mtp.safetensors"), apart, {"format": "pt"})
    model = mlx_mtp.load_model(path)
    assert "mtp.safetensors" in str(model.report)
    assert_alike(drafted(model), whole)


@pytest.mark.parametrize("name", sampled(NAMES[1::3], NAMES))
def test_without_heads_it_warns_and_decodes(tmp_path, name):
    path, weights, plain = families.build(name, tmp_path)
    trunk = {n: w for n, w in weights.items() if n not in head_tensors(name)}
    tiny.save(path, json.loads((path / "config.json").read_text()), trunk)
    with pytest.warns(UserWarning, match="no MTP heads found"):
        model = mlx_mtp.load_model(path)
    found = text(model, k=0)
    assert found == tiny.greedy(plain, PROMPT, 6, found)


@pytest.mark.parametrize("name", sampled(NAMES[::2], NAMES))
def test_every_head_tensor_is_needed(tmp_path, name):
    """Each missing one is an error with its name, except embeddings and LM heads that may be the target's."""
    path, weights, _ = families.build(name, tmp_path)
    config = json.loads((path / "config.json").read_text())
    needed = [n for n in head_tensors(name) if not re.search(r"embed_tokens|shared_head\.head", n)]
    for missing in needed if SWEEP else needed[NAMES.index(name) % 6 :: 6]:
        tiny.save(path, config, {n: w for n, w in weights.items() if n != missing})
        with pytest.raises(ValueError, match=r"missing|no tensors of MTP depth") as error:
            mlx_mtp.load_model(path)
        assert "\n" not in str(error.value)
        assert missing.rpartition(".")[0].rpartition(".")[2] in str(error.value), (missing, str(error.value))


OWN = ["glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"]


@pytest.mark.parametrize("name", sampled(OWN[::3], OWN))
def test_heads_of_their_own_are_kept_if_they_differ(tmp_path, name):
    path, weights, _ = families.build(name, tmp_path)
    layers = families.FAMILIES[name].config["num_hidden_layers"]
    pairs = {
        f"model.layers.{layers}.embed_tokens.weight": "model.embed_tokens.weight",
        f"model.layers.{layers}.shared_head.head.weight": "lm_head.weight",
    }
    (head,) = mlx_mtp.load_model(path).mtp
    assert {"head", "embed_tokens"} <= set(head)
    config = json.loads((path / "config.json").read_text())
    tiny.save(path, config, weights | {copy: weights[original] for copy, original in pairs.items()})
    (head,) = mlx_mtp.load_model(path).mtp
    assert not {"head", "embed_tokens"} & set(head)
    tiny.save(path, config, {n: w for n, w in weights.items() if n not in pairs})
    (head,) = mlx_mtp.load_model(path).mtp
    assert not {"head", "embed_tokens"} & set(head)


@pytest.mark.parametrize(
    ("prefix", "name"),
    paired(["mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."], ["qwen3_5", "nemotron_h"]),
)
def test_prefixes_of_unnumbered_heads(tmp_path, drafted_as_built, name, prefix):
    path, weights, usual = drafted_as_built(name)
    moved = {(prefix + n[4:] if n.startswith("mtp.") else n): w for n, w in weights.items()}
    other = tiny.save(tmp_path / "b", json.loads((path / "config.json").read_text()), moved)
    assert_alike(drafted(mlx_mtp.load_model(other, lazy=True)), usual)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(checkpoint directory, its model, a text with drafts)"""
    path, _, _ = families.build("qwen3_5", tmp_path_factory.mktemp("qwen"))
    model = mlx_mtp.load_model(path)
    return path, model, text(model)


@pytest.mark.parametrize("field", ["capture", "feedback", "fuse"])
def test_overrides_change_drafts_only(qwen, field):
    path, usual, expected = qwen
    value = {"capture": "pre", "feedback": "pre", "fuse": "he"}[field]
    changed = mlx_mtp.load_model(path, mtp_overrides={field: value}, lazy=True)
    assert getattr(changed.spec, field) == value
    assert text(changed) == expected
    hidden = mx.random.normal((1, 3, families.H))
    cache = mlx_mtp.make_prompt_cache(usual).heads[0], mlx_mtp.make_prompt_cache(changed).heads[0]
    rows = [
        m.mtp[0](m.embed(mx.array([[1, 2, 3]]), 0), m.capture(hidden), c)
        for m, c in zip((usual, changed), cache, strict=True)
    ]
    fed = [m.mtp[0].feedback(r, hidden) for m, r in zip((usual, changed), rows, strict=True)]
    assert not mx.allclose(*fed)


def test_unknown_overrides_are_refused(tmp_path):
    path, _, _ = families.build("mimo", tmp_path)
    with pytest.raises(ValueError, match=r"^mtp_overrides: 'captur' is unknown; allowed are topology, capture"):
        mlx_mtp.load_model(path, mtp_overrides={"captur": "pre"})
    with pytest.raises(ValueError, match=r"^mtp_overrides: capture='middle'; allowed are pre, post"):
        mlx_mtp.load_model(path, mtp_overrides={"capture": "middle"})


@pytest.mark.parametrize(
    ("name", "option"), paired([*OWN[1:], "glm_moe_dsa_shared", "mimo_v2_flash"], ["kv_bits", "mtp_kv_bits"])
)
def test_attention_that_cannot_be_quantized_is_refused(tmp_path, name, option):
    path, _, _ = families.build(name, tmp_path)
    with pytest.raises(ValueError, match=f"^{option}=8: not with (multi-head latent attention|attention sinks)"):
        mlx_mtp.make_prompt_cache(mlx_mtp.load_model(path, lazy=True), **{option: 8})


def blocks_of_fp8(weight: mx.array) -> tuple[mx.array, mx.array]:
    """Return a weight as 8-bit floats with one scale per 128 x 128 block; these sizes have one block."""
    scale = mx.abs(weight).max() / 448
    return mx.to_fp8(weight / scale), scale.reshape(1, 1)


@pytest.mark.parametrize("name", sampled(["glm_moe_dsa"], ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"]))
def test_fp8_heads(tmp_path, name):
    path, weights, _ = families.build(name, tmp_path / "a")
    config = json.loads((path / "config.json").read_text())
    rounded, stored = dict(weights), dict(weights)
    for name, w in weights.items():
        if re.search(r"(_proj|indexer\.w\w+)\.weight$", name) and "eh_proj" not in name:
            packed, scale = blocks_of_fp8(w)
            stored[name], stored[name + "_scale_inv"] = packed, scale
            numbers = mx.from_fp8(packed, dtype=mx.float32) * scale
            rounded[name] = numbers.astype(mx.bfloat16) if w.shape[1] % 32 else numbers
    expected = mlx_mtp.load_model(tiny.save(tmp_path / "b", config, rounded), lazy=True)
    model = mlx_mtp.load_model(tiny.save(tmp_path / "c", config, stored))
    *found, parameters = drafted(model)
    assert_alike((*found, unpacked(parameters)), drafted(expected))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_path())


@pytest.mark.parametrize("name", sampled(NAMES[2::3], NAMES))
def test_the_command_lines_defaults_suit_every_family(tmp_path, tokenizer, name):
    path, _, _ = families.build(name, tmp_path)
    model = mlx_mtp.load_model(path)
    options = generation_options(tokenizer, chat.make_context("chat", []).params, None)
    kept = {option: options[option] for option in ("num_draft_tokens", "kv_group_size", "prefill_step_size")}
    assert len(list(mlx_mtp.generate_step(PROMPT, model, max_tokens=4, **kept))) == 4


def test_a_prompt_leaves_only_its_last_rows_to_a_convolution(qwen):
    model = qwen[1]
    cache = mlx_mtp.make_prompt_cache(model)
    tokens = mx.zeros((1, 4096), mx.int32)
    x = mx.zeros((1, tokens.size, families.H))
    layer = model.layers[0].linear_attn
    mx.eval(layer.in_proj_qkv.weight)
    mx.clear_cache()
    before = mx.get_active_memory()
    rows = cache.layers[0].convolved(layer.in_proj_qkv(x), layer.conv_kernel_size)
    state = mx.zeros((1, 4, 12, 8))
    cache.layers[0].advance(state, state, rows, (tokens[..., None],))
    mx.eval(cache.layers[0].parts, x)
    del rows
    assert mx.get_active_memory() - before < x.nbytes + 2**18
