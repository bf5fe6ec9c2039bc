"""Draft with EAGLE-3 heads: the output is the target's, and drafts equal those of a cacheless forward."""

import functools
import json

import drafters
import families
import mlx.core as mx
import numpy as np
import packed_files
import packed_kinds
import pytest
import tiny
from drafters import HEADLESS
from eagle_scratch import drafts_from_scratch, streams
from oracle import Oracle, Spy
from sweep import paired, sampled

import mlx_mtp

V = families.V
# A prompt whose sequences exceed a ring of 40 slots, so that a misplaced row changes the output.
LONG = np.random.default_rng(0).integers(0, V, 36).tolist()
FEW = ["llama_sliding", "qwen2", "deepseek_v3", "qwen3_5_moe"]  # other tests compare the others' output
WITH_HEADS = ("deepseek_v3", "mimo_v2_flash", "qwen3_5_moe")
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 7,
    "norm_before_residual": True,
    "norm_output": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
    "transformer_layer_config": {
        **{k: v for k, v in drafters.CONFIG.items() if k not in ("architectures", "draft_vocab_size", "rope_theta")},
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
    },
}


def target(name, path, seed=0):
    """(checkpoint directory, mlx-lm's plain model)"""
    if name in HEADLESS:
        return families.headless(path, HEADLESS[name], seed)
    directory, _, plain = families.build(name, path, seed)
    return directory, plain


@pytest.fixture(scope="module")
def drafted(request, tmp_path_factory):
    """(target with a drafter, mlx-lm's plain target)"""
    path = tmp_path_factory.mktemp("drafter")
    directory, plain = target(request.param, path / "target")
    drafter = drafters.save(path / "drafter", drafters.CONFIG, families.H)
    return mlx_mtp.load_model(directory, draft_model=drafter), plain


@pytest.fixture(scope="module")
def truth(drafted):
    """Return the greedy sequence after a prompt by a cacheless forward, computed once."""
    model, plain = drafted

    def greedy(prompt):
        return tiny.greedy(plain, list(prompt), 14, ours(model, list(prompt), 14, 0)[0])

    return functools.cache(greedy)


def ours(model, prompt, n, k, **options):
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, stats=stats, **options
    )
    return [token for token, _, _ in steps], stats


def of_targets(name: str, values: list, few: list | None = None):
    """Return pairs of a target and a value: each target once, or all products in a sweep."""
    names = [*HEADLESS, *WITH_HEADS]
    pairs = paired(sampled(few or names, names), values)
    return pytest.mark.parametrize(("drafted", name), pairs, indirect=["drafted"])


@of_targets("length", [30, 1, 30], FEW)
def test_greedy_equals_cacheless_forward(drafted, truth, length):
    mx.random.seed(length)
    prompt = mx.random.randint(0, V, (length,)).tolist()
    for k in sampled((6,) if length > 1 else (0, 1), (0, 1, 6)):
        assert ours(drafted[0], prompt, 14, k, prefill_step_size=11)[0] == truth(tuple(prompt)), f"k={k}"


@of_targets("every", [3, 0, 4], ["llama_sliding", "qwen3_moe", "mimo_v2_flash"])
def test_right_wrong_and_partly_right_drafts(drafted, truth, monkeypatch, every):
    prompt = LONG
    text = prompt + truth(tuple(prompt))
    wrong = set(range(36, len(text), every)) if every else set()
    monkeypatch.setattr(drafted[0], "drafter", Oracle(drafted[0], text, wrong))
    tokens, stats = ours(drafted[0], prompt, 11, 4)
    assert tokens == text[36:47]
    assert (stats.acceptance == [1.0] * 4) is (not wrong)


