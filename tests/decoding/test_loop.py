"""Greedy tokens equal those of a cacheless forward, with any drafts, and wherever windows wrap."""

import itertools

import families
import mlx.core as mx
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from oracle import Oracle
from sweep import SWEEP, sampled, sweep

import mlx_mtp

SIZE = {"max_kv_size": 9}


def ours(model, prompt, n, k, **options):
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, stats=stats, **options
    )
    return [token for token, _, _ in steps], stats


def a_prompt(seed, length, vocab):
    mx.random.seed(seed)
    return mx.random.randint(0, vocab, (length,)).tolist()


# The window is 8: prompts below, at and far above it; 20 new tokens wrap it several times.
@pytest.mark.parametrize(
    ("seed", "vocab", "length"),
    sampled(
        [(0, 5, 8), (1, 4, 30)],
        [*((0, 5, n) for n in (1, 2, 3, 7, 8, 9, 30)), (1, 4, 8), (1, 4, 30)],
    ),
)
def test_greedy_equals_cacheless_forward(tiny_models, seed, vocab, length):
    model, plain = tiny_models(seed, vocab_size=vocab)
    prompt = a_prompt(length, length, vocab)
    texts = {k: ours(model, prompt, 20, k)[0] for k in sampled((0, 3), range(4))}
    assert texts == dict.fromkeys(texts, tiny.greedy(plain, prompt, 20, texts[0]))


@pytest.mark.parametrize("step", sampled([1, 8], [1, 2, 3, 8, 20, 64]))
def test_prefill_chunks_of_any_size(tiny_models, step):
    model, plain = tiny_models(3)
    prompt = a_prompt(7, 41, 5)
    texts = {k: ours(model, prompt, 12, k, prefill_step_size=step)[0] for k in (0, 3)}
    assert texts == dict.fromkeys(texts, tiny.greedy(plain, prompt, 12, texts[0]))


@settings(max_examples=25 if SWEEP else 6, deadline=None)
@given(data=st.data(), k=st.integers(1, 3), length=st.integers(1, 20))
def test_every_accept_length(tiny_models_for_hypothesis, data, k, length):
    model, plain, truths = tiny_models_for_hypothesis
    prompt = a_prompt(length, length, 5)
    n = 24
    if length not in truths:
        truths[length] = tiny.greedy(plain, prompt, n, ours(model, prompt, n, 0)[0])
    truth = prompt + truths[length]
    wrong = data.draw(st.sets(st.integers(length, length + n)))
    model.drafter = Oracle(model, truth, wrong)
    try:
        tokens, stats = ours(model, prompt, n, k)
    finally:
        model.drafter = None
    assert tokens == truths[length]
    if not wrong:
        assert stats.acceptance == [1.0] * k


@pytest.fixture(scope="module")
def tiny_models_for_hypothesis(tiny_models):
    return (*tiny_models(0), {})


@pytest.mark.parametrize("accepted", sampled([2], range(4)))
def test_constant_accept_length(tiny_models, monkeypatch, accepted):
    model, plain = tiny_models(0)
    prompt = a_prompt(1, 6, 5)
    truth = prompt + tiny.greedy(plain, prompt, 36, ours(model, prompt, 36, 0)[0])
    # A cycle that keeps `accepted` drafts yields accepted + 1 tokens; every one of those last ones was wrong.
    wrong = set(range(len(prompt) + 1 + accepted, len(truth), accepted + 1)) if accepted < 3 else set()
    monkeypatch.setattr(model, "drafter", Oracle(model, truth, wrong))
    tokens, stats = ours(model, prompt, 28, 3)
    assert tokens == truth[len(prompt) :][:28]
    assert stats.acceptance == [1.0] * accepted + [0.0] * (3 - accepted)


def test_random_heads_reach_every_accept_length(tiny_models):
    """The tests above need random heads whose drafts are sometimes accepted."""
    seen = set()
    for seed in range(1, 17):
        model, _ = tiny_models(0)
        _, stats = ours(model, a_prompt(seed, 9, 5), 40, 3)
        kept = [*stats.accepted, 0]
        seen |= {depth for depth in range(4) if (kept[depth - 1] if depth else stats.cycles) > kept[depth]}
        if len(seen) == 4:
            break
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("heads", [1, 2])
def test_fewer_heads_than_declared(tmp_path, heads):
    weights = tiny.random_weights(tiny.CONFIG, heads=heads)
    model = mlx_mtp.load_model(tiny.save(tmp_path, tiny.CONFIG, weights))
    prompt = [1, 2, 3]
    text, _ = ours(model, prompt, 16, None)
    assert text == tiny.greedy(tiny.plain_model(tiny.CONFIG, weights), prompt, 16, text)
    with pytest.raises(ValueError, match=f"num_draft_tokens={heads + 1}: allowed is 0 to {heads}"):
        ours(model, prompt, 30, heads + 1)


