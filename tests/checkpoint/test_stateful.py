"""Draft for mlx-lm's models whose layers keep states: their text is mlx-lm's own, one token at a time."""

from functools import cache as once

import grammars
import mlx.core as mx
import pytest
import stateful
from families import headless
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches_of
from oracle_drafts import OracleDrafts
from portless import CONFIGS
from sweep import sampled

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.cache.convolution import ConvolutionCache
from mlx_mtp.cache.from_mlx_lm import flat, from_mlx_lm, kind_of, passing
from mlx_mtp.cache.pieces import checkpoint_of, cut, join
from mlx_mtp.decoding.drafters.small_model import SmallModel
from mlx_mtp.tuning.row_findings import RowFinding

TYPES = sampled(
    ["mamba", "falcon_h1", "baichuan_m1", "kimi_linear", "longcat_flash_ngram", "gemma3n"], stateful.OF_TYPE
)
PROMPT = [3, 4, 5, 6, 7, 8, 3, 4, 5]
TOKENS, DRAFTS = 40, 4
FIXED = {"num_draft_tokens": DRAFTS, "adaptive": False, "prompt_lookup": False}


@once
def made(name):
    """Return (model, mlx-lm's greedy text after PROMPT)."""
    model = stateful.loaded(name)
    return model, greedy(model, PROMPT, TOKENS)


def greedy(model, prompt, n):
    caches, text, tokens = mlx_lm_caches_of(model), [], prompt
    for _ in range(n):
        tokens = [mx.argmax(model(mx.array([tokens]), cache=caches)[0, -1]).item()]
        text += tokens
    return text


def each_length(start):
    """Return the positions of wrong drafts with which cycles, from a text's position on, accept 0, 1 ... DRAFTS."""
    wrong = set()
    for cycle in range(TOKENS):
        accepted = cycle % (DRAFTS + 1)
        start += accepted + 1
        if accepted < DRAFTS:
            wrong.add(start)
    return wrong


def text_of(model, prompt=PROMPT, n=TOKENS, **options):
    return [token for token, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=n, **options)]


@pytest.mark.parametrize("name", sampled(["mamba", "kimi_linear", "gemma3n"], stateful.OF_TYPE))
def test_rejections_of_every_length(name, monkeypatch):
    model, text = made(name)
    stats, whole = mlx_mtp.Stats(), PROMPT + text
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, whole, each_length(len(PROMPT))))
    assert text_of(model, stats=stats, **FIXED) == text
    assert len({*stats.accepted, stats.cycles}) == DRAFTS + 1 == len(stats.accepted) + 1, stats.accepted


@pytest.mark.parametrize("name", sampled(["falcon_h1"], stateful.OF_TYPE))
def test_an_end_anywhere_and_files(name, monkeypatch, tmp_path):
    """A generation is closed after each of its first tokens; its cache, and its file, continue with the same text."""
    model, text = made(name)
    whole, file = PROMPT + text, tmp_path / "cache.safetensors"
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, whole, each_length(len(PROMPT))))
    for end in range(1, 1 + sum(range(1, DRAFTS + 2))):
        cache = mlx_mtp.make_prompt_cache(model)
        steps = mlx_mtp.generate_step(PROMPT, model, prompt_cache=cache, max_tokens=TOKENS, **FIXED)
        assert [next(steps)[0] for _ in range(end)] == text[:end]
        steps.close()
        assert cache.tokens == whole[: len(PROMPT) + end - 1]
        mlx_mtp.save_prompt_cache(file, cache)
        for kept in (cache.copy(), cache, mlx_mtp.load_prompt_cache(file, model))[end % 3 : end % 3 + 2]:
            rest = text_of(model, text[end - 1 : end], 6, prompt_cache=kept, **FIXED)
            assert rest == text[end : end + 6], f"after {end}"


@pytest.mark.parametrize("name", sampled(["baichuan_m1", "longcat_flash_ngram", "lfm2"], stateful.OF_TYPE))
def test_several_sequences(name, monkeypatch):
    """Sequences of a pool reject different numbers of rows in one cycle, join and end."""
    model, text = made(name)
    assert (model.runtime.alone is None) == (name != "longcat_flash_ngram"), model.runtime.alone
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, each_length(len(PROMPT))))
    prompts, ends = [PROMPT, (PROMPT + text)[:17], (PROMPT + text)[:12], PROMPT[:1]], [TOKENS - 8, 11, 19, 3]
    batch = mlx_mtp.BatchGenerator(model, **FIXED, completion_batch_size=2)
    batch.insert(prompts, ends)
    for prompt, n, answer in zip(prompts, ends, drained(batch), strict=True):
        rest = (PROMPT + text)[len(prompt) :] if len(prompt) > 1 else greedy(model, prompt, 8)
        assert [response.token for response in answer] == rest[:n]
        kept = answer[-1].prompt_cache
        assert text_of(model, rest[n - 1 : n], 5, prompt_cache=kept, **FIXED) == rest[n : n + 5]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", sampled(["falcon_h1"], stateful.OF_TYPE))