@of_targets("stop", [(3, 4), (5, 9), (3, 1), (0, 1)], FEW)
def test_stop_anywhere_save_and_continue(drafted, truth, tmp_path, stop):
    model, prompt, (k, stop) = drafted[0], LONG, stop
    expected = truth(tuple(prompt))[: stop + 5]
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step(
        prompt, model, num_draft_tokens=k, adaptive=False, prompt_cache=cache, max_tokens=20
    )
    text = [token for _, (token, _, _) in zip(range(stop), steps, strict=False)]
    steps.close()
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    snapshot = cache.snapshot()
    for kept in (cache, mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)):
        assert ours(model, text[-1:], 5, 2, prompt_cache=kept)[0] == expected[stop:]
    cache.rewind(snapshot)
    assert ours(model, text[-1:], 5, 4, prompt_cache=cache)[0] == expected[stop:]


@pytest.mark.parametrize(("layout", "length"), paired(["midlayer", "speculators"], [1, 20]))
def test_drafts_equal_a_forward_from_scratch(tmp_path, monkeypatch, layout, length):
    new = layout == "speculators"
    layer = "layers.0" if new else "midlayer"
    directory, plain = families.headless(tmp_path / "target", HEADLESS["qwen3"])
    w = drafters.weights(drafters.CONFIG, families.H, layer=layer)
    if new:
        w |= {f"{layer}.self_attn.{n}_norm.weight": mx.array([1.0, 1.2] * 6) for n in "qk"}
        w |= {"input_norm.weight": mx.linspace(0.5, 1.5, 96)}
        w |= {f"fc_norm.{i}.weight": mx.linspace(1.5, 0.5, 32) for i in range(3)}
    drafter = tiny.save(tmp_path / "drafter", SPECULATORS if new else drafters.CONFIG, w)
    model = mlx_mtp.load_model(directory, draft_model=drafter)
    counts = (1, 2, 5) if new else (2, 2, 2)
    assert model.spec.capture == counts
    spy = Spy(monkeypatch, model)
    mx.random.seed(length)
    prompt = mx.random.randint(0, V, (length,)).tolist()
    text = prompt + ours(model, prompt, 24, 4, prefill_step_size=7)[0]
    found = spy.drafts(text)
    assert len(found) > 5
    read = streams(plain, text, counts)
    for known, drafts in found:
        assert drafts == drafts_from_scratch(
            plain, w, text[:known], 4, layer=layer, counts=counts, new=new, read=read
        )


def test_where_the_target_is_read(tmp_path):
    """Lists in eagle_config contain outputs of layers, those next to it indices of layers; default: 2, N/2, N-3."""
    directory, _ = families.headless(tmp_path / "target", {**HEADLESS["qwen3"], "num_hidden_layers": 8})
    cases = (
        ({}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}, (0, 4, 8)),
    )
    for change, expected in cases:
        drafter = drafters.save(tmp_path / "drafter", {**drafters.CONFIG, **change}, families.H)
        assert mlx_mtp.load_model(directory, draft_model=drafter).spec.capture == expected
    model = mlx_mtp.load_model(
        directory, draft_model=drafter, mtp_overrides={"capture": (1, 2, 3), "feedback": "post"}
    )
    assert (model.spec.capture, model.spec.feedback) == ((1, 2, 3), "post")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """(checkpoint directory, a text by a cacheless forward)"""
    directory, plain = families.headless(tmp_path_factory.mktemp("mistral"), HEADLESS["mistral"])
    return directory, tiny.greedy(plain, [1, 2, 3], 12)


VARIANTS = ["own embedding", "full vocabulary", "shared LM head", "sliding", "quantized"]


