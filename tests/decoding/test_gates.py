"""Text under a grammar that applies to a part of the answer is that of plain decoding under its masks."""

import itertools

import grammars
import pytest
from masked import PROMPT, SAMPLING, of_letters, ours, reference
from sweep import sampled

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.grammar import Gate

GATES = {
    "waits": Gate(after=("c",)),
    "waits twice": Gate(after=("c", "b")),
    "either": Gate(opens="c", after=("b",)),
    "instead": Gate(instead=("c",)),
    "repeats": Gate(after=("b",), optional=True, repeats=True),
    "begun": Gate(begun="aab"),
}
N = 24


@pytest.fixture(autouse=True)
def _own(recorded_at_once, own_cache):
    """Separate costs, and recording at the first occurrence."""


def gated(model, gate):
    made = of_letters("(a|b)abca(b|ab)")
    return grammar.compiled(made, None, model.vocab_size).behind(GATES[gate])


PRODUCT = [*itertools.product(GATES, ("greedy", "seeded", "filtered"))]


@pytest.mark.parametrize(("gate", "how"), sampled(PRODUCT[1::3], PRODUCT))
def test_text_is_that_of_plain_masked_decoding(tiny_models, gate, how):
    model, plain = tiny_models(2)
    made, options = gated(model, gate), SAMPLING[how]
    expected = reference(plain, PROMPT, N, made, **options)
    for k, replay in sampled([(3, True)], [(0, False), (3, True)]):
        assert ours(model, N, made, k, compile_cycles=replay, **options)[0] == expected, k
    assert ours(model, N, made, None, adaptive=True, **options)[0] == expected


def test_a_batch_has_the_texts_that_each_sequence_has_alone(tiny_models):
    model, plain = tiny_models(2)
    made = [*(gated(model, gate) for gate in GATES), None]
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, num_draft_tokens=3, adaptive=False, temp=1.2)
    answers = {uid: [] for uid in batch.insert([PROMPT] * len(made), grammars=made, seeds=[5] * len(made))}
    while responses := batch.next_generated():
        for each in responses:
            answers[each.uid].append(each.token)
    batch.close()
    expected = [reference(plain, PROMPT, N, each, **SAMPLING["seeded"]) for each in made[:-1]]
    assert [*answers.values()][:-1] == expected


def test_the_grammar_applies_in_these_texts(tiny_models):
    model, _ = tiny_models(2)
    for gate in ("waits", "repeats"):
        text = "".join(grammars.LETTERS[t] for t in ours(model, N, gated(model, gate), **SAMPLING["seeded"])[0])
        assert any(part in text for part in ("aabca", "babca"))