def test_heads_with_full_attention(tiny_models):
    kinds = [
        "full_attention",
        *["sliding_attention"] * 2,
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    other = {"attention_other_setting": None, "layer_types": kinds}
    model, plain = tiny_models(0, **other)
    prompt = a_prompt(5, 25, 5)
    texts = {k: ours(model, prompt, 16, k, prefill_step_size=7)[0] for k in sampled((0, 3), range(4))}
    assert texts == dict.fromkeys(texts, tiny.greedy(plain, prompt, 16, texts[0]))


@pytest.mark.parametrize(("start", "bits"), sampled([(0, 4), (13, 8)], itertools.product([0, 13, 27], [4, 8])))
def test_quantized_kv_does_not_depend_on_drafting(tiny_models, bits, start):
    """Quantization changes the tokens; drafting must not, wherever it begins (a prompt of 19, then 16 or 28)."""
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    prompt = a_prompt(3, 19, 5)
    quantized = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    n = 28 if SWEEP else 16
    expected, _ = ours(model, prompt, n, 0, **quantized)
    for k, step in sampled([(1, 2048), (3, 5)], [(1, 5), (2, 2048), (3, 5), (3, 2048)]):
        options = {**quantized, "mtp_kv_bits": 8, "prefill_step_size": step}
        assert ours(model, prompt, n, k, **options)[0] == expected, (k, step)


def test_quantized_kv_is_used(tiny_models):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    for bits, start in sampled([(None, 0), (8, 0), (8, 5)], [(None, 0), (8, 0), (8, 2), (8, 5)]):
        options = {"kv_bits": bits, "mtp_kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
        for k in sampled((0, 2), range(4)):
            cache = mlx_mtp.make_prompt_cache(model, **options)
            list(
                mlx_mtp.generate_step(
                    [1, 2, 3], model, prompt_cache=cache, max_tokens=7, num_draft_tokens=k, adaptive=False
                )
            )
            assert all(hasattr(c, "bits") == (bits is not None) for c in (*cache.layers, *cache.heads)), (start, k)


@pytest.mark.parametrize("name", sampled(["deepseek_v3"], ["glm4_moe", "deepseek_v3"]))
def test_max_kv_size_is_mlx_lms(name, tmp_path):
    """Equal to mlx-lm's rotating cache, which keeps the first four positions, for families that have one."""
    path, _, plain = families.build(name, tmp_path)
    model = mlx_mtp.load_model(path)
    prompt = a_prompt(0, 9, model.vocab_size)
    expected = [t for t, _ in generate_step(mx.array(prompt), plain, max_tokens=20, max_kv_size=9)]
    texts = [ours(model, prompt, 20, k, **options)[0] for k, options in ((0, {}), (0, SIZE), (2, SIZE))]
    assert texts[1:] == [expected] * 2 != texts[:1] * 2


@sweep
def test_max_kv_size_is_a_window_on_full_attention(tiny_models):
    model, _ = tiny_models(0)
    prompt = a_prompt(4, 30, 5)
    texts = [ours(model, prompt, 18, k, max_kv_size=12)[0] for k in sampled((0, 3), range(4))]
    assert texts[1:] == texts[:1] * (len(texts) - 1)
    assert ours(model, prompt, 12, 3, max_kv_size=10**6)[0] == ours(model, prompt, 12, 0)[0]


@pytest.mark.parametrize("dtype", sampled([mx.bfloat16], [mx.bfloat16, mx.float16]))
def test_low_precision_differs_at_near_ties_only(tmp_path, dtype):
    """Each drafted token is the argmax of the plain logits up to the rounding of the dtype."""
    # No experts: MLX's CPU backend multiplies them in float32 only.
    config = {**tiny.CONFIG, "vocab_size": 64, "moe_layers_enum": "99"}
    weights = {name: w.astype(dtype) for name, w in tiny.random_weights(config).items()}
    model = mlx_mtp.load_model(tiny.save(tmp_path, config, weights))
    plain = tiny.plain_model(config, weights)
    prompt = a_prompt(0, 20, 64)
    tokens, _ = ours(model, prompt, 60 if SWEEP else 24, 3)
    logits = plain(mx.array(prompt + tokens)[None])[0, len(prompt) - 1 : -1].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=-1)[:, 0]
    gap = (logits.max(axis=-1) - chosen) / mx.abs(logits).max(axis=-1)
    assert gap.max().item() < (0.05 if dtype == mx.bfloat16 else 0.01)
