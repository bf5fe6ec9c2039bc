"""Check sparse attention: a row's selection and output depend on its past alone, and all of it rolls back."""

from dataclasses import replace

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from metal_cases import linux_only
from mlx_lm.models.base import create_causal_mask
from oracle import Oracle
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.growing import LinearKVCache
from mlx_mtp.layers import sparse_mla
from mlx_mtp.layers.sparse_mla import ChosenAttention
from mlx_mtp.models import deepseek_v32, glm_moe_dsa
from mlx_mtp.tuning import ab_test, kernel_switch

TOPK = families.DSA["index_topk"]
NAMES = ["deepseek_v32", "glm_moe_dsa_shared"]  # the latter covers glm_moe_dsa


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    """Return (our model, mlx-lm's plain model, a prompt, its greedy continuation by a cacheless forward)."""
    path, _, plain = families.build(request.param, tmp_path_factory.mktemp("sparse"))
    prompt = np.random.default_rng(1).integers(0, families.V, 12).tolist()
    model = mlx_mtp.load_model(path)
    return model, plain, prompt, tiny.greedy(plain, prompt, 30, ours(model, prompt, 30, 0)[0])


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """Return (our attention, mlx-lm's) of one layer."""
    path, _, plain = families.build("deepseek_v32", tmp_path_factory.mktemp("layer"))
    return mlx_mtp.load_model(path).layers[1].self_attn, plain.layers[1].self_attn


def ours(model, prompt, n, k, **options):
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, stats=stats, **options
    )
    return [token for token, _, _ in steps], stats


def rows(attention, cache, x: mx.array) -> mx.array:
    return attention(x, cache.make_mask(x.shape[1], return_array=True), cache)


@pytest.mark.parametrize(("M", "slack"), paired([1, 2, 5, 8, 9, 12], [700, 0, 200]))
def test_rows_do_not_depend_on_other_rows(layer, M, slack):
    """A call of M rows, on a buffer with rejected rows and free slots, against mlx-lm's call on all rows at once."""
    attention, plain = layer
    x = mx.random.normal((1, 50 + M, families.H))
    expected = plain(x, create_causal_mask(50 + M), None)[:, 50:]
    cache = LinearKVCache()
    rows(attention, cache, x[:, :50])
    cache.seek(mx.array([50]), 50 + slack)
    rows(attention, cache, mx.random.normal((1, 8, families.H)))
    cache.seek(cache.offset - 8, cache.limit)
    assert mx.allclose(rows(attention, cache, x[:, 50:]), expected, atol=1e-5)
    cache.seek(cache.offset - M, cache.limit)
    alone = mx.concatenate([rows(attention, cache, x[:, i : i + 1]) for i in range(50, 50 + M)], axis=1)
    assert mx.allclose(alone, expected, atol=1e-5)
    assert cache.capacity > slack


@linux_only
def test_the_kernel_attends_to_selected_rows(tmp_path, quick_trials):
    """In a trial and in a layer; without a selection it attends to all rows."""
    path, *_ = families.build("deepseek_v32", tmp_path, kv_lora_rank=32, qk_nope_head_dim=32)
    attention = mlx_mtp.load_model(path).layers[1].self_attn
    site = attention.latent = ChosenAttention(attention, TOPK)
    (tried,) = (trial for trial in kernel_switch.trials([site], mx.float16) if trial.rows == 3)
    x, found = mx.random.normal((1, 2 * TOPK + 1, families.H)), []
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        assert ab_test.check(tried) is None
        wrong, alone = lambda x: [1.1 * site.ours(x)[0]], lambda x: [1.1 * tried.alone[0](x)[0]]
        wrong = replace(tried, pairs=[(wrong, site.stock)], alone=[alone])
        assert "errs by" in ab_test.check(wrong)
        del launches[:]
        for on in ((), (3, 4)):
            site.rows, cache = frozenset(on), LinearKVCache()
            parts = [rows(attention, cache, x[:, first : first + 3]) for first in range(0, 2 * TOPK - 2, 3)]
            found.append(mx.concatenate(parts, axis=1))
    assert mx.allclose(*found, atol=1e-5)
    assert [launch.kernel for launch in launches].count("latent_scores") == len(parts)


def chosen_by_sorting(scores: np.ndarray, first: int) -> list[list[int]]:
    """Return the slots that row i selects: the best of those up to first + i, the later one of ties."""
    seen = [row[: first + i + 1] for i, row in enumerate(scores)]
    return [sorted(np.lexsort((np.arange(len(row)), row))[-TOPK:].tolist()) for row in seen]


