"""Masks depend on the followed tokens alone, drafts also on masks made before; no error ends an answer silently."""

import random

import grammars
import numpy as np
import pytest

from mlx_mtp import grammar
from mlx_mtp.grammar.library import llguidance

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["red", "green"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
LISTS = 'start: "[" (item ("," item)*)? "]"\nitem: /[a-z]{1,5}/ | start'


def letters(pattern):
    return grammars.constraint(grammar.regex(pattern, tokenizer=grammars.letters()), 5)


@pytest.mark.parametrize("made", [grammar.json_schema(RECORD), grammar.json(), grammar.lark(LISTS)])
def test_masks_depend_on_the_answer_alone(made):
    """Each state of a random walk, with good and bad drafts, equals that of a new matcher."""
    constraint, rng = grammars.constraint(made), random.Random(1)
    used, answer = constraint.matcher(), []
    for _ in range(60):
        drafts, masks = [], np.full((4, constraint.words), -1, np.int32)
        for _ in range(3):  # walks that are often allowed
            possible = grammars.allowed(grammars.mask(constraint, [*answer, *drafts]))
            drafts.append(rng.choice(possible) if rng.random() < 0.7 else rng.randrange(2048))
            if drafts[-1] not in possible or drafts[-1] in constraint.eos:
                break
        used.follow(answer)
        assert used.drafts(7) == _fresh(constraint, answer).drafts(7)
        fits = used.fill(masks, drafts)
        again = masks.copy()
        again[fits + 1 :] = -1
        assert used.fill(again, drafts, known=rng.randrange(fits + 2)) == fits  # rows that are known already
        assert (again == masks).all()
        right = 0
        while right < len(drafts) and grammar.matcher.allows(masks[right], drafts[right]):
            assert (masks[right] == grammars.mask(constraint, [*answer, *drafts[:right]])).all()
            if drafts[right] in constraint.eos:
                break
            right += 1
        assert (masks[right] == grammars.mask(constraint, [*answer, *drafts[:right]])).all()
        assert (masks[right + 1 :] == -1).all()
        assert fits == right + (right < len(drafts) and grammar.matcher.allows(masks[right], drafts[right]))
        possible = [t for t in grammars.allowed(masks[0]) if t not in constraint.eos]
        if not possible:
            used.restart()
            answer = []
        else:
            answer = [*answer, *drafts[:right]] if rng.random() < 0.5 else [*answer, rng.choice(possible)]
            answer = [token for token in answer if token not in constraint.eos]


def _fresh(constraint, answer):
    matcher = constraint.matcher()
    matcher.follow(answer)
    return matcher


def test_a_forced_token_is_the_tokenizers_own():
    a, b, c, ab, end = range(5)
    constraint = letters("abc")
    assert grammars.allowed(grammars.mask(constraint, [])) == [ab]
    assert constraint.matcher().drafts(7) == [ab, c, end]
    assert constraint.matcher().drafts(2) == [ab, c]
    matcher, masks = constraint.matcher(), np.full((3, 1), -1, np.int32)
    matcher.fill(masks, [a, b])  # fits the bytes, but is not the tokenizer's own
    assert [*masks[:, 0]] == [1 << ab, -1, -1]


def test_the_end_of_text_is_allowed_where_a_value_is_complete():
    constraint = letters("(a|b)*")
    assert grammars.END in grammars.allowed(grammars.mask(constraint, []))
    masks = np.full((3, 1), -1, np.int32)
    constraint.matcher().fill(masks, [0, grammars.END])
    assert masks[2] == -1
    assert letters("ab").matcher().drafts(9)[-1] == grammars.END
    assert grammars.allowed(grammars.mask(letters("ab"), [3])) == [grammars.END]


def test_drafts_keep_the_style_of_separators():
    tokenizer = grammars.demo_tokenizer()
    constraint = grammars.constraint(grammar.json_schema(RECORD, whitespace=4))

    def guess(text):
        matcher = constraint.matcher()
        matcher.follow(tokenizer.encode(text, add_special_tokens=False))
        return tokenizer.decode(matcher.drafts(15))

    assert guess("") == '{"name":'
    assert guess('{"name": "x"').startswith(', "tags":')
    assert guess('{"name":"x"').startswith(',"tags":')
    assert '"tags"' not in guess('{ "name" :"x"')  # neither style: only what the grammar forces


def test_a_forbidden_token_is_an_error_in_one_line():
    matcher = letters("abc").matcher()
    with pytest.raises(grammar.GrammarError, match="1 tokens") as e:
        matcher.follow([2])
    assert "\n" not in str(e.value)


def _walk(constraint, tokens):
    matcher, masks = constraint.matcher(), np.full((1, constraint.words), -1, np.int32)
    for i in range(len(tokens)):
        matcher.follow(tokens[:i])
        matcher.fill(masks)


def test_a_matcher_in_error_is_an_error_not_an_end(monkeypatch):
    """Its mask allows the end of text only, which would end the answer silently."""
    from llguidance import LLParserLimits

    tight = llguidance()._replace(limits=LLParserLimits(step_max_items=40, verbose_errors=False))
    monkeypatch.setattr("mlx_mtp.grammar.constraint.llguidance", lambda: tight)
    constraint = grammars.constraint(grammar.lark("start: (a | b)+\na: /[a-z]/ a?\nb: /[a-y]/ b? a?"))
    tokens = grammars.demo_tokenizer().encode("abcdefghijklmnop", add_special_tokens=False)
    with pytest.raises(grammar.GrammarError, match=r"grammar: .*tokens") as e:
        _walk(constraint, tokens)
    assert "\n" not in str(e.value)


def test_a_slow_mask_is_an_error_that_states_the_limit(monkeypatch):
    matcher = letters("abc").matcher()
    matcher.follow([3])
    monkeypatch.setattr("mlx_mtp.grammar.matcher.MASK_SECONDS", -1.0)
    with pytest.raises(
        grammar.GrammarError,
        match=r"grammar: a mask took \d\.\d s; the limit is -1.0 s: use a simpler grammar \(after 1 t",
    ) as e:
        matcher.fill(np.full((1, 1), -1, np.int32))
    assert "\n" not in str(e.value)
