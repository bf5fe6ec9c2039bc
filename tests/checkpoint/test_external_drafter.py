"""EAGLE-3 drafters: the text is the target's, and drafts are those of a forward from scratch."""

import functools
import json

import drafters
import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from drafters import GQA
from mlx_lm.models.base import create_causal_mask
from oracle import Oracle

import mlx_mtp
from mlx_mtp.decoding import cycle

V = families.V
# A prompt whose texts go on past the end of a ring of 40 slots, and show it when a row is not where it belongs.
LONG = np.random.default_rng(0).integers(0, V, 36).tolist()
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
SLIDING = {"layer_types": ["full_attention", *["sliding_attention"] * 4], "sliding_window": 8, "head_dim": 16}
HEADLESS = {
    "mistral": {**GQA, "model_type": "mistral", "mlx_lm": "llama", "tie_word_embeddings": True},
    "llama_sliding": {**GQA, **SLIDING, "model_type": "llama"},
    "qwen2": {**GQA, "model_type": "qwen2"},
    "qwen3": {**GQA, "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {**GQA, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 16},
}
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


@pytest.fixture(scope="module", params=[*HEADLESS, *WITH_HEADS])
def drafted(request, tmp_path_factory):
    """(target with a drafter, mlx-lm's plain target)"""
    path = tmp_path_factory.mktemp("drafter")
    directory, plain = target(request.param, path / "target")
    drafter = drafters.save(path / "drafter", drafters.CONFIG, families.H)
    return mlx_mtp.load_model(directory, draft_model=drafter), plain


@pytest.fixture(scope="module")
def truth(drafted):
    """Greedy text of a prompt by a cacheless forward, computed once."""
    return functools.cache(lambda prompt: tiny.greedy(drafted[1], list(prompt), 20))


def ours(model, prompt, n, k, **options):
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, stats=stats, **options
    )
    return [token for token, _, _ in steps], stats


@pytest.mark.parametrize("length", [1, 30])
def test_greedy_equals_cacheless_forward(drafted, truth, length):
    mx.random.seed(length)
    prompt = mx.random.randint(0, V, (length,)).tolist()
    for k in (0, 1, 6):
        assert ours(drafted[0], prompt, 20, k, prefill_step_size=11)[0] == truth(tuple(prompt)), f"k={k}"


@pytest.mark.parametrize("every", [0, 3, 4])
def test_right_wrong_and_partly_right_drafts(drafted, truth, monkeypatch, every):
    prompt = LONG
    text = prompt + truth(tuple(prompt))
    wrong = set(range(36, len(text), every)) if every else set()
    monkeypatch.setattr(cycle, "draft", Oracle(text, wrong, V))
    tokens, stats = ours(drafted[0], prompt, 19, 4)
    assert tokens == text[36:55]
    assert (stats.acceptance == [1.0] * 4) is (not wrong)


@pytest.mark.parametrize(("k", "stop"), [(0, 1), (3, 1), (3, 4), (5, 9)])
def test_stop_anywhere_save_and_continue(drafted, truth, tmp_path, k, stop):
    model, prompt = drafted[0], LONG
    expected = truth(tuple(prompt))[: stop + 8]
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step(
        prompt, model, num_draft_tokens=k, adaptive=False, prompt_cache=cache, max_tokens=20
    )
    text = [token for _, (token, _, _) in zip(range(stop), steps, strict=False)]
    steps.close()
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    snapshot = cache.snapshot()
    for kept in (cache, mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)):
        assert ours(model, text[-1:], 8, 2, prompt_cache=kept)[0] == expected[stop:]
    cache.rewind(snapshot)
    assert ours(model, text[-1:], 8, 4, prompt_cache=cache)[0] == expected[stop:]


def rope(x: mx.array) -> mx.array:
    """x [heads, T, D] rotated by positions 0..T-1, written out."""
    half = x.shape[-1] // 2
    angles = mx.arange(x.shape[1])[:, None] * 1e4 ** (-mx.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * mx.cos(angles) - b * mx.sin(angles), b * mx.cos(angles) + a * mx.sin(angles)], axis=-1)


