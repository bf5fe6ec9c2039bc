"""In a batch each sequence has the text that it has alone, with a grammar or without."""

import itertools

import grammars
import mlx.core as mx
import pytest
from sweep import sampled

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding import redraft

PROMPTS = [[1, 2, 3, 0, 2], [2, 2, 1, 3, 0, 1, 2, 0], [3, 1], [0, 2, 1, 1]]
PATTERNS = ["((a|b)abcabc){9}", None, "(a|b|c)+", "(c(a|b))*abca"]
N = 14


@pytest.fixture(autouse=True)
def _own(recorded_at_once, own_cache):
    """Separate costs, and recording at the first occurrence."""


def made(pattern):
    return pattern and grammar.regex(pattern, tokenizer=grammars.letters())


def alone(model, prompt, pattern, n=N, **options):
    steps = mlx_mtp.generate_step(prompt, model, grammar=made(pattern), max_tokens=n, num_draft_tokens=0, **options)
    return [token for token, *_ in steps]


def drain(batch, answers):
    while responses := batch.next_generated():
        for response in responses:
            answers.setdefault(response.uid, []).append(response)
    return answers


def tokens_of(answers):
    return [[response.token for response in answers[uid]] for uid in sorted(answers)]


CASES = [*itertools.product((False, True), (0, 1, 3), ({}, {"temp": 1.0, "seed": 4}), (0, None), (0.0, 0.3))]
CASES = [case for case in CASES if case[1] or not case[4]]
FEW = [(False, 3, {}, None, 0.0), (True, 1, CASES[-1][2], None, 0.0), (True, 3, {}, 0, 0.0), (False, 3, {}, 0, 0.3)]


@pytest.mark.parametrize(("replay", "k", "sampling", "most", "p_min"), sampled(FEW, CASES))
def test_each_sequence_has_the_text_that_it_has_alone(tiny_models, replay, k, sampling, most, p_min):
    model, _ = tiny_models(2)
    expected = [alone(model, prompt, pattern, **sampling) for prompt, pattern in zip(PROMPTS, PATTERNS, strict=True)]
    options = {"num_draft_tokens": k, "compile_cycles": replay, "draft_p_min": p_min, **sampling}
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, adaptive=False, grammar_drafts=most, **options)
    stats = [mlx_mtp.Stats() for _ in PROMPTS]
    batch.insert(PROMPTS[:3], grammars=[made(pattern) for pattern in PATTERNS[:3]], stats=stats[:3])
    answers: dict = {}
    for response in itertools.chain.from_iterable(batch.next()[1] for _ in range(3)):
        answers.setdefault(response.uid, []).append(response)
    batch.insert(PROMPTS[3:], grammars=[made(PATTERNS[3])], stats=stats[3:])
    assert tokens_of(drain(batch, answers)) == expected
    assert all(0 < each.wait_time <= each.decode_time for each in stats)
    assert (stats[0].grammar_accepted > 0) == (most is None and k > 0)
    assert stats[1].grammar_drafted == 0
    # Cycles whose drafts p_min cuts are not recorded, and these answers may have no other kind twice.
    assert not replay or p_min or any(each.compiled_cycles for each in stats)


def test_caches_are_at_rest_at_the_end(tiny_models):
    model, _ = tiny_models(2)
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, adaptive=False)
    batch.insert(PROMPTS, grammars=[made(pattern) for pattern in PATTERNS])
    answers = drain(batch, {})
    for uid, prompt in enumerate(PROMPTS):
        tokens = [response.token for response in answers[uid]]
        cache = answers[uid][-1].prompt_cache
        assert cache.tokens == prompt + tokens[:-1]
        more = alone(model, tokens[-1:], "(b|ca)+", 8, prompt_cache=cache)
        assert more == alone(model, prompt + tokens, "(b|ca)+", 8)


@pytest.mark.parametrize("method", ["fill", "drafts"])
def test_an_error_ends_its_own_sequence(tiny_models, monkeypatch, method):
    model, _ = tiny_models(2)
    expected = alone(model, PROMPTS[2], PATTERNS[2])
    real = getattr(grammar.Matcher, method)

    def failing(self, *args, **known):
        if self.size > 5 and self.start == len(PROMPTS[0]):
            raise grammar.GrammarError("grammar: too complex")
        return real(self, *args, **known)

    monkeypatch.setattr(grammar.Matcher, method, failing)
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, adaptive=False)
    batch.insert([PROMPTS[0], PROMPTS[2]], grammars=[made(PATTERNS[0]), made(PATTERNS[2])])
    answers: dict = {}
    with pytest.raises(grammar.GrammarError, match="too complex"):
        drain(batch, answers)
    assert batch.failed == 0
    assert len(answers[0]) >= 6
    drain(batch, answers)
    assert [response.token for response in answers[1]] == expected


