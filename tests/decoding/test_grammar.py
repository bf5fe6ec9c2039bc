"""Text under a grammar is that of plain decoding under its masks: greedy, seeded, with any drafts, replayed."""

import itertools
import json
import random

import families
import grammars
import mlx.core as mx
import numpy as np
import pytest
from draws import Draws, distribution
from masked import PROMPT, SAMPLING, apply, of_letters, ours, reference
from mlx_lm.sample_utils import make_logits_processors
from plans import Listed, follow
from stand_in import standing_in, switched_on
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.kernels import masked
from mlx_mtp.tuning.plan import Plan

EACH = Plan("heads", 3, stepwise=True)
PATTERNS = {"free": "(a|b|c)+", "forced": "((a|b)abcabc)+", "words": "(cab{1,3}|aa|bc)*", "short": "c(a|bb)c{2,3}"}
PENALTIES = {"repetition_penalty": 1.8, "logit_bias": {0: 3.0, 4: -2.0}}


@pytest.fixture(autouse=True)
def _own(recorded_at_once, own_cache):
    """Separate costs, and recording at the first occurrence."""


PRODUCT = [*itertools.product(PATTERNS, SAMPLING, (False, True))]
CASES = [case for case in itertools.product(range(4), (False, True), (0, 0.3)) if case[0] or not case[2]]


@pytest.mark.parametrize(("pattern", "how", "penalties"), sampled(PRODUCT[::9], PRODUCT))
def test_text_is_that_of_plain_masked_decoding(tiny_models, pattern, how, penalties):
    model, plain = tiny_models(2)
    made, options, n = of_letters(PATTERNS[pattern]), SAMPLING[how], 14
    processors = make_logits_processors(**PENALTIES) if penalties else []
    expected = reference(plain, PROMPT, n, made, processors, **options)
    for k, replay, p_min in sampled([(0, False, 0), (2, False, 0.3), (3, True, 0)], CASES):
        how = {"compile_cycles": replay, "draft_p_min": p_min, "logits_processors": processors}
        assert ours(model, n, made, k, **how, **options)[0] == expected, (k, how)
    assert ours(model, n, made, None, adaptive=True, logits_processors=processors, **options)[0] == expected


@pytest.mark.parametrize("replay", [False, True])
def test_cycles_are_built_ahead_and_replayed_by_one_record(tiny_models, replay):
    model, _ = tiny_models(2)
    model.runtime.recorder = None
    how = {"compile_cycles": replay, "grammar_drafts": 0}
    first = ours(model, 24, of_letters("(a|b|c){60}"), **how)[1]
    stats = ours(model, 24, of_letters("(ab|c|b){60}"), **how)[1]
    assert not stats.built_late
    assert stats.waits == 2 * stats.cycles
    assert bool(first.compiled_shapes) == replay
    assert stats.compiled_shapes == 0
    assert (stats.compiled_cycles >= 0.8 * stats.cycles) == replay


@pytest.mark.parametrize("how", ["seeded", "filtered"])
def test_every_plan_after_every_other(tiny_models, monkeypatch, how):
    """Drafts of the heads and of prompt lookup, with and without p_min, pauses: the same text."""
    model, plain = tiny_models(2)
    made, rng = of_letters("((a|b)abcabc)+"), random.Random(how)
    expected = reference(plain, PROMPT, 30, made, **SAMPLING[how])
    plans = [Plan("heads", 3), EACH, Plan("lookup", 5), Plan(), Plan("heads", 1), Plan("heads", 2, p_min=True)]
    for replay in (False, True):
        follow(monkeypatch, Listed([rng.choice(plans) for _ in range(60)]))
        options = {"adaptive": True, "prompt_lookup": True, "draft_p_min": 0.3, "compile_cycles": replay}
        assert ours(model, 30, made, **options, **SAMPLING[how])[0] == expected


