"""Gates: where in an answer its grammar applies, and masks that depend on the answer's tokens alone."""

import json
import random
from types import SimpleNamespace

import grammars
import numpy as np
import pytest

from mlx_mtp import grammar
from mlx_mtp.grammar import Gate, vocabulary
from mlx_mtp.grammar.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
WAITS = Gate(after=("</think>",))
EITHER = Gate(opens="<think>", after=("</think>",))
CALLS = Gate(after=("<call>",), optional=True, repeats=True)
INSTEAD = Gate(instead=("<call>",))
FRAMED = Gate(after=(r"<(?:final|answer)>",), patterns=True)
BOTH = Gate(after=("</think>", "<call>"), optional=True)
# Per gate: an answer in pieces, those that the grammar applies to in brackets, and whether it may end there.
ANSWERS = [
    (WAITS, ["hm, {no", "</think>", ('{"a": 7}', True)]),
    (EITHER, ["<think>", "so <think> it is", "</think>", ('{"a":12}', True)]),
    (EITHER, [('{"a":12}', True)]),
    (CALLS, ["I call ", "<call>", ('{"a":1}', False), " and again", "<call>", ('{"a":2}', False), " done."]),
    (CALLS, ["no call at all"]),
    (INSTEAD, ["<call>", "{free text"]),
    (Gate(opens='{"a":think>', after=("</think>",)), ['{"a":think>', "so", "</think>", ('{"a": 7}', True)]),
    (Gate(opens='{"a":think>', after=("</think>",)), [('{"a": 7}', True)]),
    (INSTEAD, [('{"a":12}', True)]),
    (FRAMED, ["<analysis>", "text", "<final>", ('{"a":3}', True)]),
    (BOTH, ["<call>", "is named", "</think>", "then", "<call>", ('{"a":4}', True)]),
    (Gate(begun='{"a": 1'), [("2}", True)]),
]


@pytest.fixture(scope="module")
def plain():
    return grammars.constraint(grammar.json_schema(SCHEMA))


def encoded(text):
    return grammars.demo_tokenizer().encode(text, add_special_tokens=False)


def fresh(constraint, answer):
    return grammars.allowed(grammars.mask(constraint, answer))


@pytest.mark.parametrize(("gate", "pieces"), ANSWERS)
def test_the_grammar_applies_to_its_part_of_the_answer(plain, gate, pieces):
    """Elsewhere all tokens are allowed but ends of text and those that pass a mark; in it, those of the grammar."""
    gated, answer, part = plain.behind(gate), [], encoded(gate.begun)
    (eos,) = plain.eos
    for piece in pieces:
        text, ends = piece if isinstance(piece, tuple) else (piece, None)
        part = part if ends is not None and len(answer) == 0 else []
        for token in encoded(text):
            allowed = fresh(gated, answer)
            assert token in allowed
            if ends is not None:
                marks = [encoded(text) for text in (gate.opens, *gate.instead) if text]
                others = {mark[len(answer)] for mark in marks if mark[: len(answer)] == answer != mark}
                assert {*allowed, *others} == {*fresh(plain, part), *others}
            answer, part = [*answer, token], [*part, token]
        if ends:
            assert fresh(gated, answer) == [eos]
    if isinstance(pieces[-1], str):
        assert eos in fresh(gated, answer)


def test_all_tokens_are_allowed_while_a_text_is_awaited(plain):
    (eos,), tokenizer = plain.eos, grammars.demo_tokenizer()
    everything = set(range(len(tokenizer)))
    assert everything - set(fresh(plain.behind(WAITS), encoded("so {"))) == {eos}
    assert everything == set(fresh(plain.behind(CALLS), encoded("so {")))
    beyond = everything - set(fresh(plain.behind(CALLS), encoded("so <call")))
    texts = [tokenizer.decode([token]) for token in beyond]
    assert texts
    assert all(text.startswith(">") and len(text) > 1 for text in texts)