def rms(x: mx.array, weight: mx.array) -> mx.array:
    return x / mx.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def forward(w: dict, layer: str, e: mx.array, g: mx.array, *, normed_residual: bool) -> mx.array:
    """The drafter's layer over all rows [T, H] at once, from the paper's formulas and the checkpoint's tensors."""
    h = rms(g, w[f"{layer}.hidden_norm.weight"])
    x = mx.concatenate([rms(e, w[f"{layer}.input_layernorm.weight"]), h], axis=-1)
    D = drafters.CONFIG["head_dim"]
    q, k, v = (x @ w[f"{layer}.self_attn.{n}_proj.weight"].T for n in "qkv")
    q, k, v = (t.reshape(len(t), -1, D).swapaxes(0, 1) for t in (q, k, v))
    if f"{layer}.self_attn.q_norm.weight" in w:
        q, k = (rms(t, w[f"{layer}.self_attn.{n}_norm.weight"]) for t, n in ((q, "q"), (k, "k")))
    k, v = (mx.repeat(t, q.shape[0] // t.shape[0], axis=0) for t in (rope(k), v))
    scores = rope(q) @ k.swapaxes(1, 2) / D**0.5
    weights = mx.softmax(mx.where(create_causal_mask(len(x)), scores, -mx.inf), axis=-1)
    out = (weights @ v).swapaxes(0, 1).reshape(len(x), -1) @ w[f"{layer}.self_attn.o_proj.weight"].T
    x = (h if normed_residual else g) + out
    y = rms(x, w[f"{layer}.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (gate * mx.sigmoid(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T


def streams(plain, tokens: list[int], counts) -> mx.array:
    """The target's residual stream after so many layers, side by side [T, 3 * H], with no cache."""
    seen, layers = [plain.model.embed_tokens(mx.array(tokens)[None])], plain.model.layers

    class Tap:
        def __init__(self, layer):
            self.layer, self.use_sliding = layer, getattr(layer, "use_sliding", False)

        def __call__(self, *args, **kwargs):
            seen.append(self.layer(*args, **kwargs))
            return seen[-1]

    plain.model.layers = [Tap(layer) for layer in layers]
    plain(mx.array(tokens)[None])
    plain.model.layers = layers
    return mx.concatenate([seen[i][0] for i in counts], axis=-1)


def drafts_from_scratch(plain, w, tokens, k, *, layer, counts, new):
    """k drafts after `tokens`, of which the target has read all but the last."""
    aux = streams(plain, tokens[:-1], counts)
    if new:
        aux = rms(aux, w["input_norm.weight"])
        aux = mx.concatenate([rms(a, w[f"fc_norm.{i}.weight"]) for i, a in enumerate(mx.split(aux, 3, -1))], axis=-1)
    g, drafts = aux @ w["fc.weight"].T, []
    for _ in range(k):
        e = plain.model.embed_tokens(mx.array((tokens + drafts)[1 : 1 + len(g)]))
        out = forward(w, layer, e, g, normed_residual=new)[-1:]
        row = mx.argmax(rms(out, w["norm.weight"]) @ w["lm_head.weight"].T)
        drafts.append((row + w["d2t"][row]).item())
        g = mx.concatenate([g, rms(out, w["norm.weight"]) if new else out])
    return drafts


@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
@pytest.mark.parametrize("length", [1, 20])
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
    calls, real = [], cycle.draft

    def spy(model, cache, run, k, chooser):
        drafts = real(model, cache, run, k, chooser)
        calls.append((cache.layers[0].offset, drafts.tokens))
        return drafts

    monkeypatch.setattr(cycle, "draft", spy)
    mx.random.seed(length)
    prompt = mx.random.randint(0, V, (length,)).tolist()
    text = prompt + ours(model, prompt, 24, 4, prefill_step_size=7)[0]
    checked = 0
    for offset, drafts in calls:
        if offset.item() < len(text):
            known = text[: offset.item() + 1]
            assert drafts.tolist() == drafts_from_scratch(plain, w, known, 4, layer=layer, counts=counts, new=new)
            checked += 1
    assert checked > 5


def test_where_the_target_is_read(tmp_path):
    """Lists inside eagle_config name outputs of layers, beside it numbers of layers; neither: 2, N/2, N-3."""
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


@pytest.mark.parametrize("variant", ["own embedding", "full vocabulary", "shared LM head", "sliding", "quantized"])
def test_variants_draft_and_change_nothing(tmp_path, variant):
    directory, plain = families.headless(tmp_path / "target", HEADLESS["mistral"])
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
    truth = tiny.greedy(plain, [1, 2, 3], 24)
    for k in (2, 5):
        assert ours(model, [1, 2, 3], 24, k)[0] == truth


def test_draws_do_not_depend_on_drafts(tmp_path):
    directory, _ = families.headless(tmp_path / "target", HEADLESS["qwen2"])
    model = mlx_mtp.load_model(directory, draft_model=drafters.save(tmp_path / "d", drafters.CONFIG, families.H))
    texts = {tuple(ours(model, [1, 2, 3], 60, k, temp=1.0, seed=5)[0]) for k in (0, 1, 4)}
    assert len(texts) == 1


def test_quantized_caches_have_a_size_each(tmp_path):
    directory, _ = families.headless(tmp_path / "target", {**HEADLESS["qwen3"], "head_dim": 64})
    model = mlx_mtp.load_model(directory, draft_model=drafters.save(tmp_path / "d", drafters.CONFIG, families.H))
    plain = ours(model, [1, 2, 3], 20, 0, kv_bits=8)[0]
    assert ours(model, [1, 2, 3], 20, 3, kv_bits=8)[0] == plain
    with pytest.raises(ValueError, match="kv_group_size=64: allowed are divisors of the head size 12"):
        ours(model, [1, 2, 3], 20, 3, mtp_kv_bits=8)


def test_report(tmp_path):
    directory, _ = families.headless(tmp_path / "target", HEADLESS["qwen3"])
    drafter = drafters.save(tmp_path / "d", drafters.CONFIG, families.H)
    text = str(mlx_mtp.load_model(directory, draft_model=drafter).report)
    assert f"{drafter}, reading the target after layers 2, 2, 2" in text
    assert "own, of 7 tokens" in text
    assert "t2d" in text
    assert json.loads((drafter / "config.json").read_text()) == drafters.CONFIG