@pytest.mark.parametrize(("L", "levels"), paired([1, 8, 130], [1, 2, 4]))
def test_ties_go_to_the_later_positions(layer, monkeypatch, L, levels):
    """For any number of rows at once and any number of empty slots."""
    attention, _ = layer
    first, rng = 20, np.random.default_rng(L)
    scores = rng.integers(0, levels, (L, first + L)).astype(np.float32)
    x, compressed = mx.zeros((1, L, families.H)), mx.zeros((1, L, families.DSA["q_lora_rank"]))
    expected = chosen_by_sorting(scores, first)
    for capacity in (first + L, 256, 1000):
        empty = rng.integers(0, 2 * levels, (L, capacity - first - L))  # contents of empty slots must not matter
        table = mx.array(np.concatenate([scores, empty], axis=1).astype(np.float32))
        blocks = iter(range(0, L, sparse_mla.SCORED_ROWS))
        monkeypatch.setattr(
            sparse_mla, "index_scores", lambda q, w, k, t=table, b=blocks: t[(i := next(b)) : i + q.shape[0]]
        )
        mask = mx.arange(capacity)[None] <= first + mx.arange(L)[:, None]
        got = attention.choose(x, compressed, mx.zeros((1, 1, capacity, 12)), mask, first)
        assert got.tolist() == expected


def test_equal_scores_select_the_latest_positions(layer):
    """With all scores zero, rows of a verify and of a prompt select the latest positions."""
    attention, plain = layer
    undecided = mx.zeros_like(attention.indexer.weights_proj.weight)
    kept = [a.indexer.weights_proj.weight for a in layer]
    x = mx.random.normal((1, 40, families.H))
    window = create_causal_mask(40, window_size=TOPK)
    plain.indexer.index_topk = 10**6
    expected = plain(x, window, None)
    plain.indexer.index_topk = TOPK
    try:
        attention.indexer.weights_proj.weight = plain.indexer.weights_proj.weight = undecided
        assert mx.allclose(plain(x, create_causal_mask(40), None), expected, atol=1e-5)
        cache = LinearKVCache()
        cuts = [(0, 20), (20, 21), (21, 28), (28, 40)]
        out = [rows(attention, cache, x[:, a:b]) for a, b in cuts]
        assert mx.allclose(mx.concatenate(out, axis=1), expected, atol=1e-5)
    finally:
        for a, weight in zip(layer, kept, strict=True):
            a.indexer.weights_proj.weight = weight


def test_a_long_prompt_is_scored_a_few_rows_at_a_time():
    """Indexer heads score every pair of rows, but the memory held at once does not grow with the rows (0.18 here)."""
    L, heads = 2048, 16
    sizes = {"hidden_size": 32, "q_lora_rank": 16, "qk_rope_head_dim": 16, "num_attention_heads": 4}
    indexer = {"index_n_heads": heads, "index_head_dim": 16, "index_topk": 64}
    attention = deepseek_v32.Attention(deepseek_v32.ModelArgs(**sizes, **indexer))
    x, compressed, keys = (mx.random.normal(s) for s in ((1, L, 32), (1, L, 16), (1, 1, L, 16)))
    mask = create_causal_mask(L)
    mx.eval(attention.parameters(), x, compressed, keys, mask)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attention.choose(x, compressed, keys, mask, 0))
    assert mx.get_peak_memory() - before < L * L * heads * 4 / 4


@pytest.mark.parametrize(("k", "wrong"), paired(sampled([3, 1, 9], [3, 1, 9, 7]), ["some", "all", "none"]))
def test_drafts_do_not_change_greedy_tokens(family, monkeypatch, k, wrong):
    model, _, prompt, truth = family
    text = prompt + truth
    places = {"none": set(), "all": set(range(len(text))), "some": {14, 17, 18, 23, 31, 32, 33, 39}}[wrong]
    monkeypatch.setattr(model, "drafter", Oracle(model, text, places))
    tokens, stats = ours(model, prompt, 29, k)
    assert tokens == truth[:29]
    assert {"none": stats.cycles <= 29 // k, "all": not any(stats.accepted), "some": any(stats.accepted)}[wrong]


@pytest.mark.parametrize(("k", "stops"), [*sampled([], [(0, [1, 4])]), (3, sampled([6], range(1, 10)))])
def test_caches_after_a_stop_equal_one_by_one_decoding(family, monkeypatch, tmp_path, k, stops):
    """Latent rows, keys and indexer keys, in memory and from a file, for a stop anywhere in an accepted run."""
    model, _, prompt, truth = family
    for n in stops:
        plainly, drafting = (mlx_mtp.make_prompt_cache(model) for _ in range(2))
        ours(model, prompt, n, 0, prompt_cache=plainly)
        with monkeypatch.context() as patch:
            patch.setattr(model, "drafter", Oracle(model, prompt + truth, {15, 20}))
            steps = mlx_mtp.generate_step(prompt, model, num_draft_tokens=k, adaptive=False, prompt_cache=drafting)
            assert [next(steps)[0] for _ in range(n)] == truth[:n]
            steps.close()
        mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", drafting)
        copy = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)
        for cache in (drafting, copy):
            for a, b in zip(plainly.layers, cache.layers, strict=True):
                assert a.offset == b.offset == len(prompt) + n - 1
                assert len(a.parts) == len(b.parts)
                pairs = zip(a.parts, b.parts, strict=True)
                assert all(mx.allclose(p[:, :, : a.offset], q[:, :, : a.offset], atol=1e-5) for p, q in pairs)
        snapshot = drafting.snapshot()
        for cache in (drafting, copy):
            assert ours(model, truth[n - 1 : n], 5, 3, prompt_cache=cache)[0] == truth[n : n + 5]
        drafting.rewind(snapshot)
        assert ours(model, truth[n - 1 : n], 5, 2, prompt_cache=drafting)[0] == truth[n : n + 5]