def test_the_distribution_is_exact(tiny_models, monkeypatch):
    """All paths of draws, with their probabilities, against cacheless forwards under the masks."""
    model, plain = tiny_models(4)
    made, options, n = of_letters("(a|cb|bb)+"), {"temp": 0.8, "top_k": 3}, 3 if SWEEP else 2
    constraint, texts = grammars.constraint(made, 5), {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, p in texts.items():
            if text[-1:] == (grammars.END,):
                longer[text] = p
                continue
            logits = apply(constraint, [*text], plain(mx.array([*PROMPT, *text])[None])[:, -1])
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            for token, q in enumerate(distribution(logprobs, Sampling(**options))):
                if q:
                    longer[(*text, token)] = p * float(q)
        texts = longer
    draws, found = Draws(), {}
    draws.stand_in(monkeypatch)
    same = [lambda tokens, logits: logits]  # such cycles are built late: fewer paths
    for text, p in draws.paths(
        lambda: tuple(ours(model, n, made, 2, draft_sampling="greedy", logits_processors=same, **options)[0])
    ):
        found[text] = found.get(text, 0.0) + p
    assert found == pytest.approx(texts, abs=1e-6)


@pytest.mark.parametrize("name", sampled(["qwen3_5", "mimo_v2_flash"], families.FAMILIES))
def test_families(tmp_path, name):
    path, _, plain = families.build(name, tmp_path)
    model = mlx_mtp.load_model(path)
    made = of_letters("((a|b)abcabc)+")
    expected = reference(plain, PROMPT, 20, made)
    for replay in (False, True):
        assert ours(model, 20, made, None, compile_cycles=replay)[0] == expected


def test_logprobs_are_the_masked_ones(tiny_models):
    model, plain = tiny_models(2)
    made = of_letters("((a|b)abcabc)+")
    constraint, answer = grammars.constraint(made, 5), []
    for token, logprobs, _ in mlx_mtp.generate_step(PROMPT, model, grammar=made, max_tokens=12, logprobs=True):
        logits = apply(constraint, answer, plain(mx.array([*PROMPT, *answer])[None])[:, -1])
        assert mx.allclose(logprobs, (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0], atol=1e-4)
        answer.append(token)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [5, 64, 70])