def test_a_grammar_of_the_whole_batch(tiny_models):
    model, _ = tiny_models(2)
    shared = made("(ab|c)+")
    batch = mlx_mtp.BatchGenerator(model, max_tokens=10, grammar=shared)
    batch.insert(PROMPTS[:2])
    assert tokens_of(drain(batch, {})) == [alone(model, prompt, "(ab|c)+", 10) for prompt in PROMPTS[:2]]
    for wrong in (["a"], [grammar.regex("a")], [None, None]):
        with pytest.raises(ValueError, match="grammar") as e:
            batch.insert(PROMPTS[:1], grammars=wrong)
        assert "\n" not in str(e.value)


def test_batch_generate():
    model, tokenizer = mlx_mtp.load(grammars.demo_path())
    how, prompts = {"grammar": grammar.json_schema({"enum": ["red", "green"]}), "max_tokens": 12}, ["def f():", "if"]
    texts = mlx_mtp.batch_generate(model, tokenizer, prompts, **how).texts
    assert texts == [mlx_mtp.generate(model, tokenizer, prompt, **how) for prompt in prompts]


@pytest.mark.parametrize("k", sampled([2], [0, 2]))
def test_samplers_that_evaluate_their_logits(tiny_models, k):
    """The masks are written before a caller's code sees the logits, alone and in a batch."""
    model, _ = tiny_models(2)

    def likeliest(logprobs):
        return mx.array([int(mx.argmax(logprobs, axis=-1).item())])

    expected = [alone(model, prompt, PATTERNS[0]) for prompt in PROMPTS[:2]]
    assert alone(model, PROMPTS[0], PATTERNS[0], sampler=likeliest) == expected[0]
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, adaptive=False, num_draft_tokens=k, sampler=likeliest)
    batch.insert(PROMPTS[:2], grammars=[made(PATTERNS[0])] * 2)
    assert tokens_of(drain(batch, {})) == expected


@pytest.mark.parametrize(("own", "together"), [(5, 2), (2, 5)])
def test_forced_drafts_keep_both_limits(tiny_models, monkeypatch, own, together):
    """That of the option, and that of several sequences."""
    model, _ = tiny_models(2)
    monkeypatch.setattr(redraft, "most_together", lambda _: together)
    stats = mlx_mtp.Stats()
    how = {"adaptive": False, "num_draft_tokens": 1, "grammar_drafts": own, "stats": stats}
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, **how)
    batch.insert(PROMPTS[:2], grammars=[made("(abcabc){9}"), made("(cabb){9}")])
    drain(batch, {})
    assert max(stats.lengths) == 2


@pytest.mark.parametrize("p_min", [0.0, 1e-6])
def test_samplers_see_only_allowed_tokens(tiny_models, p_min):
    """In the row of the first draft, too, whose mask is written once the draft is read: it forbids the end."""
    model, _ = tiny_models(2)
    masked = []

    def watching(logprobs):
        masked.append(bool(mx.isinf(logprobs).any()))
        return mx.argmax(logprobs, axis=-1)

    how = {"num_draft_tokens": 1, "draft_p_min": p_min, "grammar_drafts": 0, "adaptive": False, "sampler": watching}
    batch, stats = mlx_mtp.BatchGenerator(model, max_tokens=99, **how), [mlx_mtp.Stats() for _ in PROMPTS[:2]]
    batch.insert(PROMPTS[:2], grammars=[made("(a|b|c){99}")] * 2, stats=stats)
    for _ in range(6):
        batch.next()
    assert all(each.drafted[0] > 3 for each in stats)
    assert len(masked) > 16
    assert all(masked)


@pytest.mark.parametrize("pattern", ["a{99}", None])
def test_improbable_drafts_are_cut_within_each_sequences_limit(tiny_models, pattern):
    """A sequence without drafts accepts none of those that are verified for the other one."""
    model, _ = tiny_models(2)
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, adaptive=False, draft_p_min=1e-6, grammar_drafts=0)
    batch.insert(PROMPTS[:2], grammars=[made(pattern)] * 2, num_draft_tokens=[2, 0])
    answers = drain(batch, {})
    drafted = [sum(response.from_draft for response in answers[uid]) for uid in (0, 1)]
    assert drafted[0] > 0 == drafted[1]
    assert tokens_of(answers) == [alone(model, prompt, pattern) for prompt in PROMPTS[:2]]