def test_across_the_end_of_a_buffer(family):
    model, plain, _, _ = family
    prompt = np.random.default_rng(2).integers(0, families.V, 250).tolist()
    texts = {k: ours(model, prompt, 8, k, prefill_step_size=100)[0] for k in sampled([0, 3], [0, 1, 3])}
    assert texts == dict.fromkeys(texts, tiny.greedy(plain, prompt, 8, texts[0]))


@pytest.mark.parametrize("topk", sampled([258], [256, 258, 600]))
def test_the_first_rows_that_select(tmp_path, topk):
    """Rows with fewer positions than may be selected, on a buffer that holds more, or not."""
    path, _, plain = families.build("glm_moe_dsa", tmp_path, index_topk=topk)
    model, prompt = mlx_mtp.load_model(path), np.random.default_rng(3).integers(0, families.V, 250).tolist()
    texts = {k: ours(model, prompt, 12, k)[0] for k in (0, 3)}
    assert texts == dict.fromkeys(texts, tiny.greedy(plain, prompt, 12, texts[0]))


def test_max_kv_size_does_not_depend_on_drafting(family):
    model, _, prompt, truth = family
    texts = [ours(model, prompt * 3, 14, k, max_kv_size=14)[0] for k in sampled([0, 3], range(4))]
    assert texts[1:] == texts[:1] * (len(texts) - 1)
    assert ours(model, prompt, 8, 3, max_kv_size=1000)[0] == truth[:8]


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, "FFF"),
        ({"indexer_types": ["full", "shared", "full"], "index_topk_freq": 4}, "FSF"),
        ({"index_topk_pattern": "FSS"}, "FSS"),
        ({"index_topk_pattern": ["full", "full", "shared"]}, "FFS"),
        ({"index_topk_freq": 2}, "FFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSF"),
    ],
)
def test_which_layers_have_indexers(tmp_path, given, kinds):
    shared = {"indexer_types": ["full" if kind == "F" else "shared" for kind in kinds]}
    _, weights, _ = families.build("glm_moe_dsa", tmp_path / "a", **shared)
    model = mlx_mtp.load_model(tiny.save(tmp_path / "b", {**families.GLM_DSA, **given}, weights))
    assert "".join("F" if "indexer" in layer.self_attn else "S" for layer in model.layers) == kinds
    assert "indexer" in model.mtp[0].block.self_attn


def test_the_released_schedule():
    """GLM-5.2 lists its layers' kinds; the list equals every fourth layer from the third on."""
    given = {**families.GLM_DSA, "num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    kinds = glm_moe_dsa.ModelArgs.from_dict({**given, "index_topk_pattern": None}).indexers()
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [0, 1, *range(2, 78, 4)]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["shared", "full", "full"], r"indexer_types\[0\]='shared': allowed are full"),
        (["full", "half", "full"], r"indexer_types\[1\]='half': allowed are full and, but for the first, shared"),
        (["full", "shared"], r"indexer_types has 2 entries; expected one for each of 3 layers"),
    ],
)
def test_invalid_indexer_lists_are_refused(tmp_path, kinds, message):
    _, weights, _ = families.build("glm_moe_dsa", tmp_path / "a")
    path = tiny.save(tmp_path / "b", {**families.GLM_DSA, "indexer_types": kinds}, weights)
    with pytest.raises(ValueError, match=message) as error:
        mlx_mtp.load_model(path)
    assert "\n" not in str(error.value)