def test_grammars_and_recorded_cycles(name, replay, monkeypatch, recorded_at_once, own_cache):
    """Cycles are built again with drafts that a grammar forces, or replayed, alone and in a pool."""
    model, text = made(name)
    patterns, lengths = ["((a|b){3}abcabc){6}", None, "((a|b)abcabc){6}"], [24, 6, 20]
    rules = [pattern and grammar.regex(pattern, tokenizer=grammars.letters()) for pattern in patterns]
    each = list(zip([[1, 2, 3, 0, 2], PROMPT, [0, 2, 1, 1]], lengths, rules, strict=True))
    plain = {"num_draft_tokens": 0, "grammar_drafts": 0, "compile_cycles": False}
    expected = [text_of(model, prompt, n, grammar=rule, **plain) for prompt, n, rule in each]
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, each_length(len(PROMPT))))
    for k in (1, 3):
        how = {**FIXED, "num_draft_tokens": k, "compile_cycles": replay}
        assert [text_of(model, prompt, n, grammar=rule, **how) for prompt, n, rule in each] == expected
        batch = mlx_mtp.BatchGenerator(model, **how)
        batch.insert([prompt for prompt, *_ in each], lengths, grammars=rules)
        assert [[response.token for response in answer] for answer in drained(batch)] == expected
    model.runtime.recorder = None


def drained(batch):
    """Return each sequence's responses, in the order of their numbers."""
    found = {}
    while responses := batch.next_generated():
        for response in responses:
            found.setdefault(response.uid, []).append(response)
    return [found[uid] for uid in sorted(found)]


@pytest.mark.parametrize("name", sampled(["bailing_moe_linear"], stateful.OF_TYPE))
def test_a_drafter_with_caches(name, monkeypatch):
    """A small model follows the target, whose rows are read again, alone and in a pool."""
    model, text = made(name)
    monkeypatch.setattr(model, "drafter", SmallModel(made("gemma3n")[0], model.vocab_size))
    stats, prompts = mlx_mtp.Stats(), [PROMPT, (PROMPT + text)[:12]]
    assert text_of(model, stats=stats, **FIXED) == text
    assert stats.num_draft_tokens > 0 or stats.built_late
    batch = mlx_mtp.BatchGenerator(model, max_tokens=20, **FIXED)
    batch.insert(prompts)
    for prompt, answer in zip(prompts, drained(batch), strict=True):
        assert [response.token for response in answer] == (PROMPT + text)[len(prompt) :][:20]


@pytest.mark.parametrize("name", sampled(["recurrent_gemma"], stateful.OF_TYPE))
def test_adaptive_copies(name):
    """Random weights' texts repeat, so that lookups occur; the number of drafts is chosen as in use."""
    model, _ = made(name)
    prompt = [1, 2, 3, 4] * 4
    assert text_of(model, prompt, 60, prompt_lookup=True) == greedy(model, prompt, 60)


def test_a_cycle_is_built_late_after_drafts_only(monkeypatch):
    model, text = made("mamba")
    stats = mlx_mtp.Stats()
    assert text_of(model, stats=stats, num_draft_tokens=0) == text
    assert not stats.built_late
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, set()))
    text_of(model, stats=(stats := mlx_mtp.Stats()), **FIXED)
    assert set(stats.built_late) == {"states that cannot step back"}


def test_a_convolution_steps_back(monkeypatch):
    """No cycle is built late, and nothing is read again."""
    model, text = made("lfm2")
    assert sum(kind is ConvolutionCache for kind in model.windows()) == 2
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, each_length(len(PROMPT))))
    assert text_of(model, stats=(stats := mlx_mtp.Stats()), **FIXED) == text
    assert not stats.built_late