def test_masked_logits(dtype, size):
    rng = np.random.default_rng(size)
    mask = rng.integers(-(2**31), 2**31, (3, (size + 31) // 32), dtype=np.int64).astype(np.int32)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :size]
    found = masked(mx.zeros((3, size), dtype), mx.array(mask))
    assert found.dtype == dtype
    assert (np.array(found.astype(mx.float32)) == np.where(bits == 1, 0, -np.inf)).all()


def test_an_answer_ends_at_the_end_of_text(tiny_models):
    model, plain = tiny_models(2)
    made = of_letters("c(a|bb)c{2,3}")
    for k in (0, 3):
        tokens, _ = ours(model, 99, made, k)
        assert tokens == reference(plain, PROMPT, 99, made)
        assert tokens[-1] == grammars.END
        text = "".join(grammars.LETTERS[token] for token in tokens[:-1])
        assert text in {"caccc", "cbbccc", "cacc", "cbbcc"}


@pytest.mark.parametrize("plan", sampled([None, EACH], [None, EACH, Plan("heads", 2, p_min=True), Plan()]))
def test_caches_are_as_after_any_other_stop(tiny_models, monkeypatch, plan):
    """A stop at each token; the conversation continues with another grammar."""
    model, plain = tiny_models(2)
    made, other = of_letters("((a|b|c){2}abc){9}"), of_letters("(b|ca)+")
    truth = reference(plain, PROMPT, 14, made)
    for n in range(1, 14, 1 if SWEEP else 5):
        if plan:
            follow(monkeypatch, Listed([plan]))
        cache, replayed = mlx_mtp.make_prompt_cache(model), n % 2 == 0
        how = {"prompt_cache": cache, "adaptive": plan is not None, "compile_cycles": replayed, "draft_p_min": 0.01}
        steps = mlx_mtp.generate_step(PROMPT, model, grammar=made, **how)
        tokens = [next(steps)[0] for _ in range(n)]
        steps.close()
        assert tokens == truth[:n]
        assert cache.tokens == PROMPT + tokens[:-1]
        assert ours(model, 10, other, prompt=tokens[-1:], prompt_cache=cache)[0] == reference(
            plain, PROMPT + tokens, 10, other
        )


class Late(grammar.Matcher):
    """Fails at the mask after a given number of tokens."""

    fails_at = 7

    def fill(self, *rows, **known):
        if self.size >= self.fails_at:
            raise grammar.GrammarError(f"grammar: too complex (after {self.size} tokens)")
        return super().fill(*rows, **known)


@pytest.mark.parametrize("k", [0, 3])
def test_an_error_of_the_matcher_ends_the_answer_with_it(tiny_models, monkeypatch, k):
    model, plain = tiny_models(2)
    monkeypatch.setattr("mlx_mtp.grammar.constraint.Matcher", Late)
    made, tokens = of_letters("((a|b)abcabc){9}"), []
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step(
        PROMPT, model, grammar=made, adaptive=False, num_draft_tokens=k, prompt_cache=cache, max_tokens=20
    )
    with pytest.raises(grammar.GrammarError, match="too complex"):
        tokens += (token for token, *_ in steps)
    assert len(tokens) >= Late.fails_at
    assert cache.tokens == PROMPT + tokens[:-1]
    monkeypatch.undo()
    assert tokens == reference(plain, PROMPT, len(tokens), made)
    free = of_letters("(a|b|c)+")
    assert ours(model, 8, free, k, prompt=tokens[-1:], prompt_cache=cache)[0] == reference(
        plain, PROMPT + tokens, 8, free
    )


def test_mistakes_are_one_line_at_the_call(tiny_models):
    model, _ = tiny_models(2)
    for made in (grammar.regex("a"), "a", grammar.regex("a", tokenizer=object())):
        with pytest.raises(ValueError, match=r"tokenizer|grammar") as e:
            mlx_mtp.generate_step(PROMPT, model, grammar=made)
        assert "\n" not in str(e.value)


def test_a_kernel_is_refused_in_the_middle(tiny_models):
    model, _ = tiny_models(5, vocab_size=16, head_dim=32)
    made = of_letters("((a|b)abcabc)+")
    want = ours(model, 16, made)[0]
    for n in (3, 12):
        left = [n]

        def refuse(op, _, left=left):
            left[0] -= op == "add_norm"
            return "evaluate" if op == "add_norm" and left[0] == 0 else None

        with standing_in(refuse), pytest.warns(UserWarning, match="fails with"):
            assert ours(switched_on(model), 16, made)[0] == want


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load(grammars.demo_path())


def test_text_functions_take_the_tokenizer_themselves(demo):
    model, tokenizer = demo
    made = grammar.json_schema({"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2})
    text = mlx_mtp.generate(model, tokenizer, "def f():", grammar=made, max_tokens=40)
    assert set(json.loads(text)) <= {"red", "green"}
    *_, last = mlx_mtp.stream_generate(model, tokenizer, "def f():", grammar=made, max_tokens=40)
    assert last.finish_reason == "stop"
    *_, last = mlx_mtp.stream_generate(model, tokenizer, "def f():", grammar=made, max_tokens=3)
    assert last.finish_reason == "length"


@pytest.mark.parametrize(
    ("k", "most"), sampled([(0, 7), (3, 15), (None, None)], itertools.product((0, 1, 3, None), (1, 7, 15)))
)
def test_forced_tokens_are_only_drafts(tiny_models, k, most):
    """The text is the same; the counters of the heads and of the grammar are apart."""
    model, plain = tiny_models(2)
    made, how = of_letters("((a|b)abcabc){9}"), SAMPLING["seeded"]
    expected = reference(plain, PROMPT, 20, made, **how)
    for replay in (False, True):
        tokens, stats = ours(model, 20, made, k, grammar_drafts=most, compile_cycles=replay, **how)
        assert tokens == expected
        assert stats.grammar_drafted >= stats.grammar_accepted > 0
        assert stats.tokens_per_cycle > (1.6 if most == 1 and k != 3 else 2)  # with one draft at most 2
        assert not stats.built_late
        assert k or not any(stats.drafted) or k is None


def test_without_drafts_of_the_grammar(tiny_models):
    model, _ = tiny_models(2)
    for k, most in ((0, None), (3, 0), (0, 0)):
        assert ours(model, 12, of_letters("((a|b)abcabc){9}"), k, grammar_drafts=most)[1].grammar_drafted == 0
    for most in (-1, 16, 2.0, True):
        with pytest.raises(ValueError, match="grammar_drafts="):
            ours(model, 12, of_letters("(a|b)+"), 3, grammar_drafts=most)


def test_long_keys_need_few_passes(demo):
    """The demo, six long boolean keys with fixed separators: at least 5 tokens a pass with up to 7 drafts."""
    model, tokenizer = demo
    keys = [
        f"{verb}_the_{noun}_of_this_person" for verb in ("checks", "prints") for noun in ("address", "name", "age")
    ]
    schema = {"type": "object", "properties": {key: {"type": "boolean"} for key in keys}, "required": keys}
    made, stats = grammar.json_schema({**schema, "additionalProperties": False}, whitespace=None), mlx_mtp.Stats()
    options = {"max_tokens": 200, "adaptive": False, "grammar_drafts": 7, "stats": stats}
    text = mlx_mtp.generate(model, tokenizer, "def f():", grammar=made, num_draft_tokens=0, **options)
    assert [*json.loads(text)] == keys
    assert stats.tokens_per_cycle >= 5


def test_drafts_of_the_grammar_while_the_heads_pause_and_resume(tiny_models, monkeypatch):
    """Between forced runs each plan of the heads: they read the forced rows, in the step or later."""
    model, plain = tiny_models(2)
    made = of_letters("((a|b|c){5}abcabc){9}")
    expected = reference(plain, PROMPT, 40, made)
    plans = [
        Plan("heads", 3),
        Plan(),
        Plan("lookup", 4),
        Plan(),
        Plan(),
        Plan("heads", 2),
        Plan("heads", 1, p_min=True),
    ]
    for replay in (False, True):
        follow(monkeypatch, Listed(plans))
        options = {"adaptive": True, "prompt_lookup": True, "draft_p_min": 0.3, "compile_cycles": replay}
        tokens, stats = ours(model, 40, made, 3, **options)
        assert tokens == expected
        assert stats.grammar_accepted > 0 < sum(stats.drafted)