def test_tokens_that_go_beyond_a_mark_complete_or_contain_it_and_more():
    tokens = [b"ab", b"abc", b"xab", b"xabc", b"b", b"bc", b"xbc", b"a", b"aabc"]
    own = SimpleNamespace(vocab_size=len(tokens), decode_bytes=lambda ids: tokens[ids[0]])
    beyond = [[tokens[token] for token in found] for found in Vocabulary(own).beyond(b"ab")]
    assert beyond == [[b"abc", b"xabc", b"aabc"], [b"abc", b"xabc", b"bc", b"aabc"]]


@pytest.mark.parametrize("gate", [CALLS, BOTH])
def test_the_end_of_an_answer_is_drafted_unless_more_may_follow(plain, gate):
    matcher = plain.behind(gate).matcher(most=4)
    matcher.follow(encoded("</think><call>") + encoded('{"a": 12'))
    assert matcher.drafts(4) == encoded("}") + ([] if gate.repeats else [*plain.eos])


@pytest.mark.parametrize(("gate", "pieces"), ANSWERS)
def test_masks_depend_on_the_tokens_alone(plain, gate, pieces):
    """Cycles with drafts of any kind, rewinds and restarts: every row is that of a matcher that saw nothing else."""
    gated, rng = plain.behind(gate), random.Random(json.dumps([gate, pieces]))
    answer = [t for piece in pieces for t in encoded(piece if isinstance(piece, str) else piece[0])]
    matcher = gated.matcher(most=15)
    for _ in range(3):
        at = 0
        while at < len(answer):
            matcher.follow(answer[:at])
            drafts = answer[at : at + rng.randrange(16)]
            if drafts and rng.random() < 0.5:
                drafts[rng.randrange(len(drafts))] = rng.randrange(2048)
            masks = np.full((len(drafts) + 1, gated.words), -1, np.int32)
            fits = matcher.fill(masks, drafts)
            for row in range(min(fits, len(drafts)) + 1):
                if row and drafts[row - 1] in gated.eos:
                    break
                assert (masks[row] == grammars.mask(gated, [*answer[:at], *drafts[:row]])).all(), row
            forced = matcher.drafts(15)
            assert not forced or forced[0] in grammars.allowed(masks[0])
            at += 1 + next((i for i, t in enumerate(drafts) if t != answer[at + i]), len(drafts))
        matcher.restart()


def test_a_begun_answer_that_does_not_fit_is_an_error(plain):
    with pytest.raises(grammar.GrammarError):
        plain.behind(Gate(begun='{"b": '))


def test_a_grammar_without_texts_is_an_error():
    with pytest.raises(grammar.GrammarError):
        grammars.constraint(grammar.lark("start: start")).behind(Gate())


def test_a_style_that_forces_too_many_bytes_is_dropped():
    for length, styles in ((4000, 2), (5000, 0)):
        schema = {"type": "object", "properties": {"a": {"const": "x" * length}}, "required": ["a"]}
        assert len(grammars.constraint(grammar.json_schema(schema)).styles) == styles


def test_parsers_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(vocabulary, "KEPT", 3)
    monkeypatch.setattr(vocabulary, "KEPT_BYTES", 10)
    some = vocabulary.Kept()
    for text in ("a", "b", "c"):
        some.put(text, text)
    assert some.get("a") == "a"
    some.put("d", "d")
    assert [text in some for text in "abcd"] == [True, False, True, True]
    some.put("e" * 9, 1)
    assert [text in some for text in ("a", "d", "e" * 9)] == [False, True, True]
    some.put("f" * 11, 2)
    assert "e" * 9 not in some
    assert some.get("f" * 11) == 2
    for text in ("\U0001f600", "\ud83d", "\u00e9\u00e9"):  # of 4, 3 and 4 bytes
        some.put(text, 3)
    assert [text in some for text in ("f" * 11, "\U0001f600", "\ud83d")] == [False, False, True]