def test_accepted_rows_alone_are_read_again(monkeypatch):
    """A cycle whose drafts are all accepted costs no further pass."""
    model, text = made("mamba")
    kind, read = type(model), []
    hidden = kind.hidden
    monkeypatch.setattr(
        kind, "hidden", lambda m, tokens, *more: read.append(tokens.shape[1]) or hidden(m, tokens, *more)
    )
    for wrong, n, expected in ((set(), 11, []), ({len(PROMPT) + 3}, 9, [3]), ({len(PROMPT) + 1}, 7, [1])):
        monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, wrong))
        read.clear()
        text_of(model, n=n, **FIXED)
        assert read[0] == len(PROMPT)
        assert [rows for rows in read[1:] if rows != DRAFTS + 1] == expected


def test_kinds_of_caches():
    assert kind_of(ArraysCache(3))().count == 3
    nested = [kind_of(cache) for cache in (CacheList(ArraysCache(2), KVCache()), KVCache())]
    assert [type(nested[0]), nested[0][1], nested[1]] == [list, None, None]
    assert len(flat(nested)) == 3
    with pytest.raises(ValueError, match=r"ChunkedKVCache, whose rows cannot be taken back"):
        kind_of(ChunkedKVCache(8))
    with pytest.raises(ValueError, match=r"ChunkedKVCache"):
        kind_of(CacheList(KVCache(), ChunkedKVCache(8)))


def test_shared_keys_are_those_of_the_pass():
    """Layers that share keys get the arrays of the layer that made them, and no reference is kept after the pass."""
    for window in (None, 8):
        for place in (4, mx.array([4])):
            cache = mlx_mtp.cache.kinds.make_cache(window)
            rows = mx.random.normal((1, 2, 4, 8))
            with passing([cache], [window], (1, 4)) as (layer,):
                fetched = layer.update_and_fetch(rows, rows)
                assert layer.keys_and_values() is fetched
            cache.seek(place, 4)
            cache.update_and_fetch(rows, rows)
            assert cache.keys_and_values() is None


def test_snapshots_and_pieces():
    """A cache returns to a snapshot, and is joined from pieces with a checkpoint, as the prefix cache does."""
    model, text = made("falcon_h1")
    blank = mlx_mtp.make_prompt_cache(model)
    cache = blank.like_new()
    assert text_of(model, n=1, prompt_cache=cache) == text[:1]
    mark, at = cache.snapshot(), checkpoint_of(cache)
    rows = cut(cache, (0, len(PROMPT)), (0, 0))
    assert text_of(model, text[:1], 5, prompt_cache=cache) == text[1:6]
    assert not cache.is_trimmable()
    cache.rewind(mark)
    for kept in (cache, join(blank, [rows], at, PROMPT, 300)):
        assert text_of(model, text[:1], 9, prompt_cache=kept) == text[1:10]


def test_a_file_without_a_state(tmp_path):
    model, _ = made("falcon_h1")
    cache = mlx_mtp.make_prompt_cache(model)
    text_of(model, n=1, prompt_cache=cache)
    cache.layers[0].parts = cache.layers[0].parts[:1]
    mlx_mtp.save_prompt_cache(tmp_path / "cache", cache)
    with pytest.raises(ValueError, match=r"damaged \(it has other arrays than its positions need\)"):
        mlx_mtp.load_prompt_cache(tmp_path / "cache", model)


def test_a_list_of_mlx_lms_empty_caches():
    model, text = made("falcon_h1")
    given = mlx_lm_caches_of(model)
    assert text_of(model, prompt_cache=given) == text
    assert from_mlx_lm(model, given) is given[0]
    with pytest.raises(ValueError, match="its number of layers differs"):
        text_of(model, prompt_cache=mlx_lm_caches_of(model)[:-1])


@pytest.mark.filterwarnings("ignore:.*num_key_value_heads")
def test_rows_are_checked(tmp_path, own_cache):
    """Also after a part of them was kept."""
    path, _ = headless(tmp_path, CONFIGS["mamba2"])
    model = mlx_mtp.load_model(path, mtp=False)
    assert mlx_mtp.check_rows(model, PROMPT, contexts=(0, 20)) == {1: RowFinding(16), 20: RowFinding(16)}


@pytest.mark.filterwarnings("ignore:.*num_key_value_heads")
def test_a_drafter_cannot_have_states(tmp_path):
    target, _ = headless(tmp_path / "target", CONFIGS["starcoder2"])
    small, _ = headless(tmp_path / "small", CONFIGS["mamba2"])
    with pytest.raises(
        ValueError, match=r"^draft_model=.*: omit it; rejected drafts would stay in its layers' states$"
    ):
        mlx_mtp.load_model(target, draft_model=small)
