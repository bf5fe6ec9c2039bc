"""Earlier choices that are proposed again are only drafts: the text is that of plain decoding under masks."""

import itertools

import pytest
from masked import PROMPT, SAMPLING, of_letters, ours, reference
from plans import Listed, follow
from sweep import sampled

import mlx_mtp
from mlx_mtp.grammar import matcher
from mlx_mtp.tuning.plan import Plan

PATTERNS = {"free": "(a|b|c)+", "forced": "((a|b)abcabc)+", "words": "((cab{1,3}|aa|bc)c){9,}"}
PRODUCT = [*itertools.product(PATTERNS, SAMPLING, (0, 1, 3, None), (False, True))]
FEW = [("free", "greedy", 0, False), ("free", "seeded", 3, True), ("forced", "filtered", None, False)]


@pytest.fixture(autouse=True)
def _of_any_mask(monkeypatch, recorded_at_once, own_cache):
    """Store choices under all masks of the tiny vocabulary, with separate costs, and record at once."""
    monkeypatch.setattr(matcher, "MOST_SHARE", 1)


@pytest.mark.parametrize(("pattern", "how", "k", "replay"), sampled(FEW, PRODUCT))
def test_the_text_is_that_of_plain_masked_decoding(tiny_models, monkeypatch, pattern, how, k, replay):
    model, plain = tiny_models(2)
    made, n, drafted = of_letters(PATTERNS[pattern]), 24, []
    expected = reference(plain, PROMPT, n, made, **SAMPLING[how])
    for most in (5, 0):
        monkeypatch.setattr(matcher, "MOST_REPEATED", most)
        options = {"grammar_drafts": 15, "compile_cycles": replay, "adaptive": k is None}
        tokens, stats = ours(model, n, made, k, **options, **SAMPLING[how])
        assert tokens == expected
        drafted.append(stats.grammar_drafted)
    assert drafted[0] > drafted[1] or (pattern, how, k) not in {("free", "greedy", 0), ("free", "seeded", 3)}


def test_each_plan_and_stop(tiny_models, monkeypatch):
    """Between plans of the heads and of lookups; a stop at a token, and an answer that continues from the cache."""
    model, plain = tiny_models(2)
    made = of_letters("((a|b|c){3}abc)+")
    expected = reference(plain, PROMPT, 30, made)
    heads = [Plan("heads", 3), Plan("heads", 2, stepwise=True), Plan("heads", 1, p_min=True)]
    plans = [heads[0], Plan(), heads[1], Plan("lookup", 4), heads[2]]
    options = {"adaptive": True, "prompt_lookup": True, "draft_p_min": 0.3}
    for n in (30, *sampled([9, 14], [*range(1, 30)])):
        follow(monkeypatch, Listed(plans))
        cache = mlx_mtp.make_prompt_cache(model)
        tokens, stats = ours(model, n, made, 3, prompt_cache=cache, **options)
        assert tokens == expected[:n]
        assert cache.tokens == [*PROMPT, *tokens[:-1]]
        again = ours(model, 8, made, 3, prompt=tokens[-1:], prompt_cache=cache, **options)[0]
        assert again == reference(plain, [*PROMPT, *tokens], 8, made)
    assert stats.grammar_drafted


def test_sequences_of_a_batch_have_their_own(tiny_models):
    model, _ = tiny_models(2)
    prompts, patterns = [PROMPT, PROMPT[3:], PROMPT[:4]], ["(a|b|c)+", "(cab{1,3}|aa|bc)*", None]
    grammars = [pattern and of_letters(pattern) for pattern in patterns]
    alone = [
        [token for token, *_ in mlx_mtp.generate_step(prompt, model, grammar=made, max_tokens=16, num_draft_tokens=0)]
        for prompt, made in zip(prompts, grammars, strict=True)
    ]
    batch, stats, found = mlx_mtp.BatchGenerator(model, max_tokens=16), [mlx_mtp.Stats() for _ in prompts], {}
    batch.insert(prompts, grammars=grammars, stats=stats)
    while responses := batch.next_generated():
        for response in responses:
            found.setdefault(response.uid, []).append(response.token)
    assert [found[uid] for uid in sorted(found)] == alone
    assert stats[0].grammar_drafted > 0 == stats[2].grammar_drafted