@pytest.mark.parametrize("variant", sampled(VARIANTS[::4], VARIANTS))
def test_variants_draft_and_change_nothing(tmp_path, mistral, variant):
    directory, truth = mistral
    config = dict(drafters.CONFIG)
    if variant in ("full vocabulary", "shared LM head"):
        config["draft_vocab_size"] = V
    if variant == "sliding":
        config |= {"layer_types": ["sliding_attention"], "sliding_window": 6}
    if variant == "quantized":
        config |= {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    w = drafters.weights(config, families.H)
    if variant == "own embedding":
        w["embed_tokens.weight"] = mx.random.normal((V, 32))
    if variant == "shared LM head":
        del w["lm_head.weight"]
    if variant == "quantized":
        for name in [n for n in w if n.endswith("proj.weight")]:
            packed = mx.quantize(w.pop(name), group_size=32, bits=8)
            w |= dict(zip((name, name[:-6] + "scales", name[:-6] + "biases"), packed, strict=True))
    model = mlx_mtp.load_model(directory, draft_model=tiny.save(tmp_path / "drafter", config, w))
    head = model.mtp[0]
    assert ("embed_tokens" in head) == (variant == "own embedding")
    assert ("head" in head) == (variant != "shared LM head")
    assert head.window == (6 if variant == "sliding" else None)
    assert hasattr(head.block.self_attn.q_proj, "bits") == (variant == "quantized")
    for k in sampled([5], (2, 5)):
        assert ours(model, [1, 2, 3], 12, k)[0] == truth


PACKED = ("modelopt", "compressed", "awq", "fp8 rows")


@pytest.mark.parametrize("name", sampled(PACKED[:2], PACKED))
def test_packed_drafters(tmp_path, mistral, name):
    """They keep their size, draft as their numbers in float32 do, and change nothing."""
    directory, truth = mistral
    config = drafters.CONFIG | {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "draft_vocab_size": V}
    kind = packed_kinds.KINDS[name]
    w = packed_kinds.numpy(drafters.weights(config, families.H))
    linear = packed_kinds.linears(kind)
    stored, numbers = packed_files.repack(w, lambda module: linear(module, w[f"{module}.weight"]))
    entry = {"quantization_config": kind.config}
    paths = [packed_files.save(tmp_path / "packed", config | entry, stored)]
    paths.append(packed_files.save(tmp_path / "plain", config, numbers))
    packed, plain = (mlx_mtp.load_model(directory, draft_model=path) for path in paths)
    assert "scales" in packed.mtp[0].block.self_attn.q_proj
    assert packed.report.head_quantization.startswith(kind.formats)
    (text, drafted), (_, expected) = (ours(model, [1, 2, 3], 12, 3) for model in (packed, plain))
    assert text == truth
    assert drafted.accepted == expected.accepted


def test_draws_do_not_depend_on_drafts(tmp_path):
    directory, _ = families.headless(tmp_path / "target", HEADLESS["qwen2"])
    model = mlx_mtp.load_model(directory, draft_model=drafters.save(tmp_path / "d", drafters.CONFIG, families.H))
    texts = {tuple(ours(model, [1, 2, 3], 16, k, temp=1.0, seed=5)[0]) for k in sampled((0, 4), (0, 1, 4))}
    assert len(texts) == 1


def test_quantized_caches_have_a_size_each(tmp_path):
    directory, _ = families.headless(tmp_path / "target", {**HEADLESS["qwen3"], "head_dim": 64})
    model = mlx_mtp.load_model(directory, draft_model=drafters.save(tmp_path / "d", drafters.CONFIG, families.H))
    plain = ours(model, [1, 2, 3], 8, 0, kv_bits=8, quantized_kv_start=0)[0]
    assert ours(model, [1, 2, 3], 8, 3, kv_bits=8, quantized_kv_start=0)[0] == plain
    with pytest.raises(ValueError, match="=64: allowed for the head size 12 are none; leave out mtp_kv_bits"):
        ours(model, [1, 2, 3], 8, 3, mtp_kv_bits=8)


def test_report(tmp_path):
    directory, _ = families.headless(tmp_path / "target", HEADLESS["qwen3"])
    drafter = drafters.save(tmp_path / "d", drafters.CONFIG, families.H)
    text = str(mlx_mtp.load_model(directory, draft_model=drafter).report)
    assert f"{drafter}, reading the target after layers 2, 2, 2" in text
    assert "own, of 7 tokens" in text
    assert "t2d" in text
    assert json.loads((drafter / "config.json").read_text()) == drafters.CONFIG
